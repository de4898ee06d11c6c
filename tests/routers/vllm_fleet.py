"""vLLM's caches without a GPU, each with a server in front, and requests that come to them on some way; see ways.py.

The engines are those of tests/engines, whose files KVATLAS_ENGINES names: vLLM's block pool ("plain"), or its scheduler with the caches of a model of several
groups of layers. Before a request is served, it is noted how much of it each engine would reuse.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from chats import Chats
from proxy import Loop, Proxy
from processes import PATIENCE, Prompt, free_ports

if TYPE_CHECKING:
    from ways import Way

MODEL = "m"
ADAPTERS = ("adapter-a", "adapter-b")
ENGINES = 4
SIZE = 16
# Of all requests, so many go to an engine past the router, as another router's would.
ASIDE = 0.4
# The pause between two requests: events need a part of it.
SPACING = 0.025


@dataclass
class Caches:
    """What a fleet's engines are."""

    kind: str = "plain"
    blocks: int = 3000
    # How many batches an engine can send again.
    buffer_steps: int = 10_000
    has_replay: bool = True
    # Whether messages can be lost on the way to who follows the engines, and not only without a replay socket.
    can_lose: bool = False
    # Whether each engine has names of its own for equal blocks.
    own_names: bool = False
    # What a request takes beyond the choice.
    seconds: float = 0.0

    def engine(self, place: int, events: str, replay: str | None, topic: str) -> Any:
        """A cache with its publisher: plain, or of a model of vllm_hybrid_engine.py. One process can have one of both kinds."""
        common = (events, replay, 0, self.blocks, SIZE, self.buffer_steps, "sha256_cbor")
        if self.kind == "plain":
            from vllm_engine import Engine as Plain

            return Plain(*common, topic, f"engine {place}".encode() if self.own_names else None)
        from vllm_hybrid_engine import Engine as Hybrid

        return Hybrid(*common, self.kind, None, 1, topic)


class Worker:
    """An engine with a server in front."""

    def __init__(self, fleet: Fleet, place: int, caches: Caches, topic: str) -> None:
        self.port, self.events, self.replay, proxied = free_ports(4)
        self.has_replay = caches.has_replay
        self.url = f"http://127.0.0.1:{self.port}"
        topic = topic.format(pod=self.pod)
        replay = f"tcp://*:{self.replay}" if self.has_replay else None
        events = f"tcp://*:{self.events}"
        self._make = lambda: caches.engine(place, events, replay, topic)
        self.engine = self._make()
        can_lose = caches.can_lose or not self.has_replay
        self.proxy = Proxy(fleet.loop, proxied, self.events, place, loses_messages=True) if can_lose else None
        if self.proxy:
            self.events = proxied
        handler = type("Handler", (_Handler,), {"fleet": fleet, "place": place})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def pod(self) -> str:
        """Where requests go, without a scheme."""
        return f"127.0.0.1:{self.port}"

    def restart(self) -> None:
        """The engine begins anew, with nothing in its cache, and numbers from the first."""
        self.engine.close()
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.engine = self._make()
                return
            except Exception as error:
                # Its ports are freed behind its back.
                if time.monotonic() > deadline or "in use" not in str(error):
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """What the router asks of a vLLM server."""

    fleet: Fleet
    place: int
    protocol_version = "HTTP/1.1"
    # An answer's head and body are two writes: else the second waits for the reader's acknowledgement of the first, up to 40 ms.
    disable_nagle_algorithm = True

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
        self.fleet.serve(self.place, (body["prompt"], body.get("cache_salt"), adapter))
        choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1, "total_tokens": len(body["prompt"]) + 1}
        answer = {"id": "c", "object": "text_completion", "created": 1, "model": body["model"], "choices": [choice], "usage": usage}
        self._answer(200, answer)


class Fleet:
    """Engines that serve one request at a time."""

    def __init__(self, caches: Caches, topic: str) -> None:
        self._lock, self.loop, self._seconds = threading.Lock(), Loop(), caches.seconds
        self._served: dict[tuple[int, ...], dict[str, Any]] = {}
        self._rests = False
        self.counts = [0] * ENGINES
        self.workers = [Worker(self, place, caches, topic) for place in range(ENGINES)]

    def serve(self, place: int, prompt: Prompt) -> None:
        """Has an engine serve, and notes how many blocks each would have reused."""
        if self._rests:
            self._served[tuple(prompt[0])] = {"place": place}
            return
        with self._lock:
            truth = [worker.engine.depth(*prompt)[1] for worker in self.workers]
            [(_, answer)] = self.workers[place].engine.serve([prompt])
            self.counts[place] += 1
            self._served[tuple(prompt[0])] = {"truth": truth, "place": place, "answer": answer}
        time.sleep(self._seconds)

    def rest(self) -> None:
        """From now on, requests are answered at once, and caches stay as they are."""
        self._rests = True

    def outcome(self, prompt: Prompt) -> dict[str, Any]:
        """What was noted of a request that has been served: how many blocks each engine would have reused, who served it, and the answer."""
        return self._served.pop(tuple(prompt[0]))

    def restart(self, place: int) -> None:
        """An engine ends, and begins anew."""
        with self._lock:
            self.workers[place].restart()

    def close(self) -> None:
        """Ends all."""
        for worker in self.workers:
            worker.close()


