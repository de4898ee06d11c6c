#!/bin/sh
# Measures how often routers choose an engine that is not the best: vLLM's router 0.1.17 on the engines' own sockets, the same behind
# `kvatlas bridge --republish`, and a small router that asks kvatlas. The engines are vLLM's caches, without a GPU. Writes routers.json and
# routers.md into target/routers. Arguments are those of benches/routers/__main__.py:
#
#   benches/routers/run.sh            all scenarios, 400 requests each: about twenty minutes
#   benches/routers/run.sh --quick    60 requests each
#   benches/routers/run.sh --only gpt --seed 7
#
# What is fetched and needed is the same as for `deploy/scenario-routers.sh --only vllm`.
set -eu

cd "$(dirname "$0")/../.."
exec deploy/scenario-routers.sh --only bench-vllm "$@"
