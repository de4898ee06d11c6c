"""vLLM's caches without a GPU, each with a server in front, and what routes requests to them.

The engines are those of tests/engines, whose files KVATLAS_ENGINES names: vLLM's block pool ("plain"), or its scheduler with the caches of a model of several
groups of layers. Before a request is served, it is noted how much of it each engine would reuse.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from chats import Chats
from proxy import Loop, Proxy
from processes import PATIENCE, Broker, Process, Prompt, free_ports, kvatlas, wait_until

MODEL = "m"
ADAPTERS = ("adapter-a", "adapter-b")
ENGINES = 4
SIZE = 16
# Of all requests, so many go to an engine past the router, as another router's would.
ASIDE = 0.4
# The pause between two requests: events need a part of it.
SPACING = 0.025
# The ways on which requests come to engines: vLLM's router on the engines' own sockets, the same on what kvatlas publishes once more, and a small router
# that asks kvatlas.
WAYS = ("direct", "republished", "asked")


def engine(kind: str, events: str, replay: str | None, blocks: int, buffer_steps: int) -> Any:
    """A cache with its publisher: plain, or of a model of vllm_hybrid_engine.py. One process can have one of both kinds."""
    if kind == "plain":
        from vllm_engine import Engine as Plain

        return Plain(events, replay, 0, blocks, SIZE, buffer_steps, "sha256_cbor")
    from vllm_hybrid_engine import Engine as Hybrid

    return Hybrid(events, replay, 0, blocks, SIZE, buffer_steps, "sha256_cbor", kind, None, 1)


class Worker:
    """An engine with a server in front."""

    def __init__(self, fleet: Fleet, place: int, kind: str, blocks: int, buffer_steps: int, has_replay: bool) -> None:
        self.port, self.events, self.replay, proxied = free_ports(4)
        self.has_replay = has_replay
        self.url = f"http://127.0.0.1:{self.port}"
        replay = f"tcp://*:{self.replay}" if has_replay else None
        self.engine = engine(kind, f"tcp://*:{self.events}", replay, blocks, buffer_steps)
        # Without a replay socket, messages may be lost on the way.
        self.proxy = None if has_replay else Proxy(fleet.loop, proxied, self.events, place, loses_messages=True)
        if self.proxy:
            self.events = proxied
        handler = type("Handler", (_Handler,), {"fleet": fleet, "place": place})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """What the router asks of a vLLM server."""

    fleet: Fleet
    place: int
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def _answer(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        """Health, and the models."""
        models = [{"id": name, "object": "model", "created": 1, "owned_by": "vllm", "root": name} for name in (MODEL, *ADAPTERS)]
        known = {"/health": {}, "/v1/models": {"object": "list", "data": models}}
        body = known.get(self.path)
        self._answer(404 if body is None else 200, body)

    def do_POST(self) -> None:
        """Serves a request."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions":
            return self._answer(404, {})
        adapter = body["model"] if body["model"] in ADAPTERS else None
        served = self.fleet.serve(self.place, (body["prompt"], body.get("cache_salt"), adapter))
        choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1, "total_tokens": len(body["prompt"]) + 1}
        answer = {"id": "c", "object": "text_completion", "created": 1, "model": body["model"], "choices": [choice], "usage": usage}
        self._answer(200, answer | {"served": served})


class Fleet:
    """Engines that serve one request at a time."""

    def __init__(self, kind: str, blocks: int, buffer_steps: int, has_replay: bool) -> None:
        self._lock, self.loop = threading.Lock(), Loop()
        self.workers = [Worker(self, place, kind, blocks, buffer_steps, has_replay) for place in range(ENGINES)]

    def serve(self, place: int, prompt: Prompt) -> dict[str, Any]:
        """Has an engine serve. Returns how many blocks each would have reused, and who served."""
        with self._lock:
            truth = [worker.engine.depth(*prompt)[1] for worker in self.workers]
            [(_, answer)] = self.workers[place].engine.serve([prompt])
        return {"truth": truth, "place": place, "answer": answer}

    def close(self) -> None:
        """Ends all."""
        for worker in self.workers:
            worker.close()


