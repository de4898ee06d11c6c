"""Runs Ray Serve with kvatlas's request router, and compares the replicas that it chooses with what vLLM's caches have.

    python3 tests/routers/ray_router.py [--seed N] [--short]

The engines are vLLM's own block pools and publishers (tests/engines). Four replicas advertise their sockets as Ray's LLM servers do; the router registers
them with `kvatlas up`, and asks it. A choice is right where no other engine would reuse more. Then kvatlas is killed: every request is served, by
chance. When it is back, choices are right again. At last the same with the subclass of Ray's KVAwareRouter, which is Ray's own; it is asked as Ray Serve
LLM's ingress does with direct streaming, which sends the request by its proxy. The engine that it wants need not be there: with vLLM installed, all of Ray
Serve LLM is imported. Wants KVATLAS_ENGINES, KVATLAS_BIN and NATS_SERVER_BIN, and a Python with Ray Serve, the package kvatlas
and what the engines need. Ends with 1 where a choice was wrong or a request has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# A replica that does not tell its queue in time is passed over. Here that says that the machine is busy.
os.environ["RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = os.environ["RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = "10"

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import ray_llm
from chats import Chats
from processes import Broker, Daemon, Host, Prompt, free_ports

ENGINES = 4
SIZE = 16
MODEL = "m"
SALTS = (None, "tenant-a")
ADAPTERS = (None, "adapter-a")
IN_FLIGHT = 8
# The router registers engines again after 30 s, with a kvatlas that may have forgotten them.
PATIENCE = 60.0
# Asked while kvatlas is away.
BLIND = 200


class Replica:
    """A server of Ray in front of an engine: it says who it is."""

    def __init__(self, sources: list[dict[str, Any]]) -> None:
        self._place: int = serve.get_replica_context().rank.rank
        self._source = sources[self._place]

    def record_routing_stats(self) -> dict[str, Any]:
        """Advertises the engine, as Ray's LLM servers do."""
        return {"kv_event_metadata": self._source}

    def __call__(self, *_: Any, **__: Any) -> int:
        return self._place


def engines(folder: Path) -> tuple[Host, list[dict[str, Any]]]:
    """Engines, and what replicas advertise of them. The last one is the second rank of an engine, on the port behind the first's."""
    publishing, replaying = free_ports(ENGINES + 1), free_ports(ENGINES + 1)
    ranks = [0] * (ENGINES - 1) + [1]
    given = [
        {
            "endpoint": f"tcp://*:{publishing[place]}",
            "replay": f"tcp://*:{replaying[place]}",
            "rank": rank,
            "blocks": 300,
            "block_size": SIZE,
            "buffer_steps": 10_000,
            "hash_fn": "sha256_cbor",
        }
        for place, rank in enumerate(ranks)
    ]
    advertised = [
        {
            "endpoint": f"tcp://127.0.0.1:{publishing[place + rank]}",
            "replay_endpoint": f"tcp://127.0.0.1:{replaying[place + rank]}",
            "block_size": SIZE,
            "dp_rank": rank,
            "max_num_batched_tokens": 8192,
        }
        for place, rank in enumerate(ranks)
    ]
    return Host("vllm", given, folder / "engines.log"), advertised


