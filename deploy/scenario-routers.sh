#!/bin/sh
# Runs kvatlas beside released routers that ask it: Dynamo's router 1.6.1 with its mocker as the engine, over NATS and over TCP. Compares
# every answer with what the workers say they hold. Arguments are those of tests/routers/__main__.py:
#
#   deploy/scenario-routers.sh                 10,000 questions: about five minutes
#   deploy/scenario-routers.sh --seed 7        another seed
#   deploy/scenario-routers.sh --short         400 questions
#
# Fetches the routers' wheels into .tools/ (about 80 MB). Without them it says so and skips.
#
#   KVATLAS_BIN       a kvatlas to test instead of target/debug/kvatlas
#   NATS_SERVER_BIN   a nats-server to use instead of one in PATH or .tools/
set -eu

cd "$(dirname "$0")/.."
root=$PWD
environment=$root/.tools/routers-python

checks="released routers"
. deploy/testing.sh

make_environment "$environment" 11
# Only what the router and the mocker need of the many dependencies: nothing of it computes anything here.
"$environment/bin/python" -c 'import dynamo.llm, uvloop, xxhash, nats' 2>/dev/null || {
    CI="" pip_install "$environment" --no-deps ai-dynamo-runtime==1.6.1 ai-dynamo==1.6.1
    CI="" pip_install "$environment" uvloop 'pydantic<=2.13.5' msgspec pyyaml packaging nats-py xxhash
}

deploy/setup.sh
need_kvatlas
NATS_SERVER_BIN=${NATS_SERVER_BIN:-$(command -v nats-server || echo "$root/.tools/nats-server")} \
    DYNAMO_PYTHON=$environment/bin/python exec python3 tests/routers "$@"
