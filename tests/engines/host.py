"""A process with engines of one kind, driven by JSON lines on standard input, each answered by a line.

The first argument is {"kind": "vllm" | "sglang", "engines": [{"endpoint", "replay", "rank", "blocks", "block_size", "buffer_steps",
"hash_fn"}]}. The first line of the output is `true`, once all engines publish. A prompt is [TOKENS, SALT or null, ADAPTER or null].

    {"serve": [[ENGINE, PROMPT], ...]}            serves prompts                    true
    {"depths": [PROMPT, ...]}                     what the caches have now          [[depth of each prompt] of each engine]
    {"reset": ENGINE}                             clears the cache of an engine     true
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
    for line in sys.stdin:
        command = json.loads(line)
        if "serve" in command:
            for engine, prompt in command["serve"]:
                engines[engine].serve(*prompt)
            answer(True)
        elif "depths" in command:
            answer([[engine.depth(*prompt) for prompt in command["depths"]] for engine in engines])
        else:
            engines[command["reset"]].reset()
            answer(True)


def answer(value: Any) -> None:
    """Writes one line."""
    print(json.dumps(value), flush=True)


main()