class Fleet:
    """Engines, kvatlas, and Ray in front."""

    def __init__(self, seed: int, folder: Path) -> None:
        nats_port, http_port = free_ports(2)
        self.host, sources = engines(folder)
        self.broker = Broker(folder, nats_port)
        self.kvatlas = Daemon(folder, nats_port, http_port, {"model": MODEL, "block-size": SIZE}, ["up"])
        self.broker.start()
        self.kvatlas.start()
        self.chats = Chats(seed, SIZE, list(SALTS), list(ADAPTERS))
        self.random = random.Random(seed)
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        serve.start(http_options={"location": "NoServer"})
        self._urls = {"nats_url": f"nats://127.0.0.1:{nats_port}", "register_url": f"http://127.0.0.1:{http_port}"}
        self._sources = sources
        self.deploy("KvatlasRequestRouter")

    def deploy(self, router: str) -> None:
        """Puts servers with this router in front of the engines."""
        self._is_kv_aware = "KVAware" in router
        # It is the choice that is tested, on a busy machine: answers may take their time.
        kwargs: dict[str, Any] = {"model": MODEL, "patience": 2.0} | self._urls
        if self._is_kv_aware:
            # Requests come faster than engines would serve them.
            kwargs["imbalance"] = 1_000_000
        server = serve.deployment(
            num_replicas=ENGINES,
            max_ongoing_requests=100,
            ray_actor_options={"num_cpus": 0.1},
            request_router_config=RequestRouterConfig(
                request_router_class=f"kvatlas.ray:{router}",
                request_router_kwargs=kwargs,
                request_routing_stats_period_s=0.5,
            ),
        )(Replica)
        self._handle = serve.run(server.bind(self._sources), name=router, route_prefix=None)
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
            asked = [self._ask(prompt) for prompt in some]
            chosen += [response.result(timeout_s=PATIENCE) for response in asked]
        return chosen

    def _ask(self, prompt: Prompt) -> Any:
        tokens, salt, adapter = prompt
        return self._handle.remote(request_token_ids=tokens, request_cache_salt=salt, request_lora_name=adapter)

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
                return self._sources.index(source)
            # The replica has not advertised its engine yet.
            await asyncio.sleep(0.1)

    def spread(self) -> list[int]:
        """How often each engine is chosen for one prompt that all have, 40 times one after the other."""
        prompt: Prompt = ([self.random.randrange(1000) for _ in range(4 * SIZE)], None, None)
        self.host.serve([(place, prompt) for place in range(ENGINES)])
        self.settle([prompt])
        chosen = [place for _ in range(40) for place in self.choices([prompt])]
        return [chosen.count(place) for place in range(ENGINES)]

    def truth(self, prompts: list[Prompt]) -> list[list[int]]:
        """How many blocks each engine would reuse of each prompt."""
        by_engine = self.host.depths(prompts)
        return [[depths[place][1] for depths in by_engine] for place in range(len(prompts))]

    def settle(self, prompts: list[Prompt]) -> None:
        """Waits until all that the engines have told is known to kvatlas, and is certain."""
        expected = [sorted(filter(None, depths)) for depths in self.truth(prompts)]
        deadline = time.monotonic() + PATIENCE
        while [self._known(prompt) for prompt in prompts] != expected:
            if time.monotonic() > deadline:
                raise TimeoutError(f"kvatlas does not come to know what the caches have within {PATIENCE} s")
            time.sleep(0.02)

    def _known(self, prompt: Prompt) -> list[int] | None:
        tokens, salt, adapter = prompt
        query = {"model": MODEL, "tokens": tokens, "cache_salt": salt, "lora_name": adapter}
        answer = self.kvatlas.ask("/v1/query", query)
        if answer is None or not all(holder["exact"] for holder in answer["holders"]):
            return None
        return sorted(holder["usable_blocks"] for holder in answer["holders"] if holder["usable_blocks"])

    def turn(self) -> list[Prompt]:
        """The engines serve; now and then one clears its cache. Returns what they have served."""
        orders = [(self.random.randrange(ENGINES), self.chats.prompt()) for _ in range(40)]
        self.host.serve(orders)
        if self.random.randrange(8) == 0:
            self.host.reset(self.random.randrange(ENGINES))
        return [prompt for _, prompt in orders]

    def wrong(self, prompts: list[Prompt]) -> tuple[int, int]:
        """How many prompts were sent to an engine though another one would reuse more; and of how many some engine has some."""
        expected = self.truth(prompts)
        chosen = self.choices(prompts)
        missed = sum(depths[place] < max(depths) for depths, place in zip(expected, chosen, strict=True))
        return missed, sum(max(depths) > 0 for depths in expected)

    def close(self) -> None:
        """Ends all."""
        ray.shutdown()
        self.kvatlas.stop()
        self.broker.stop()
        self.host.kill()


def play(fleet: Fleet, wanted: int, a_round: int) -> tuple[int, int, int]:
    """How many requests were sent, how many of them could have reused something, and how many were sent to a worse engine than need be."""
    asked = warm = wrong = 0
    while asked < wanted:
        fleet.settle(fleet.turn())
        prompts = fleet.chats.probes(min(a_round, wanted - asked))
        missed, known = fleet.wrong(prompts)
        asked, warm, wrong = asked + len(prompts), warm + known, wrong + missed
    return asked, warm, wrong


def main() -> int:
    """Plays."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--short", action="store_true", help="400 requests instead of 10,000")
    given = arguments.parse_args()
    wanted, a_round = (400, 100) if given.short else (10_000, 250)
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(given.seed, Path(folder))
        try:
            asked, warm, wrong = play(fleet, wanted, a_round)
            print(f"Ray Serve: {asked:,} requests, {warm:,} of them warm, sent to a worse engine: {wrong}", flush=True)
            fleet.kvatlas.kill()
            blind, blind_warm = fleet.wrong(fleet.chats.probes(BLIND))
            print(f"  without kvatlas: {BLIND} requests, {blind_warm} of them warm, all served; sent to a worse engine: {blind}", flush=True)
            fleet.kvatlas.start()
            asked, warm, again = play(fleet, a_round, a_round)
            print(f"  kvatlas is back: {asked} requests, {warm} of them warm, sent to a worse engine: {again}", flush=True)
            base = "with an engine installed" if ray_llm.install() else "without an engine"
            fleet.deploy("KvatlasKVAwareRouter")
            asked, warm, aware = play(fleet, a_round, a_round)
            print(f"  as a subclass of KVAwareRouter, {base}: {asked} requests, {warm} of them warm, sent to a worse engine: {aware}", flush=True)
            spread = fleet.spread()
            print(f"  of 40 requests for what all engines have, they got {spread}", flush=True)
        finally:
            fleet.close()
    # By chance some would have been wrong, or nothing was tested.
    return int(wrong + again + aware > 0 or blind == 0 or min(spread) < 8)


if __name__ == "__main__":
    sys.exit(main())
