#!/bin/sh
# Runs kvatlas beside genuine engines, without a GPU: vLLM's block pool and SGLang's radix cache, with their publishers, from their
# wheels, which are fetched into .tools/ (about 375 MB, of which a megabyte is kept). Compares every answer over HTTP with what the
# caches have, and prints a line a scenario. Arguments are those of tests/engines/__main__.py:
#
#   deploy/scenario-engines.sh                     all scenarios, with seed 1: about ten minutes
#   deploy/scenario-engines.sh --seed 7 --seeds 3  the seeds 7, 8 and 9
#   deploy/scenario-engines.sh --short             six of them, once around
#   deploy/scenario-engines.sh --only restarts     those with this text in their names
#   deploy/scenario-engines.sh --outages           instead, for how long answers are not exact while a bridge or NATS restarts: eight minutes
#
# Without the wheels it says so and skips, and so it does without Python 3.11 or pip; with CI=true those two are failures.
#
#   KVATLAS_BIN       a kvatlas to test instead of target/debug/kvatlas
#   NATS_SERVER_BIN   a nats-server to use instead of one in PATH or .tools/
#   VLLM_RS           vLLM's own front end, the file vllm/vllm-rs of its wheel: without it two scenarios are skipped
#   SMG_PYTHON        a Python with SMG's packages, instead of the one that deploy/scenario-routers.sh makes: without both four are skipped
set -eu

cd "$(dirname "$0")/.."
root=$PWD
environment=$root/.tools/engines-python

checks="genuine engines"
. deploy/testing.sh

make_environment "$environment" 11
"$environment/bin/python" -c 'import msgspec, zmq, cbor2, xxhash, numpy, pydantic' 2>/dev/null ||
    pip_install "$environment" msgspec pyzmq cbor2 xxhash numpy pydantic
# Not a failure in CI either: so much cannot be fetched everywhere.
"$environment/bin/python" tests/engines/fetch.py .tools/engines || CI="" skip_all "the wheels of vLLM and SGLang could not be fetched: see what pip said above"

deploy/setup.sh
need_kvatlas
KVATLAS_ENGINES=$root/.tools/engines exec "$environment/bin/python" tests/engines "$@"
