"""Runs vLLM's own router behind `kvatlas bridge --republish`, and beside it the same router on the engines' own sockets.

    python3 tests/routers/vllm_router.py [--seed N] [--short]

The engines are vLLM's block pool and publisher (tests/engines/vllm_engine.py), each with a server in front. Before a request is served, it is
noted how much of it each engine would reuse. Wants VLLM_ROUTER, KVATLAS_BIN and NATS_SERVER_BIN, KVATLAS_ENGINES (see tests/engines/fetch.py),
and a Python with msgspec, pyzmq, cbor2, xxhash, numpy and pydantic. Prints a line a scenario. Ends with 1 where the router behind kvatlas has
chosen worse than it may.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from chats import Chats
from processes import PATIENCE, Broker, Process, Prompt, free_ports, kvatlas, wait_until
from vllm_engine import Engine

MODEL = "m"
ADAPTERS = ("adapter-a", "adapter-b")
ENGINES = 4
SIZE = 16
# Of all requests, so many go to an engine past the router, as another router's would.
ASIDE = 0.4
# The pause between two requests: events need a part of it.
SPACING = 0.025


class Worker:
    """An engine with a server in front."""

    def __init__(self, fleet: Fleet, place: int, blocks: int, buffer_steps: int) -> None:
        self.port, self.events, self.replay = free_ports(3)
        self.blocks, self.buffer_steps = blocks, buffer_steps
        self.url = f"http://127.0.0.1:{self.port}"
        self.engine = self._engine()
        handler = type("Handler", (_Handler,), {"fleet": fleet, "place": place})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _engine(self) -> Engine:
        events, replay = f"tcp://*:{self.events}", f"tcp://*:{self.replay}"
        return Engine(events, replay, 0, self.blocks, SIZE, self.buffer_steps, "sha256_cbor")

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self.engine._publisher.shutdown()


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

    def __init__(self, blocks: int, buffer_steps: int) -> None:
        self._lock = threading.Lock()
        self.workers = [Worker(self, place, blocks, buffer_steps) for place in range(ENGINES)]

    def serve(self, place: int, prompt: Prompt) -> dict[str, Any]:
        """Has an engine serve. Returns how many blocks each would have reused, and who served."""
        with self._lock:
            truth = [worker.engine.depth(*prompt)[1] for worker in self.workers]
            self.workers[place].engine.serve([prompt])
        return {"truth": truth, "place": place}

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
    """vLLM's router, which follows the events at these addresses."""

    def __init__(self, folder: Path, workers: list[Worker], sockets: list[tuple[int, int]]) -> None:
        self.port, metrics = free_ports(2)
        command = [os.environ["VLLM_ROUTER"], "--port", str(self.port), "--policy", "kv_aware", "--prometheus-port", str(metrics)]
        command += ["--worker-startup-check-interval", "1", "--kv-event-model", MODEL, "--kv-event-block-size", str(SIZE)]
        command += ["--worker-urls", *(worker.url for worker in workers)]
        for worker, (events, replay) in zip(workers, sockets, strict=True):
            command += ["--kv-event-source", f"{worker.url}=tcp://127.0.0.1:{events}"]
            command += ["--kv-event-replay-source", f"{worker.url}=tcp://127.0.0.1:{replay}"]
        super().__init__(command, folder / "router.log")

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        super().start()
        self.client = Client(self.port)
        wait_until("the router is healthy", self.client.is_healthy)


class Bridge(Process):
    """`kvatlas up`, which publishes the engines' events once more."""

    def __init__(self, folder: Path, workers: list[Worker], nats_port: int) -> None:
        http_port, self._admin_port, *ports = free_ports(2 + 2 * ENGINES)
        command = [kvatlas(), "up", "--model", MODEL, "--block-size", str(SIZE), "--nats-url", f"nats://127.0.0.1:{nats_port}"]
        command += ["--http-listen", f"127.0.0.1:{http_port}", "--admin-listen", f"127.0.0.1:{self._admin_port}"]
        command += ["--snapshots-directory", str(folder / "snapshots")]
        for place, worker in enumerate(workers):
            sockets = f"tcp://127.0.0.1:{worker.events},replay=tcp://127.0.0.1:{worker.replay}"
            command += ["--engine", f"gpu-{place}={sockets}"]
        command += ["--republish", f"tcp://127.0.0.1:{ports[0]}"]
        self.sockets = list(zip(ports[::2], ports[1::2], strict=True))
        super().__init__(command, folder / "kvatlas.log")

    def answers(self) -> int:
        """How often a router was given all that an engine has."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self._admin_port}/metrics") as metrics:
            lines = metrics.read().decode().splitlines()
            return sum(int(line.split()[-1]) for line in lines if line.startswith("kvatlas_bridge_republish_answers_total{"))
        return 0


@dataclass
class Tally:
    """What the router's choices were worth."""

    requests: int = 0
    warm: int = 0
    missed: int = 0
    blind: int = 0
    blocks_missed: int = 0

    def add(self, served: dict[str, Any]) -> None:
        """Counts one choice."""
        truth, got = served["truth"], served["truth"][served["place"]]
        self.requests += 1
        self.warm += max(truth) > 0
        self.missed += got < max(truth)
        self.blind += max(truth) > 0 and got == 0
        self.blocks_missed += max(truth) - got

    def __str__(self) -> str:
        return f"{self.missed} of {self.requests} missed ({self.blocks_missed} blocks), {self.blind} of {self.warm} blind"


