#!/bin/sh
# The comparison in one command: gets what is missing, starts kvatlas, two mock engines and the router, and prints what routing by
# kvatlas' answers saves. Arguments go to compare.py; --help lists them.
#
#   KVATLAS_BIN   a kvatlas to use instead of target/debug/kvatlas
set -eu

cd "$(dirname "$0")/../.."

deploy/setup.sh
kvatlas=${KVATLAS_BIN:-$PWD/target/debug/kvatlas}
if [ -z "${KVATLAS_BIN:-}" ]; then
    cargo build --locked
fi
environment=.tools/router-example
if ! "$environment/bin/python" -c 'import aiohttp, msgpack, zmq' 2>/dev/null; then
    rm -rf "$environment"
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check -r deploy/router-example/requirements.txt
fi
exec "$environment/bin/python" deploy/router-example/compare.py --kvatlas "$kvatlas" "$@"
