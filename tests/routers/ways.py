"""The ways on which requests come to a fleet's engines: vLLM's router, on the engines' own sockets or behind kvatlas, and small routers that ask kvatlas."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from processes import Broker, Process, Prompt, free_ports, kvatlas, wait_until
from vllm_fleet import ENGINES, MODEL, SIZE, Client, Fleet, Worker

sys.path.append(str(Path(__file__).parents[2] / "deploy/router-example"))

from policy import home_key, home_score


class Way(ABC):
    """One or more routers, and what they learn from."""

    # The topic of the engines' messages, where the way needs one; it may contain {pod}.
    TOPIC: ClassVar[str] = ""

    def __init__(self, folder: Path, fleet: Fleet, routers: int) -> None:
        self.folder, self.fleet, self.routers = folder, fleet, routers

    @abstractmethod
    def start(self) -> None:
        """Starts all, and waits until requests can come."""

    @abstractmethod
    def stop(self) -> None:
        """Ends all."""

    @abstractmethod
    def ask(self, prompt: Prompt, router: int) -> None:
        """Sends a request through one of the routers."""

    @abstractmethod
    def restart_routers(self) -> None:
        """The routers restart, and nothing else."""

    def restart_all(self) -> None:
        """All but the engines restarts."""
        self.stop()
        self.start()

    def engine_restarted(self, place: int) -> None:
        """An engine has begun anew; so does what runs in its process."""

    def processes(self) -> list[Process]:
        """What runs, but for the engines."""
        return []

    def broker_bytes(self) -> int | None:
        """What has been published to a broker so far, where there is one."""
        return None

    @staticmethod
    def rest(seconds: float = 1) -> None:
        """Waits for what says nothing when it is done: subscriptions, and events that are on their way."""
        time.sleep(seconds)


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
        super().__init__(command, folder / f"router-{self.port}.log")

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        super().start()
        self.client = Client(self.port)
        wait_until("the router is healthy", self.client.is_healthy)


class Direct(Way):
    """vLLM's router on the engines' own sockets."""

    def __init__(self, folder: Path, fleet: Fleet, routers: int) -> None:
        super().__init__(folder, fleet, routers)
        self._routers = [Router(folder, fleet.workers, self._sockets()) for _ in range(routers)]

    def _sockets(self) -> list[tuple[int, int | None]]:
        return [(worker.events, worker.replay if worker.has_replay else None) for worker in self.fleet.workers]

    def start(self) -> None:
        for router in self._routers:
            router.start()
        self.rest()

    def stop(self) -> None:
        for router in self._routers:
            router.stop()

    def restart_routers(self) -> None:
        Direct.stop(self)
        self.start()

    def ask(self, prompt: Prompt, router: int) -> None:
        self._routers[router].client.ask(prompt)

    def processes(self) -> list[Process]:
        return list(self._routers)


class Kvatlas(Process):
    """`kvatlas up`, which may publish the engines' events once more."""

    def __init__(
        self,
        folder: Path,
        workers: list[Worker],
        nats_port: int,
        republishes: bool = False,
        keeps_state: bool = False,
        options: tuple[str, ...] = (),
        ports: list[int] | None = None,
    ) -> None:
        self.http_port, self._admin_port, *own = free_ports(2 + 2 * ENGINES)
        self.ports = ports = ports or own
        command = [kvatlas(), "up", "--model", MODEL, "--block-size", str(SIZE), "--nats-url", f"nats://127.0.0.1:{nats_port}"]
        command += ["--http-listen", f"127.0.0.1:{self.http_port}", "--admin-listen", f"127.0.0.1:{self._admin_port}"]
        command += ["--snapshots-directory", str(folder / "snapshots"), *options]
        if republishes:
            command += ["--republish", f"tcp://127.0.0.1:{ports[0]}"]
        if keeps_state:
            command += ["--state", str(folder / "state")]
        for place, worker in enumerate(workers):
            replay = f",replay=tcp://127.0.0.1:{worker.replay}" if worker.has_replay else ""
            command += ["--engine", f"gpu-{place}=tcp://127.0.0.1:{worker.events}{replay}"]
        self.sockets: list[tuple[int, int | None]] = list(zip(ports[::2], ports[1::2], strict=True))
        super().__init__(command, folder / f"kvatlas-{self.http_port}.log")

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        super().start()
        wait_until("kvatlas is ready", self.is_ready)

    def is_ready(self) -> bool:
        """Whether it answers queries."""
        return Client(self.http_port).is_healthy()

    def answers(self) -> int:
        """How often a router was given all that an engine has."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self._admin_port}/metrics") as metrics:
            lines = metrics.read().decode().splitlines()
            return sum(int(line.split()[-1]) for line in lines if line.startswith("kvatlas_bridge_republish_answers_total{"))
        return 0


class Republished(Direct):
    """vLLM's router on what kvatlas publishes once more."""

    keeps_state = False
    # More options of kvatlas.
    OPTIONS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: Path, fleet: Fleet, routers: int) -> None:
        self._broker = Broker(folder, free_ports(1)[0])
        self.kvatlas = Kvatlas(folder, fleet.workers, self._broker.port, republishes=True, keeps_state=self.keeps_state, options=self.OPTIONS)
        super().__init__(folder, fleet, routers)

    def _sockets(self) -> list[tuple[int, int | None]]:
        return self.kvatlas.sockets

    def start(self) -> None:
        if not self.kvatlas.lives:
            self._broker.start()
            self.kvatlas.start()
        given = self.kvatlas.answers()
        super().start()
        self._wait_for_answers(given)

    def _wait_for_answers(self, given: int) -> None:
        wanted = given + ENGINES * self.routers
        wait_until("the routers were given all blocks", lambda: self.kvatlas.answers() >= wanted)
        self.rest()

    def restart_kvatlas(self) -> None:
        """kvatlas begins again, after it was killed, and the routers have what it knows."""
        self.kvatlas.start()
        self._wait_for_answers(0)

    def stop(self) -> None:
        super().stop()
        self.kvatlas.stop()
        self._broker.stop()

    def processes(self) -> list[Process]:
        return [*super().processes(), self.kvatlas, self._broker]


