"""Runs Ray Serve with kvatlas's request router, and compares the replicas that it chooses with what vLLM's caches have.

    python3 tests/routers/ray_router.py [--seed N] [--short] [--restarts]

A choice is right where no other engine would reuse more. First engines serve and clear while requests come. Then kvatlas is killed: every request is
served, by chance. When it is back, choices are right again. Then the same with the subclass of Ray's KVAwareRouter, which is Ray's own; it is asked as Ray
Serve LLM's ingress does with direct streaming, which sends the request by its proxy. The engine that it wants need not be there: with vLLM installed, all
of Ray Serve LLM is imported. Last, parts restart: see ray_restarts.py. Wants KVATLAS_ENGINES, KVATLAS_BIN and NATS_SERVER_BIN, and a Python with Ray
Serve, the package kvatlas and what the engines need. Ends with 1 where a choice was wrong or a request has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import ray_llm
from ray import serve
from ray_fleet import ENGINES, PATIENCE, SIZE, Fleet, request
from ray_restarts import restarts

from processes import Prompt

IN_FLIGHT = 8
# Asked while kvatlas is away.
BLIND = 200


class Router:
    """A router in this process, in front of a fleet."""

    def __init__(self, fleet: Fleet, router: str) -> None:
        self._fleet, self._is_kv_aware = fleet, "KVAware" in router
        # Requests to the one that is KV aware come faster than engines would serve them.
        server = fleet.server(router, **({"imbalance": 1_000_000} if self._is_kv_aware else {}))
        self._handle = serve.run(server, name=router, route_prefix=None)
        # With its first request, a router comes to know replicas, and registers their engines.
        self.choices([([1], None, None)])

    def choices(self, prompts: list[Prompt]) -> list[int]:
        """The engine that each prompt was sent to."""
        chosen: list[int] = []
        for start in range(0, len(prompts), IN_FLIGHT):
            some = prompts[start : start + IN_FLIGHT]
            if self._is_kv_aware:
                chosen += asyncio.run(self._picks(some))
                continue
            asked = [request(self._handle, prompt) for prompt in some]
            chosen += [response.result(timeout_s=PATIENCE) for response in asked]
        return chosen

    async def _picks(self, prompts: list[Prompt]) -> list[int]:
        return await asyncio.wait_for(asyncio.gather(*(self._pick(prompt) for prompt in prompts)), PATIENCE)

    async def _pick(self, prompt: Prompt) -> int:
        """The engine, as Ray Serve LLM's ingress (`LLMRouter`) picks it: it takes the first replica, without a look at queues."""
        tokens, salt, adapter = prompt
        handle = self._handle.options(multiplexed_model_id=adapter) if adapter else self._handle
        payload = SimpleNamespace(prompt=tokens, cache_salt=salt)
        while True:
            async with handle.choose_replica(payload, _reserve=False, request_token_ids=tokens) as selection:
                source = selection._replica.routing_stats.get("kv_event_metadata")
            if source is not None:
                return self._fleet.engines.sources.index(source)
            # The replica has not advertised its engine yet.
            await asyncio.sleep(0.1)

    def spread(self) -> list[int]:
        """How often each engine is chosen for one prompt that all have, 40 times one after the other."""
        prompt: Prompt = ([self._fleet.random.randrange(1000) for _ in range(4 * SIZE)], None, None)
        self._fleet.engines.serve([(place, prompt) for place in range(ENGINES)])
        self._fleet.settle([prompt])
        chosen = [place for _ in range(40) for place in self.choices([prompt])]
        return [chosen.count(place) for place in range(ENGINES)]

    def wrong(self, prompts: list[Prompt]) -> tuple[int, int]:
        """How many prompts were sent to an engine though another one would reuse more; and of how many some engine has some."""
        expected = self._fleet.engines.truth(prompts)
        chosen = self.choices(prompts)
        missed = sum(depths[place] < max(depths) for depths, place in zip(expected, chosen, strict=True))
        return missed, sum(max(depths) > 0 for depths in expected)

    def play(self, wanted: int, a_round: int) -> tuple[int, int, int]:
        """How many requests were sent, how many of them could have reused something, and how many were sent to a worse engine than need be."""
        fleet, asked, warm, wrong = self._fleet, 0, 0, 0
        while asked < wanted:
            fleet.settle(turn(fleet))
            prompts = fleet.chats.probes(min(a_round, wanted - asked))
            missed, known = self.wrong(prompts)
            asked, warm, wrong = asked + len(prompts), warm + known, wrong + missed
        return asked, warm, wrong


def turn(fleet: Fleet) -> list[Prompt]:
    """The engines serve; now and then one clears its cache. Returns what they have served."""
    orders = [(fleet.random.randrange(ENGINES), fleet.chats.prompt()) for _ in range(40)]
    fleet.engines.serve(orders)
    if fleet.random.randrange(8) == 0:
        fleet.engines.reset(fleet.random.randrange(ENGINES))
    return [prompt for _, prompt in orders]


def choices(seed: int, wanted: int, a_round: int) -> bool:
    """Plays with both routers. Returns whether every choice was right that was made with kvatlas."""
    with tempfile.TemporaryDirectory() as folder, Fleet(seed, Path(folder)) as fleet:
        router = Router(fleet, "KvatlasRequestRouter")
        asked, warm, wrong = router.play(wanted, a_round)
        print(f"Ray Serve: {asked:,} requests, {warm:,} of them warm, sent to a worse engine: {wrong}", flush=True)
        fleet.kvatlas.kill()
        blind, blind_warm = router.wrong(fleet.chats.probes(BLIND))
        print(f"  without kvatlas: {BLIND} requests, {blind_warm} of them warm, all served; sent to a worse engine: {blind}", flush=True)
        fleet.kvatlas.start()
        asked, warm, again = router.play(a_round, a_round)
        print(f"  kvatlas is back: {asked} requests, {warm} of them warm, sent to a worse engine: {again}", flush=True)
        base = "with an engine installed" if ray_llm.install() else "without an engine"
        router = Router(fleet, "KvatlasKVAwareRouter")
        asked, warm, aware = router.play(a_round, a_round)
        print(f"  as a subclass of KVAwareRouter, {base}: {asked} requests, {warm} of them warm, sent to a worse engine: {aware}", flush=True)
        spread = router.spread()
        print(f"  of 40 requests for what all engines have, they got {spread}", flush=True)
    # By chance some would have been wrong, or nothing was tested.
    return wrong + again + aware == 0 and blind > 0 and min(spread) >= 8


def main() -> int:
    """Plays."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--short", action="store_true", help="400 requests instead of 10,000, and no restarts")
    arguments.add_argument("--restarts", action="store_true", help="restarts in the short form, too")
    given = arguments.parse_args()
    wanted, a_round = (400, 100) if given.short else (10_000, 250)
    outcomes = [choices(given.seed, wanted, a_round)]
    if given.restarts or not given.short:
        outcomes.append(restarts(given.seed))
    return int(not all(outcomes))


if __name__ == "__main__":
    sys.exit(main())
