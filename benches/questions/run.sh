#!/bin/sh
# Measures how fast routers' own clients are answered by kvatlas, and beside it by what they ask without kvatlas, in the same run:
# llm-d's index and a real Redis, a client of gRPC, and Dynamo's router and the index in it. Writes benches/questions/figures.md. Arguments are
# those of benches/questions/__main__.py:
#
#   KVATLAS_BIN=target/dist/kvatlas benches/questions/run.sh    five rounds: about ten minutes
#   benches/questions/run.sh --quick --out /tmp/figures.md         whether it works, with any build
#
# What is fetched and needed is the same as for `deploy/scenario-routers.sh`: LLMD_SOURCE or LLMD_BIN, Go, redis-server. What is missing is left out.
set -eu

cd "$(dirname "$0")/../.."
exec deploy/scenario-routers.sh --only bench-questions "$@"
