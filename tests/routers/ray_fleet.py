"""Ray Serve with kvatlas's request router, in front of vLLM's own block pools and publishers (tests/engines).

Four replicas advertise the engines' sockets as Ray's LLM servers do; the router registers them with `kvatlas up`, and asks it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

# A replica that does not tell its queue in time is passed over. Here that says that the machine is busy.
os.environ["RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = os.environ["RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = "10"

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from chats import Chats
from processes import Broker, Daemon, Host, Prompt, free_ports, wait_until

ENGINES = 4
SIZE = 16
MODEL = "m"
SALTS = (None, "tenant-a")
ADAPTERS = (None, "adapter-a")
# The router registers engines again after 30 s, with a kvatlas that may have forgotten them.
PATIENCE = 60.0


class Marked:
    """A part of an application that leaves the number of its process in a folder."""

    def __init__(self, folder: str) -> None:
        self.place: int = serve.get_replica_context().rank.rank
        mark = Path(folder) / f"{type(self).__name__}-{self.place}"
        written = mark.with_suffix(f".{os.getpid()}")
        written.write_text(str(os.getpid()))
        # At once, as others read it meanwhile.
        written.rename(mark)


class Replica(Marked):
    """A server of Ray in front of an engine: it says who it is."""

    def __init__(self, folder: str) -> None:
        self._source = json.loads((Path(folder) / "sources").read_text())[serve.get_replica_context().rank.rank]
        super().__init__(folder)

    def record_routing_stats(self) -> dict[str, Any]:
        """Advertises the engine, as Ray's LLM servers do."""
        return {"kv_event_metadata": self._source}

    def __call__(self, *_: Any, **__: Any) -> int:
        return self.place


class Front(Marked):
    """What requests come to first: the router is in its process."""

    def __init__(self, folder: str, server: Any) -> None:
        super().__init__(folder)
        self._server = server

    async def __call__(self, prompt: Prompt) -> int:
        place: int = await request(self._server, prompt)
        return place


def request(handle: Any, prompt: Prompt) -> Any:
    """Sends a request."""
    tokens, salt, adapter = prompt
    return handle.remote(request_token_ids=tokens, request_cache_salt=salt, request_lora_name=adapter)


class Engines:
    """vLLM's caches, each in a process of its own, and what replicas advertise of them.

    The last one is the second rank of an engine, on the port behind the first's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sources: list[dict[str, Any]] = [{}] * ENGINES
        self._hosts = [self._host(place) for place in range(ENGINES)]

    def _host(self, place: int) -> Host:
        rank = int(place == ENGINES - 1)
        publishing, replaying = free_ports(2), free_ports(2)
        given = {
            "endpoint": f"tcp://*:{publishing[0]}",
            "replay": f"tcp://*:{replaying[0]}",
            "rank": rank,
            "blocks": 300,
            "block_size": SIZE,
            "buffer_steps": 10_000,
            "hash_fn": "sha256_cbor",
        }
        self.sources[place] = {
            "endpoint": f"tcp://127.0.0.1:{publishing[rank]}",
            "replay_endpoint": f"tcp://127.0.0.1:{replaying[rank]}",
            "block_size": SIZE,
            "dp_rank": rank,
            "max_num_batched_tokens": 8192,
        }
        (self._folder / "sources").write_text(json.dumps(self.sources))
        return Host("vllm", [given], self._folder / f"engine-{place}.log")

    def restart(self, place: int) -> None:
        """An engine begins anew with an empty cache, at the same address."""
        self._hosts[place].kill()
        self._hosts[place].start()

    def replace(self, place: int) -> None:
        """An engine has gone, and another with an empty cache is there, at another address. Replicas that start from now on have it."""
        self._hosts[place].kill()
        self._hosts[place] = self._host(place)

    def serve(self, orders: list[tuple[int, Prompt]]) -> None:
        """Serves prompts, each by the engine of that number."""
        for place, host in enumerate(self._hosts):
            host.serve([(0, prompt) for chosen, prompt in orders if chosen == place])

    def reset(self, place: int) -> None:
        """Clears the cache of an engine."""
        self._hosts[place].reset(0)

    def truth(self, prompts: list[Prompt]) -> list[list[int]]:
        """How many blocks each engine would reuse of each prompt."""
        by_engine = [host.depths(prompts)[0] for host in self._hosts]
        return [[depths[place][1] for depths in by_engine] for place in range(len(prompts))]

    def kill(self) -> None:
        """Ends all."""
        for host in self._hosts:
            host.kill()


class Fleet:
    """Engines, kvatlas, and Ray in front. It ends with its block."""

    def __init__(self, seed: int, folder: Path, settings: dict[str, object] | None = None) -> None:
        nats_port, http_port = free_ports(2)
        self.folder = folder
        self.engines = Engines(folder)
        self.broker = Broker(folder, nats_port)
        self.kvatlas = Daemon(folder, nats_port, http_port, {"model": MODEL, "block-size": SIZE, **(settings or {})}, ["up"])
        self.broker.start()
        self.kvatlas.start()
        self.chats = Chats(seed, SIZE, list(SALTS), list(ADAPTERS))
        self.random = random.Random(seed)
        # Ray's processes import this module.
        paths = os.pathsep.join(str(Path(__file__).parents[1] / name) for name in ("routers", "engines"))
        environment = {"env_vars": {"PYTHONPATH": paths}}
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False, runtime_env=environment)
        serve.start(http_options={"location": "NoServer"})
        self._urls = {"nats_url": f"nats://127.0.0.1:{nats_port}", "register_url": f"http://127.0.0.1:{http_port}"}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        ray.shutdown()
        self.kvatlas.stop()
        self.broker.stop()
        self.engines.kill()

    def server(self, router: str, **more: Any) -> Any:
        """Servers with this router, for the engines."""
        # It is the choice that is tested, on a busy machine: answers may take their time.
        kwargs = {"model": MODEL, "patience": 2.0} | self._urls | more
        server = serve.deployment(
            num_replicas=ENGINES,
            max_ongoing_requests=100,
            health_check_period_s=1,
            ray_actor_options={"num_cpus": 0.1},
            request_router_config=RequestRouterConfig(
                request_router_class=f"kvatlas.ray:{router}",
                request_router_kwargs=kwargs,
                request_routing_stats_period_s=0.5,
            ),
        )(Replica)
        return server.bind(str(self.folder))

    def settle(self, prompts: list[Prompt]) -> None:
        """Waits until all that the engines have told is known to kvatlas, and is certain."""
        expected = [sorted(filter(None, depths)) for depths in self.engines.truth(prompts)]
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

    def process(self, part: type[Marked], place: int) -> int:
        """The number of the process of a part of the application."""
        return int((self.folder / f"{part.__name__}-{place}").read_text())

    def wait_for_another(self, part: type[Marked], place: int, gone: int, is_there: Callable[[], bool]) -> None:
        """Waits until a part that was killed runs again, in another process."""
        wait_until(f"{part.__name__} {place} runs again", lambda: self.process(part, place) != gone and is_there(), PATIENCE)
