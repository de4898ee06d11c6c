#!/bin/sh
# Measures how often routers choose an engine that is not the best, and what they keep of a million blocks: vLLM's router 0.1.17, on the engines' own
# sockets and behind `kvatlas bridge --republish`, SMG 1.13.0, Dynamo's router 1.6.1, llm-d's indexer, and a small router that asks kvatlas. The
# engines are vLLM's caches, without a GPU. Writes routers.json, routers.md and routers.svg into target/routers. Arguments are those of
# benches/routers/__main__.py:
#
#   benches/routers/run.sh                       everything, 200 requests each: about half an hour on a quiet machine
#   benches/routers/run.sh --quick               60 requests each
#   benches/routers/run.sh --only gpt --seed 7
#   benches/routers/run.sh --ways vllm,kvatlas   of vllm, republished, smg, dynamo, llmd, kvatlas and example
#
# Fetches what it needs into .tools/, as `deploy/scenario-routers.sh` does, whose variables it takes: LLMD_SOURCE is a checkout of llm-d-router, and
# LLMD_VERSION what to call it. Who cannot be had is left out, and said.
set -eu

cd "$(dirname "$0")/../.."
exec deploy/scenario-routers.sh --only bench "$@"