class Client:
    """Connections to a server, one of each thread."""

    def __init__(self, port: int) -> None:
        self._port, self._own = port, threading.local()

    def post(self, path: str, body: object) -> tuple[int, bytes]:
        """The status of the answer, and what is in it."""
        try:
            return self._post(path, body)
        except ConnectionError:
            # The server has closed a connection that was idle.
            self.close()
            return self._post(path, body)

    def _post(self, path: str, body: object) -> tuple[int, bytes]:
        connection = self._connection()
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()

    def ask(self, prompt: Prompt) -> None:
        """Sends a request."""
        tokens, salt, adapter = prompt
        body = {"model": adapter or MODEL, "prompt": tokens, "max_tokens": 1} | ({"cache_salt": salt} if salt else {})
        status, content = self.post("/v1/completions", body)
        if status != 200:
            raise RuntimeError(f"{status}: {content[:300]!r}")

    def is_healthy(self) -> bool:
        """Whether the server answers."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = self._connection()
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            return answer.status == 200
        self.close()
        return False

    def close(self) -> None:
        """Ends this thread's connection; the next request makes another."""
        self._connection().close()

    def _connection(self) -> http.client.HTTPConnection:
        if not hasattr(self._own, "connection"):
            self._own.connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        connection: http.client.HTTPConnection = self._own.connection
        return connection


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

    def __init__(self, folder: Path, seed: int, way: type[Way], caches: Caches, routers: int) -> None:
        self.seed, self._random = seed, random.Random(seed)
        self.fleet = Fleet(caches, way.TOPIC)
        self._aside = [Client(worker.port) for worker in self.fleet.workers]
        self.way = way(folder, self.fleet, routers)
        self._routers = routers
        try:
            self.way.start()
        except BaseException:
            self.close()
            raise

    def ask_aside(self, place: int, prompt: Prompt) -> dict[str, Any]:
        """Sends a request past the router."""
        self._aside[place].ask(prompt)
        return self.fleet.outcome(prompt)

    def ask(self, prompt: Prompt, router: int = 0) -> dict[str, Any]:
        """Sends a request through a router."""
        self.way.ask(prompt, router)
        return self.fleet.outcome(prompt)

    def drive(self, chats: Chats, requests: int, spacing: float = SPACING, aside: float = ASIDE, choices: int | None = None) -> Tally:
        """Sends requests, most of them through the routers by turns, whose choices are counted; no more than so many choices."""
        tally = Tally()
        for number in range(requests):
            if tally.requests == choices:
                break
            prompt, place = chats.prompt(), self._random.randrange(ENGINES)
            if self._random.random() < aside:
                served = self.ask_aside(place, prompt)
            else:
                served = self.ask(prompt, number % self._routers)
                tally.add(served)
            chats.answered(prompt, served["answer"])
            time.sleep(spacing)
        return tally

    def crowd(self, chats: list[Chats], requests: int) -> Tally:
        """Sends requests of several clients at once, all through the router; each client has conversations of its own."""
        tally = Tally()

        def client(own: Chats) -> list[dict[str, Any]]:
            outcomes = []
            for _ in range(requests // len(chats)):
                prompt = own.prompt()
                outcomes.append(self.ask(prompt))
                own.answered(prompt, outcomes[-1]["answer"])
            return outcomes

        with ThreadPoolExecutor(len(chats)) as clients:
            for outcomes in clients.map(client, chats):
                for served in outcomes:
                    tally.add(served)
        return tally

    def lose(self, share: float, place: int | None = None) -> None:
        """From now on, this share of the messages of all engines, or of one, is lost."""
        for number, worker in enumerate(self.fleet.workers):
            if worker.proxy and place in (None, number):
                worker.proxy.lose(share)

    def busiest(self) -> int:
        """The engine that has served most requests."""
        return max(range(ENGINES), key=self.fleet.counts.__getitem__)

    def restart_engine(self, place: int) -> None:
        """An engine ends, and begins anew; so does what runs in its process."""
        self.fleet.restart(place)
        self.way.engine_restarted(place)

    def close(self) -> None:
        """Ends all."""
        self.way.stop()
        self.fleet.close()


@contextlib.contextmanager
def sites(seed: int, way: type[Way], caches: Caches | None = None, routers: int = 1) -> Iterator[Site]:
    """A site, for a while."""
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), seed, way, caches or Caches(), routers)
        try:
            yield site
        finally:
            site.close()


def plain_chats(seed: int) -> Chats:
    """Conversations without salts and adapters."""
    return Chats(seed, SIZE, [None], [None])