class Site:
    """Engines, a router, and kvatlas between them or not."""

    def __init__(self, folder: Path, seed: int, is_republished: bool, buffer_steps: int = 10_000) -> None:
        self._random = random.Random(seed)
        self.fleet = Fleet(blocks=3000, buffer_steps=buffer_steps)
        self._processes: list[Process] = []
        workers = self.fleet.workers
        sockets = [(worker.events, worker.replay) for worker in workers]
        if is_republished:
            broker = Broker(folder, free_ports(1)[0])
            broker.start()
            self.bridge = Bridge(folder, workers, broker.port)
            self.bridge.start()
            self._processes += [self.bridge, broker]
            sockets = self.bridge.sockets
        self.is_republished = is_republished
        self.router = Router(folder, workers, sockets)
        self._processes.insert(0, self.router)
        self._aside = [Client(worker.port) for worker in workers]
        self.begin(self.router)

    def begin(self, process: Process) -> None:
        """Starts the router or kvatlas, and waits until the router has what it gets without further requests."""
        given = self.bridge.answers() if self.is_republished else 0
        process.start()
        if self.is_republished:
            wait_until("the router was given all blocks", lambda: self.bridge.answers() >= given + ENGINES)
        # The router has still to apply them. Without kvatlas, its subscriptions are on their way.
        time.sleep(1)

    def ask_aside(self, place: int, prompt: Prompt) -> None:
        """Sends a request past the router."""
        self._aside[place].ask(prompt)

    def drive(self, chats: Chats, requests: int) -> Tally:
        """Sends requests, most of them through the router, whose choices are counted."""
        tally = Tally()
        for _ in range(requests):
            prompt, place = chats.prompt(), self._random.randrange(ENGINES)
            if self._random.random() < ASIDE:
                self.ask_aside(place, prompt)
            else:
                tally.add(self.router.client.ask(prompt))
            time.sleep(SPACING)
        return tally

    def close(self) -> None:
        """Ends all."""
        for process in self._processes:
            process.stop()
        self.fleet.close()


@contextlib.contextmanager
def sites(seed: int, is_republished: bool, **more: Any) -> Iterator[Site]:
    """A site, for a while."""
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), seed, is_republished, **more)
        try:
            yield site
        finally:
            site.close()


def plain_chats(seed: int) -> Chats:
    """Conversations without salts and adapters."""
    return Chats(seed, SIZE, [None], [None])


def undisturbed(seed: int, is_republished: bool, requests: int) -> Tally:
    """Requests one after the other."""
    with sites(seed, is_republished) as site:
        return site.drive(plain_chats(seed), 2 * requests)


def router_restarts(seed: int, is_republished: bool, requests: int) -> Tally:
    """The router restarts, when the engines can replay a few of their batches only."""
    with sites(seed, is_republished, buffer_steps=20) as site:
        chats = plain_chats(seed)
        site.drive(chats, 2 * requests)
        site.router.stop()
        site.begin(site.router)
        return site.drive(chats, requests)


def kvatlas_restarts(seed: int, is_republished: bool, requests: int) -> Tally:
    """kvatlas restarts, and the router goes on."""
    with sites(seed, is_republished) as site:
        chats = plain_chats(seed)
        site.drive(chats, requests)
        if is_republished:
            site.bridge.kill()
            site.drive(chats, 20)
            site.begin(site.bridge)
        return site.drive(chats, requests)


def special(seed: int, is_republished: bool, requests: int, salt: str | None, adapter: str | None) -> Tally:
    """One engine has a prompt, and another one more of it with a salt or an adapter, which is of no use to the prompt without."""
    with sites(seed, is_republished) as site:
        choice, tally = random.Random(seed), Tally()
        prompts = [[choice.randrange(128_000) for _ in range(10 * SIZE + 1)] for _ in range(requests // 4)]
        for tokens in prompts:
            own, others = choice.sample(range(ENGINES), 2)
            site.ask_aside(own, (tokens[: 8 * SIZE], None, None))
            site.ask_aside(others, (tokens, salt, adapter))
        time.sleep(1)
        for tokens in prompts:
            tally.add(site.router.client.ask((tokens, None, None)))
            time.sleep(SPACING)
        return tally


def main() -> int:
    """Plays all scenarios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="fewer requests")
    arguments = parser.parse_args()
    seed, requests = arguments.seed, 60 if arguments.short else 200
    scenarios: dict[str, Callable[[bool], Tally]] = {
        "undisturbed": lambda is_republished: undisturbed(seed, is_republished, requests),
        "the router restarts, replays out of reach": lambda is_republished: router_restarts(seed, is_republished, requests),
        "kvatlas restarts": lambda is_republished: kvatlas_restarts(seed, is_republished, requests),
        "salts": lambda is_republished: special(seed, is_republished, requests, "red", None),
        "adapters": lambda is_republished: special(seed, is_republished, requests, None, ADAPTERS[0]),
    }
    is_wrong = False
    for name, play in scenarios.items():
        without, behind = play(False), play(True)
        # A request may come before the events of the last one.
        is_right = behind.blind == 0 and behind.missed <= max(without.missed, behind.requests // 100)
        is_wrong |= not is_right
        print(f"{'ok' if is_right else 'WRONG'}: vllm-router, {name}: {behind}; without kvatlas {without}", flush=True)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
