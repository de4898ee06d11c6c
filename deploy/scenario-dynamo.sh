#!/bin/sh
# Runs kvatlas beside genuine workers of Dynamo 1.6.1 (its mocker), without a GPU. Each is followed twice: by the replay of its own events, and by
# Dynamo's event plane with discovery, over TCP with ZeroMQ and over NATS, with records in files and in etcd. Both have to give the same answers, exactly. Arguments are those of
# tests/dynamo/__main__.py:
#
#   deploy/scenario-dynamo.sh            150 prompts for each check: about eight minutes
#   deploy/scenario-dynamo.sh --short    30 prompts
#   deploy/scenario-dynamo.sh --seed 7   another seed
#
# Fetches Dynamo's wheels into .tools/ (about 80 MB). What cannot be had is skipped, and said.
#
#   KVATLAS_BIN       a kvatlas to test instead of target/debug/kvatlas
#   NATS_SERVER_BIN   a nats-server to use instead of one in PATH or .tools/
#   ETCD_BIN          an etcd to use instead of one in PATH, for Dynamo's records; on Debian: apt-get install etcd-server
set -eu

cd "$(dirname "$0")/.."
root=$PWD

checks="Dynamo's workers"
. deploy/testing.sh

deploy/setup.sh
need_kvatlas
export NATS_SERVER_BIN="${NATS_SERVER_BIN:-$(command -v nats-server || echo "$root/.tools/nats-server")}"
environment=$root/.tools/routers-python
make_environment "$environment" 11
# Only what the mocker and the router need of the many dependencies: nothing of it computes anything here.
"$environment/bin/python" -c 'import dynamo.llm, uvloop' 2>/dev/null || {
    CI="" pip_install "$environment" --no-deps ai-dynamo-runtime==1.6.1 ai-dynamo==1.6.1
    CI="" pip_install "$environment" uvloop 'pydantic<=2.13.5' msgspec pyyaml packaging
}
need_etcd
DYNAMO_PYTHON=$environment/bin/python exec python3 tests/dynamo "$@"
