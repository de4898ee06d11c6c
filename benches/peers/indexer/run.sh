#!/bin/sh
# kvatlas beside Dynamo's standalone indexer: the same publishers, every answer compared, queries a second over HTTP. Prints two tables.
# Wants Python with pyzmq and msgspec (KVATLAS_TEST_PYTHON, or what the integration tests have made in .tools/zmq), wrk, a nats-server.
set -eu
cd "$(dirname "$0")/../../.."
deploy/setup.sh
cargo build --release --locked --quiet
(cd benches/peers && cargo build --release --locked --quiet --package kvatlas-peers-indexer)
command -v wrk >/dev/null || { echo "wrk is missing: on Debian, apt-get install wrk" >&2; exit 1; }
exec "${KVATLAS_TEST_PYTHON:-.tools/zmq/bin/python}" benches/peers/indexer/compare.py \
    --peer benches/peers/target/release/kvatlas-peers-indexer --kvatlas target/release/kvatlas "$@"
