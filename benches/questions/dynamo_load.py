"""Asks Dynamo's own router how much of prompts its workers have: with a remote indexer, and with the index in itself.

    python3 dynamo_load.py BLOCK_SIZE VOCABULARY

Runs as a process of Dynamo's runtime: discovery and planes come from its environment. A line of JSON comes in, and one goes out:

    {"blocks": N, "prompts": N}                              serves so many prompts; {}
    {"index": "remote" | "own", "count": N, "flight": N}    {"per_second", "p50_us", "p99_us", "failed"}
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from typing import Any

from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime, dynamo_worker

SIZE, VOCABULARY = map(int, sys.argv[1:3])
PATIENCE = 60.0


async def depth(router: KvRouter, tokens: list[int]) -> int:
    """The most blocks of a prompt that a worker has."""
    answer = await router.get_overlap_scores(tokens)
    return max((worker["device_blocks"] for worker in answer["workers"]), default=0)


async def serve(routers: dict[str, KvRouter], prompts: list[list[int]]) -> None:
    """Has workers cache the prompts, and waits until both indexes know them."""
    for tokens in prompts:
        stream = await routers["own"].generate(tokens, "m", stop_conditions={"max_tokens": 1})
        async for _ in stream:
            pass
    for router in routers.values():
        for tokens in prompts:
            deadline = time.monotonic() + PATIENCE
            # The mocker may keep the last block to itself.
            while (known := await depth(router, tokens)) < len(tokens) // SIZE - 1:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{known} of {len(tokens) // SIZE} blocks are known")
                await asyncio.sleep(0.05)


async def measure(router: KvRouter, prompts: list[list[int]], count: int, flight: int) -> dict[str, Any]:
    """Asks for each prompt in turn, with so many questions in flight, and expects the same answer each time."""
    expected = [await depth(router, tokens) for tokens in prompts]
    times: list[float] = []
    failed = 0
    places = iter(range(count))

    async def ask() -> None:
        nonlocal failed
        for place in places:
            begun = time.perf_counter()
            found = await depth(router, prompts[place % len(prompts)])
            times.append(time.perf_counter() - begun)
            failed += found != expected[place % len(prompts)]

    begun = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(flight)))
    took = time.perf_counter() - begun
    times.sort()
    p50, p99 = (1e6 * times[len(times) * part // 100] for part in (50, 99))
    return {"per_second": count / took, "p50_us": p50, "p99_us": p99, "failed": failed}


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Does what standard input says."""
    endpoint, dice = runtime.endpoint("dynamo.backend.generate"), random.Random(1)
    routers = {
        "remote": KvRouter(endpoint, SIZE, KvRouterConfig(use_remote_indexer=True)),
        "own": KvRouter(endpoint, SIZE, KvRouterConfig()),
    }
    # They look for workers.
    await asyncio.sleep(3)
    prompts: list[list[int]] = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        answer: dict[str, Any] = {}
        if "blocks" in order:
            tokens = order["blocks"] * SIZE
            prompts = [[dice.randrange(3, VOCABULARY) for _ in range(tokens)] for _ in range(order["prompts"])]
            await serve(routers, prompts)
        else:
            answer = await measure(routers[order["index"]], prompts, order["count"], order["flight"])
        print(json.dumps(answer), flush=True)
    # Its threads outlive the interpreter.
    os._exit(0)


asyncio.run(main())