class Client:
    """A connection to a server."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)

    def ask(self, prompt: Prompt) -> dict[str, Any]:
        """Sends a request. Returns what the engine has noted."""
        tokens, salt, adapter = prompt
        body = {"model": adapter or MODEL, "prompt": tokens, "max_tokens": 1} | ({"cache_salt": salt} if salt else {})
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {content[:300]!r}")
        served: dict[str, Any] = json.loads(content)["served"]
        return served

    def is_healthy(self) -> bool:
        """Whether the server answers."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._connection.request("GET", "/health")
            answer = self._connection.getresponse()
            answer.read()
            return answer.status == 200
        self._connection.close()
        return False


class Router(Process):
    """vLLM's router, which follows the events at these addresses: of events, and of replays where there are some."""

    def __init__(self, folder: Path, workers: list[Worker], sockets: list[tuple[int, int | None]]) -> None:
        self.port, metrics = free_ports(2)
        command = [os.environ["VLLM_ROUTER"], "--port", str(self.port), "--policy", "kv_aware", "--prometheus-port", str(metrics)]
        command += ["--worker-startup-check-interval", "1", "--kv-event-model", MODEL, "--kv-event-block-size", str(SIZE)]
        command += ["--worker-urls", *(worker.url for worker in workers)]
        for worker, (events, replay) in zip(workers, sockets, strict=True):
            command += ["--kv-event-source", f"{worker.url}=tcp://127.0.0.1:{events}"]
            if replay:
                command += ["--kv-event-replay-source", f"{worker.url}=tcp://127.0.0.1:{replay}"]
        super().__init__(command, folder / "router.log")

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        super().start()
        self._client = Client(self.port)
        wait_until("the router is healthy", self._client.is_healthy)

    def ask(self, prompt: Prompt) -> dict[str, Any]:
        """Sends a request through it."""
        return self._client.ask(prompt)


class Kvatlas(Process):
    """`kvatlas up`, which publishes the engines' events once more."""

    def __init__(self, folder: Path, workers: list[Worker], nats_port: int) -> None:
        self.http_port, self._admin_port, *ports = free_ports(2 + 2 * ENGINES)
        command = [kvatlas(), "up", "--model", MODEL, "--block-size", str(SIZE), "--nats-url", f"nats://127.0.0.1:{nats_port}"]
        command += ["--http-listen", f"127.0.0.1:{self.http_port}", "--admin-listen", f"127.0.0.1:{self._admin_port}"]
        command += ["--snapshots-directory", str(folder / "snapshots"), "--republish", f"tcp://127.0.0.1:{ports[0]}"]
        for place, worker in enumerate(workers):
            replay = f",replay=tcp://127.0.0.1:{worker.replay}" if worker.has_replay else ""
            command += ["--engine", f"gpu-{place}=tcp://127.0.0.1:{worker.events}{replay}"]
        self.sockets: list[tuple[int, int | None]] = list(zip(ports[::2], ports[1::2], strict=True))
        super().__init__(command, folder / "kvatlas.log")

    def is_ready(self) -> bool:
        """Whether it answers queries."""
        return Client(self.http_port).is_healthy()

    def answers(self) -> int:
        """How often a router was given all that an engine has."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self._admin_port}/metrics") as metrics:
            lines = metrics.read().decode().splitlines()
            return sum(int(line.split()[-1]) for line in lines if line.startswith("kvatlas_bridge_republish_answers_total{"))
        return 0


class SmallRouter:
    """A router that asks kvatlas, and sends a request to who reuses most of it; by turns among equals."""

    def __init__(self, kvatlas_port: int, workers: list[Worker]) -> None:
        self._port, self._turn = kvatlas_port, itertools.count()
        self.start()
        self._workers = [Client(worker.port) for worker in workers]

    def start(self) -> None:
        """Begins anew: it knows nothing that it could lose."""
        self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)

    def stop(self) -> None:
        """Ends it."""
        self._connection.close()

    def _reused(self, prompt: Prompt) -> dict[str, int]:
        tokens, salt, adapter = prompt
        query = {"model": MODEL, "tokens": tokens} | ({"cache_salt": salt} if salt else {}) | ({"lora_name": adapter} if adapter else {})
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._connection.request("POST", "/v1/query", json.dumps(query), {"content-type": "application/json"})
            answer = self._connection.getresponse()
            content = answer.read()
            if answer.status == 200:
                holders = json.loads(content)["holders"]
                return {holder["worker"]: holder.get("usable_blocks", holder["matched_blocks"]) for holder in holders}
            return {}
        self._connection.close()
        return {}

    def ask(self, prompt: Prompt) -> dict[str, Any]:
        """Sends a request to the best engine."""
        reused, turn = self._reused(prompt), next(self._turn)
        places = [(turn + step) % ENGINES for step in range(ENGINES)]
        return self._workers[max(places, key=lambda place: reused.get(f"gpu-{place}", 0))].ask(prompt)


@dataclass
class Tally:
    """The worth of a router's choices."""

    requests: int = 0
    warm: int = 0
    missed: int = 0
    blind: int = 0
    blocks: int = 0
    blocks_missed: int = 0

    def add(self, served: dict[str, Any]) -> None:
        """Counts one choice: missed where another engine would have reused more, blind where it reuses nothing and another would."""
        truth, got = served["truth"], served["truth"][served["place"]]
        self.requests += 1
        self.warm += max(truth) > 0
        self.missed += got < max(truth)
        self.blind += max(truth) > 0 and got == 0
        self.blocks += max(truth)
        self.blocks_missed += max(truth) - got

    def __str__(self) -> str:
        return f"{self.missed} of {self.requests} missed ({self.blocks_missed} of {self.blocks} blocks), {self.blind} of {self.warm} blind"


