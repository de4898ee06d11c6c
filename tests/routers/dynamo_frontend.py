"""Sends requests to Dynamo's front end, and sees which of its workers serves them: one that has most of the prompt has to.

    python3 dynamo_frontend.py URL BLOCK_SIZE VOCABULARY ROUNDS SEED

Each round continues each of a few conversations by a turn. The workers' dumps before and after it say who had how much of it, and who has served it.
Prints a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import urllib.request

from dynamo_dumps import Dumps, block_hashes, held_now

URL = sys.argv[1]
SIZE, VOCABULARY, ROUNDS, SEED = map(int, sys.argv[2:6])
CHATS = 10


def complete(tokens: list[int]) -> int:
    """Has a prompt completed. Returns how many of its tokens were cached, as the front end tells; 0 where it does not."""
    prompt = " ".join(f"w{token}" for token in tokens)
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{URL}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        usage = json.load(answer)["usage"]
    assert usage["prompt_tokens"] == len(tokens), usage
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


async def main() -> None:
    """Plays the rounds."""
    dice, dumps = random.Random(SEED), Dumps()
    await dumps.start()
    chats: list[list[int]] = [[] for _ in range(CHATS)]
    counts = {"requests": 0, "with a known prefix": 0, "elsewhere": 0, "cached tokens told": 0}
    for _ in range(ROUNDS):
        before = await held_now(dumps)
        for chat in chats:
            chat += [dice.randrange(3, VOCABULARY) for _ in range(dice.randint(2 * SIZE, 4 * SIZE))]
            counts["cached tokens told"] += await asyncio.to_thread(complete, chat)
        after = await held_now(dumps)
        for chat in chats:
            hashes = block_hashes(chat, SIZE)
            had = {worker: held.depth(hashes) for worker, held in before.items()}
            has = {worker: held.depth(hashes) for worker, held in after.items()}
            served = max(has, key=lambda worker: has[worker] - had.get(worker, 0))
            most = max(had.values(), default=0)
            counts["requests"] += 1
            counts["with a known prefix"] += most > 0
            counts["elsewhere"] += had.get(served, 0) < most
    print(json.dumps(counts), flush=True)


asyncio.run(main())
