"""Dynamo's own router, whose remote indexer is kvatlas. Its answers are compared with what Dynamo's workers say they hold.

    python3 dynamo_router.py BLOCK_SIZE VOCABULARY SEED

Runs as a process of Dynamo's runtime: discovery and planes come from its environment. A line of JSON comes in, and one goes out:

    {"serve": N}        serves so many prompts; {}
    {"recall": N}       has the same prompts as if it had served them; {}
    {"compare": N}      asks as many questions, once the workers stand still; {"answers", "wrong", "wrong_own", "seconds"}
    {"tiers": N}        {"hashes": sequence hashes of a prompt of N blocks, "workers": {ID: [blocks on its device, with its host's, with all]}}
    {"watch": true}     begins to ask, again and again, about what the workers hold now; {}
    {"end": true}       ends that; {"questions", "warm", "wrong": [[WHEN, "blind" | "stale" | "failed"], ...]}

Questions are warm if a worker has a part of the prompt. An answer is blind where a worker has more than it says, and stale where it has less,
or is gone. WHEN is the system's monotonic clock.
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
from dynamo_dumps import Dumps, Held, block_hashes, held_now, sequence_hashes

SIZE, VOCABULARY, SEED = map(int, sys.argv[1:4])
# So many questions are in flight while answers are watched, each for so many seconds.
WATCHERS, PATIENCE = 4, 5.0


async def overlaps(router: KvRouter, tokens: list[int]) -> dict[int, int]:
    """By worker, how many leading blocks the router believes to be on its device."""
    answer = await router.get_overlap_scores(tokens)
    return {worker["worker_id"]: worker["device_blocks"] for worker in answer["workers"] if worker["device_blocks"]}


class Driver:
    """The routers: one that asks, and one that has an index of its own."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        endpoint = runtime.endpoint("dynamo.backend.generate")
        self._asks = KvRouter(endpoint, SIZE, KvRouterConfig(use_remote_indexer=True))
        self._own = KvRouter(endpoint, SIZE, KvRouterConfig())
        self._dice, self._dumps = random.Random(SEED), Dumps()
        self._chats = [self._words(SIZE * self._dice.randint(1, 12)) for _ in range(12)]
        self._watching: list[asyncio.Task[None]] = []
        self._watched: dict[str, Any] = {}
        self._ends = False

    async def start(self) -> None:
        """Waits until the routers know the workers."""
        await self._dumps.start()
        await asyncio.sleep(3)

    def _words(self, count: int) -> list[int]:
        return [self._dice.randrange(3, VOCABULARY) for _ in range(count)]

    async def serve(self, count: int, recalls: bool) -> None:
        """Serves turns of chats, or recalls them."""
        for _ in range(count):
            chat = self._dice.choice(self._chats)
            chat += self._words(self._dice.randint(1, 3 * SIZE))
            if len(chat) > 60 * SIZE:
                self._chats.remove(chat)
                self._chats.append(self._words(SIZE))
            if recalls:
                continue
            async for _ in await self._asks.generate(chat, "m", stop_conditions={"max_tokens": 4}):
                pass

    def _question(self, held: dict[int, Held]) -> tuple[list[int], dict[int, int]]:
        chat = self._dice.choice(self._chats)
        prompt = chat[: self._dice.randint(SIZE, len(chat))] + self._words(self._dice.randint(0, 2 * SIZE))
        depths = {worker: tree.depth(block_hashes(prompt, SIZE)) for worker, tree in held.items()}
        return prompt, {worker: depth for worker, depth in depths.items() if depth}

    async def compare(self, count: int) -> dict[str, Any]:
        """Asks both routers."""
        held = await held_now(self._dumps)
        await asyncio.sleep(0.5)
        wrong = wrong_own = 0
        seconds = 0.0
        for _ in range(count):
            prompt, expected = self._question(held)
            begun = time.perf_counter()
            told = await overlaps(self._asks, prompt)
            seconds += time.perf_counter() - begun
            wrong += differences(told, expected)
            wrong_own += differences(await overlaps(self._own, prompt), expected)
        return {"answers": count * len(held), "wrong": wrong, "wrong_own": wrong_own, "seconds": seconds}

    async def tiers(self, count: int) -> dict[str, Any]:
        """What workers have of one prompt in all tiers, as the router believes."""
        prompt = [3 + place // SIZE for place in range(count * SIZE)]
        workers = (await self._asks.get_overlap_scores(prompt))["workers"]
        names = ("device_blocks", "host_pinned_blocks", "disk_blocks")
        held = {worker["worker_id"]: [worker[name] for name in names] for worker in workers if worker["disk_blocks"]}
        return {"hashes": sequence_hashes(block_hashes(prompt, SIZE)), "workers": held}

    async def watch(self) -> None:
        """Begins to ask."""
        held = await held_now(self._dumps)
        self._watched = {"questions": 0, "warm": 0, "wrong": []}
        self._ends = False
        # The router may wait long for an answer that does not come. Others are asked meanwhile.
        self._watching = [asyncio.create_task(self._watch(held)) for _ in range(WATCHERS)]

    async def _watch(self, held: dict[int, Held]) -> None:
        while not self._ends:
            prompt, expected = self._question(held)
            begun = time.monotonic()
            kinds = await self._judged(prompt, expected)
            self._watched["wrong"] += [[begun, kind] for kind in kinds]
            self._watched["questions"] += 1
            self._watched["warm"] += bool(expected)
            await asyncio.sleep(0.01)

    async def _judged(self, prompt: list[int], expected: dict[int, int]) -> list[str]:
        """What is wrong with an answer."""
        try:
            told = await asyncio.wait_for(overlaps(self._asks, prompt), PATIENCE)
        except Exception:
            # Without an answer the router raises what its runtime has.
            return ["failed"]
        is_blind = any(told.get(worker, 0) < depth for worker, depth in expected.items())
        is_stale = any(depth > expected.get(worker, 0) for worker, depth in told.items())
        return ["blind"] * is_blind + ["stale"] * is_stale

    async def end(self) -> dict[str, Any]:
        """Ends that."""
        self._ends = True
        await asyncio.gather(*self._watching)
        return self._watched

    async def do(self, order: dict[str, Any]) -> dict[str, Any]:
        """Does what a line says."""
        if "serve" in order or "recall" in order:
            await self.serve(order.get("serve") or order["recall"], "recall" in order)
        elif "compare" in order:
            return await self.compare(order["compare"])
        elif "tiers" in order:
            return await self.tiers(order["tiers"])
        elif "watch" in order:
            await self.watch()
        else:
            return await self.end()
        return {}


def differences(told: dict[int, int], expected: dict[int, int]) -> int:
    """Of how many workers something wrong is told."""
    return sum(told.get(worker, 0) != expected.get(worker, 0) for worker in told.keys() | expected.keys())


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Does what standard input says."""
    driver = Driver(runtime)
    await driver.start()
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await driver.do(json.loads(line))), flush=True)
    # Its threads outlive the interpreter.
    os._exit(0)


asyncio.run(main())