class Site:
    """Engines, and a way to them."""

    def __init__(
        self, folder: Path, seed: int, way: str, kind: str = "plain", blocks: int = 3000, buffer_steps: int = 10_000, has_replay: bool = True
    ) -> None:
        self._random, self.way = random.Random(seed), way
        self.fleet = Fleet(kind, blocks, buffer_steps, has_replay)
        self._processes: list[Process | SmallRouter] = []
        workers = self.fleet.workers
        sockets: list[tuple[int, int | None]] = [(worker.events, worker.replay if has_replay else None) for worker in workers]
        if way != "direct":
            broker = Broker(folder, free_ports(1)[0])
            broker.start()
            self.kvatlas = Kvatlas(folder, workers, broker.port)
            self.kvatlas.start()
            wait_until("kvatlas is ready", self.kvatlas.is_ready)
            self._processes += [self.kvatlas, broker]
            sockets = self.kvatlas.sockets
        self._aside = [Client(worker.port) for worker in workers]
        self.router: Router | SmallRouter
        if way == "asked":
            self.router = SmallRouter(self.kvatlas.http_port, workers)
        else:
            self.router = Router(folder, workers, sockets)
            self.begin(self.router)
        self._processes.insert(0, self.router)

    def begin(self, process: Process | SmallRouter) -> None:
        """Starts the router or kvatlas, and waits until the router has what it gets without further requests."""
        given = self.kvatlas.answers() if self.way == "republished" else 0
        process.start()
        if self.way == "republished":
            wait_until("the router was given all blocks", lambda: self.kvatlas.answers() >= given + ENGINES)
        elif self.way == "asked":
            wait_until("kvatlas is ready", self.kvatlas.is_ready)
        # The router has still to apply them. Without kvatlas, its subscriptions are on their way.
        time.sleep(1)

    def ask_aside(self, place: int, prompt: Prompt) -> dict[str, Any]:
        """Sends a request past the router."""
        return self._aside[place].ask(prompt)

    def drive(self, chats: Chats, requests: int, spacing: float = SPACING, aside: float = ASIDE) -> Tally:
        """Sends requests, most of them through the router, whose choices are counted."""
        tally = Tally()
        for _ in range(requests):
            prompt, place = chats.prompt(), self._random.randrange(ENGINES)
            if self._random.random() < aside:
                served = self.ask_aside(place, prompt)
            else:
                served = self.router.ask(prompt)
                tally.add(served)
            chats.answered(prompt, served["answer"])
            time.sleep(spacing)
        return tally

    def close(self) -> None:
        """Ends all."""
        for process in self._processes:
            process.stop()
        self.fleet.close()


@contextlib.contextmanager
def sites(seed: int, way: str, **more: Any) -> Iterator[Site]:
    """A site, for a while."""
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), seed, way, **more)
        try:
            yield site
        finally:
            site.close()


def plain_chats(seed: int) -> Chats:
    """Conversations without salts and adapters."""
    return Chats(seed, SIZE, [None], [None])
