"""A process with engines of one kind, driven by JSON lines on standard input, each answered by a line.

The first argument is {"kind": "vllm" | "vllm_hybrid" | "sglang" | "sglang_unified", "engines": [{"endpoint", "replay", "rank", "blocks", "block_size",
"buffer_steps", "hash_fn"}]}, with "model", "retention" and "at_once" for vllm_hybrid. The first line of the output is `true`, once all engines publish. A prompt is [TOKENS, SALT or null, ADAPTER or null],
and for vllm also [[TOKEN'S PLACE, IMAGE], ...].

    {"serve": [[ENGINE, PROMPT], ...]}            serves prompts                    [[blocks taken from the cache, tokens answered] of each]
    {"depths": [PROMPT, ...]}                     what the caches have now          [[[blocks held, blocks reused] of each prompt] of each engine]
    {"tiers": [PROMPT, ...]}                      where the blocks are; of "vllm"   [[[tier of each block held] of each prompt] of each engine]
    {"offload": [ENGINE, PROMPT, FIRST, TOLD]}    copies blocks to host memory; of "vllm"                                         true
    {"evict": [ENGINE, PROMPT, PLACE]}            drops a block from the pool; of "vllm"                                                  true
    {"unload": [ENGINE, PROMPT, FIRST]}           drops blocks from there; of "vllm"                                              true
    {"reset": ENGINE}                             clears the cache of an engine     true
    {"hide_removals": ENGINE}                     an engine of "vllm" or "sglang" tells nothing of what it drops any more     true
    {"proofread": true}                           compares stored events with the caches from now on                          true
    {"proofs": true}                              the counts of that; see `proofs.py`                                         [[of full attention], [of other groups]] of each engine
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def main() -> None:
    """Serves until the input ends."""
    description = json.loads(sys.argv[1])
    kind = importlib.import_module(f"{description['kind']}_engine")
    engines = [kind.Engine(**engine) for engine in description["engines"]]
    answer(True)
    readers: list[Any] = []
    for line in sys.stdin:
        command = json.loads(line)
        if "serve" in command:
            answer(serve(engines, command["serve"]))
        elif "depths" in command:
            answer([[engine.depth(*prompt) for prompt in command["depths"]] for engine in engines])
        elif "tiers" in command:
            answer([[engine.tiers(*prompt) for prompt in command["tiers"]] for engine in engines])
        elif "offload" in command:
            number, *arguments = command["offload"]
            engines[number].offload(*arguments)
            answer(True)
        elif "evict" in command:
            number, *arguments = command["evict"]
            engines[number].evict(*arguments)
            answer(True)
        elif "unload" in command:
            number, *arguments = command["unload"]
            engines[number].unload(*arguments)
            answer(True)
        elif "hide_removals" in command:
            engines[command["hide_removals"]].hides_removals = True
            answer(True)
        elif "proofread" in command:
            readers = [engine.proofread() for engine in engines]
            answer(True)
        elif "proofs" in command:
            answer([reader.counts for reader in readers])
        else:
            engines[command["reset"]].reset()
            answer(True)


def serve(engines: list[Any], orders: list[Any]) -> list[Any]:
    """Serves prompts, each engine its own in their order. Returns what came of each."""
    served: list[Any] = [None] * len(orders)
    for number, engine in enumerate(engines):
        places = [place for place, order in enumerate(orders) if order[0] == number]
        for place, outcome in zip(places, engine.serve([orders[place][1] for place in places]), strict=True):
            served[place] = outcome
    return served


def answer(value: Any) -> None:
    """Writes one line."""
    print(json.dumps(value), flush=True)


main()
