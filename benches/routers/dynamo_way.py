"""Dynamo's own router in front of the engines, and a relay of Dynamo's beside each."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from processes import PATIENCE, Process, Prompt, wait_until
from vllm_fleet import ENGINES, SIZE, Client, Fleet
from ways import Way
from words import words_model

HERE = Path(__file__).parent
# What starts slowly: each is a Python with a runtime.
SLOW = 90.0


def environment(folder: Path) -> dict[str, str]:
    """Discovery by files, requests over TCP, events over ZeroMQ; all on this machine."""
    return {
        "DYN_FILE_KV": str(folder / "discovery"), "DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1", "TOKIO_WORKER_THREADS": "2",
        "DYN_RUNTIME_NUM_WORKER_THREADS": "2",
    }  # fmt: skip


class _Choice(Process):
    """The process with Dynamo's router. Its choices come one after the other."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__([sys.executable, str(HERE / "dynamo_choice.py"), str(SIZE)], folder / f"dynamo-router-{number}.log")
        self._environment = environment(folder)
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=os.environ | self._environment
            )
        self._answer(SLOW)

    def _answer(self, patience: float = PATIENCE) -> Any:
        assert self._child and self._child.stdout
        if not select.select([self._child.stdout], [], [], patience)[0]:
            raise TimeoutError(f"Dynamo's router says nothing; see {self._log}")
        while line := self._child.stdout.readline():
            with contextlib.suppress(ValueError):
                return json.loads(line)
        raise RuntimeError(f"Dynamo's router has ended; see {self._log}: {self._log.read_text()[-2000:]}")

    def choose(self, prompt: Prompt) -> int | None:
        """The number of the worker for a prompt; none where there is an error."""
        question = dict(zip(("tokens", "salt", "adapter"), prompt, strict=True))
        with self._lock:
            assert self._child and self._child.stdin
            self._child.stdin.write(json.dumps(question).encode() + b"\n")
            self._child.stdin.flush()
            answer = self._answer()
        return int(answer[0]) if isinstance(answer, list) else None


class Dynamo(Way):
    """Dynamo's router with its index in its process, and the engines' relays."""

    def __init__(self, folder: Path, fleet: Fleet, routers: int) -> None:
        super().__init__(folder, fleet, routers)
        self._ids = folder / "ids"
        self._ids.mkdir()
        (folder / "discovery").mkdir()
        names = words_model(folder / "model", 32)
        self._relays = [
            Process(
                [sys.executable, str(HERE / "dynamo_relay.py"), str(place), f"tcp://127.0.0.1:{worker.events}", str(SIZE), str(names), str(self._ids)],
                folder / f"relay-{place}.log",
                environment(folder),
            )
            for place, worker in enumerate(fleet.workers)
        ]
        self._choices = [_Choice(folder, number) for number in range(routers)]
        self._workers = [Client(worker.port) for worker in fleet.workers]

    def start(self) -> None:
        for relay in self._relays:
            relay.start()
        wait_until("Dynamo's workers are known", lambda: len(self._places()) == ENGINES, SLOW)
        for choice in self._choices:
            choice.start()
        self.rest()

    def stop(self) -> None:
        for process in self.processes():
            process.stop()
        for path in self._ids.iterdir():
            path.unlink()

    def restart_routers(self) -> None:
        for choice in self._choices:
            choice.stop()
            choice.start()
        self.rest()

    def engine_restarted(self, place: int) -> None:
        """The relay of an engine lives in the engine's process."""
        self._relays[place].stop()
        for number, known in self._places().items():
            if known == place:
                (self._ids / str(number)).unlink()
        self._relays[place].start()
        wait_until("Dynamo's worker is known", lambda: len(self._places()) == ENGINES, SLOW)

    def _places(self) -> dict[int, int]:
        return {int(path.name): int(path.read_text()) for path in self._ids.iterdir() if path.name.isdigit()}

    def ask(self, prompt: Prompt, router: int) -> None:
        number = self._choices[router].choose(prompt)
        # One that is gone, or none: a router would take any.
        place = self._places().get(number, 0) if number is not None else 0
        self._workers[place].ask(prompt)

    def processes(self) -> list[Process]:
        return [*self._choices, *self._relays]