class Kept(Republished):
    """vLLM's router on what kvatlas publishes once more, where kvatlas keeps what it knows."""

    keeps_state = True


class Leased(Republished):
    """vLLM's router on what two processes with one lease publish once more: at the same ports, of which one has each engine's at a time."""

    OPTIONS = ("--lease", "pair")

    def __init__(self, folder: Path, fleet: Fleet, routers: int) -> None:
        super().__init__(folder, fleet, routers)
        other = folder / "other"
        other.mkdir()
        self.other = Kvatlas(other, fleet.workers, self._broker.port, republishes=True, options=self.OPTIONS, ports=self.kvatlas.ports)

    def start(self) -> None:
        super().start()
        self.other.start()
        self.rest()

    def kill_first(self) -> None:
        """The one that speaks is killed, and the router has what the other one knows."""
        self.kvatlas.kill()
        wait_until("the router was given all blocks by the other one", lambda: self.other.answers() >= ENGINES * self.routers)
        self.rest()

    def stop(self) -> None:
        self.other.stop()
        super().stop()

    def processes(self) -> list[Process]:
        return [*super().processes(), self.other]


class Scoring(Way):
    """Small routers that ask how much of a prompt each engine reuses, and send it to who reuses most; among equals to the prompt's home."""

    def __init__(self, folder: Path, fleet: Fleet, routers: int) -> None:
        super().__init__(folder, fleet, routers)
        self._workers = [Client(worker.port) for worker in fleet.workers]

    @abstractmethod
    def reused(self, prompt: Prompt, router: int) -> dict[int, float]:
        """How much of a prompt the engines reuse, by place, as far as a router knows."""

    def choose(self, prompt: Prompt, router: int) -> int:
        """The place of the engine for a prompt."""
        reused, key = self.reused(prompt, router), home_key(prompt[0])
        return max(range(ENGINES), key=lambda place: (reused.get(place, 0), home_score(f"gpu-{place}", key)))

    def ask(self, prompt: Prompt, router: int) -> None:
        self.send(self.choose(prompt, router), prompt)

    def send(self, place: int, prompt: Prompt) -> None:
        """Sends a request to an engine."""
        self._workers[place].ask(prompt)


def named(prompt: Prompt) -> dict[str, Any]:
    """A prompt as kvatlas takes it."""
    tokens, salt, adapter = prompt
    return {"tokens": tokens} | ({"cache_salt": salt} if salt else {}) | ({"lora_name": adapter} if adapter else {})


def place_of(holder: dict[str, Any]) -> int:
    """The place of the engine that a holder is."""
    return int(holder["worker"].removeprefix("gpu-"))


class Asked(Scoring):
    """Small routers that ask kvatlas."""

    KEEPS_STATE: ClassVar[bool] = False
    # More options of kvatlas.
    OPTIONS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: Path, fleet: Fleet, routers: int) -> None:
        super().__init__(folder, fleet, routers)
        self._broker = Broker(folder, free_ports(1)[0])
        self.kvatlas = Kvatlas(folder, fleet.workers, self._broker.port, keeps_state=self.KEEPS_STATE, options=self.OPTIONS)

    def start(self) -> None:
        self._broker.start()
        self.kvatlas.start()
        self._client = Client(self.kvatlas.http_port)
        self.rest()

    def stop(self) -> None:
        self.kvatlas.stop()
        self._broker.stop()

    def restart_routers(self) -> None:
        """Nothing: they know nothing that they could lose."""

    def reused(self, prompt: Prompt, router: int) -> dict[int, float]:
        holders = self.answer(prompt).get("holders", [])
        return {place_of(holder): holder.get("usable_blocks", holder["matched_blocks"]) for holder in holders}

    def answer(self, prompt: Prompt, **options: Any) -> dict[str, Any]:
        """What kvatlas answers about a prompt; nothing where it does not."""
        return self.post("/v1/query", named(prompt) | options)

    def post(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        """What kvatlas says to something about the model; nothing where it does not."""
        try:
            status, content = self._client.post(path, {"model": MODEL} | asked)
        except (OSError, http.client.HTTPException):
            self._client.close()
            return {}
        found: dict[str, Any] = json.loads(content) if status == 200 else {}
        return found

    def processes(self) -> list[Process]:
        return [self.kvatlas, self._broker]

    def broker_bytes(self) -> int | None:
        return self._broker.received_bytes()


class AskedWithState(Asked):
    """The same, where kvatlas's bridge keeps what it knows in a directory."""

    KEEPS_STATE = True
