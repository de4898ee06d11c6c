"""The broker, the daemon, the bridge and the engines as processes that can be killed and stopped."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
PATIENCE = 30.0

Prompt = tuple[list[int], str | None, str | None]
# How many leading blocks of a prompt are held, and how many of them a request reuses.
Depths = tuple[int, int]


# Below the ports that the system gives to outgoing connections, which would take one of them between two lives.
# Below those are the ports of the integration tests, which run beside.
_PORTS = range(22_000, 32_000)
# Processes that were started one after the other begin far from each other.
_next_port = _PORTS[os.getpid() * 101 % len(_PORTS)]


def free_ports(count: int) -> list[int]:
    """So many ports that are free now, one behind the other; never the same twice."""
    global _next_port
    for _ in range(len(_PORTS)):
        if _next_port + count > _PORTS.stop:
            _next_port = _PORTS.start
        ports = list(range(_next_port, _next_port + count))
        _next_port += count
        if all(map(_is_free, ports)):
            return ports
    raise RuntimeError("no free ports")


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as one:
        one.bind(("127.0.0.1", port))
        return True
    return False


def wait_until(what: str, condition: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Waits until the condition holds."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {patience} s: {what}")
        time.sleep(0.005)


def _binary(variable: str, *places: str | None) -> str:
    for place in (os.environ.get(variable), *places):
        if place and Path(place).exists():
            return place
    raise FileNotFoundError(f"nothing to test with: name a binary in {variable}")


def kvatlas() -> str:
    """The program to test."""
    return _binary("KVATLAS_BIN", str(REPOSITORY / "target/debug/kvatlas"))


class Process:
    """A process that can be started again with the same command."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self._command, self._log, self._environment = command, log, environment or {}
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVATLAS_")}
        environment |= self._environment
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    @property
    def lives(self) -> bool:
        """Whether it has been started, and not ended since."""
        return self._child is not None

    @property
    def number(self) -> int:
        """The number of the process that has been started."""
        assert self._child
        return self._child.pid

    def processor_time(self) -> float:
        """Processor time that it has used so far, in seconds."""
        stat = Path(f"/proc/{self.number}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Asks it to end, and waits."""
        if self._child:
            self._child.terminate()
            self._child.wait(PATIENCE)
            self._child = None

    def kill(self) -> None:
        """SIGKILL: no drain."""
        if self._child:
            self._child.kill()
            self._child.wait(PATIENCE)
            self._child = None

    def pause(self) -> None:
        """It does nothing until `resume`."""
        assert self._child
        self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        assert self._child
        self._child.send_signal(signal.SIGCONT)


class Broker(Process):
    """A nats-server with JetStream."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port, [self._monitor] = port, free_ports(1)
        binary = _binary("NATS_SERVER_BIN", shutil.which("nats-server"), str(REPOSITORY / ".tools/nats-server"))
        configuration = folder / "nats.conf"
        configuration.write_text(
            f'listen = "127.0.0.1:{port}"\nhttp = "127.0.0.1:{self._monitor}"\njetstream {{ store_dir = "{folder / "jetstream"}", max_file_store = 1G }}\n'
        )
        super().__init__([binary, "-c", str(configuration)], folder / "broker.log")

    def start(self) -> None:
        super().start()
        wait_until("the broker listens", self._listens)

    def received_bytes(self) -> int:
        """What has been published to it so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._monitor}/varz") as answer:
            return int(json.loads(answer.read())["in_bytes"])

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


class Daemon(Process):
    """`kvatlas serve` or `up`, and questions to it over HTTP."""

    def __init__(
        self, folder: Path, nats_port: int, port: int, settings: dict[str, object], command: list[str]
    ) -> None:
        self._port = port
        command = [kvatlas(), *command, "--nats-url", f"nats://127.0.0.1:{nats_port}"]
        command += ["--http-listen", f"127.0.0.1:{port}", "--snapshots-directory", str(folder / "snapshots")]
        for key, value in {"admin-listen": "off", **settings}.items():
            command += [f"--{key}", str(value)]
        super().__init__(command, folder / "daemon.log")
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)

    def start(self) -> None:
        """Starts it, and waits until it answers queries."""
        super().start()
        wait_until("the daemon is ready", self._is_ready)

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    def ask(self, path: str, body: object = None) -> Any:
        """The answer as JSON; none where there is an error."""
        for is_last in (False, True):
            try:
                payload = None if body is None else json.dumps(body)
                self._connection.request("GET" if body is None else "POST", path, payload)
                response = self._connection.getresponse()
                answer = json.loads(response.read())
                return answer if response.status == 200 else None
            except (OSError, http.client.HTTPException):
                # The connection is from before a restart.
                self._connection.close()
                if is_last:
                    raise
        return None

    def metric(self, name: str, label: str) -> float:
        """The sum of the series of a counter that have a label; 0 where there is none yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        series = [line for line in lines if line.startswith(f"kvatlas_{name}_total{{") and label in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in series)


class Bridge(Process):
    """`kvatlas bridge`."""

    def __init__(self, folder: Path, nats_port: int, arguments: list[str]) -> None:
        command = [kvatlas(), "bridge", "--nats-url", f"nats://127.0.0.1:{nats_port}", "--admin-listen", "off"]
        super().__init__([*command, *arguments], folder / "bridge.log")


class Host:
    """A process with engines; see `host.py`."""

    def __init__(self, kind: str, engines: list[dict[str, Any]], log: Path) -> None:
        self.kind, self.engines, self._log = kind, engines, log
        self._child: subprocess.Popen[str] | None = None
        # When the caches may have changed last.
        self.changed_at = 0.0
        self.start()

    def start(self) -> None:
        """Starts engines with empty caches, on the ports that they have."""
        description = json.dumps({"kind": self.kind, "engines": self.engines})
        with self._log.open("a") as log:
            self._child = subprocess.Popen(
                [sys.executable, str(HERE / "host.py"), description],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._answer()
        self.changed_at = time.monotonic()

    def kill(self) -> None:
        """SIGKILL."""
        if self._child:
            self._child.kill()
            self._child.wait(PATIENCE)
            self._child = None
        self.changed_at = time.monotonic()

    @property
    def lives(self) -> bool:
        """Whether the process runs."""
        return self._child is not None

    def _answer(self) -> Any:
        assert self._child and self._child.stdout
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the engines have ended; see {self._log}")
        return json.loads(line)

    def _command(self, command: object) -> Any:
        assert self._child and self._child.stdin
        self._child.stdin.write(json.dumps(command) + "\n")
        self._child.stdin.flush()
        return self._answer()

    def serve(self, requests: list[tuple[int, Prompt]]) -> list[tuple[int | None, list[int]]]:
        """Serves prompts, each by the engine of that number. Returns the blocks that each took from the cache, and its answer."""
        if not requests:
            return []
        served = self._command({"serve": requests})
        self.changed_at = time.monotonic()
        return [(taken, answered) for taken, answered in served]

    def reset(self, engine: int) -> None:
        """Clears the cache of an engine."""
        self._command({"reset": engine})
        self.changed_at = time.monotonic()

    def offload(self, engine: int, prompt: Any, first: int, is_described: bool) -> None:
        """Copies the blocks of a prompt that an engine has to its host memory, from this one on; it tells their tokens, or their names alone."""
        self._command({"offload": [engine, prompt, first, is_described]})
        self.changed_at = time.monotonic()

    def evict(self, engine: int, prompt: Any, place: int) -> None:
        """Drops a block of a prompt from an engine's pool; it may be in host memory still."""
        self._command({"evict": [engine, prompt, place]})
        self.changed_at = time.monotonic()

    def unload(self, engine: int, prompt: Any, first: int) -> None:
        """Drops the blocks of a prompt from an engine's host memory, from this one on."""
        self._command({"unload": [engine, prompt, first]})
        self.changed_at = time.monotonic()

    def tiers(self, prompt: Any) -> list[list[str]]:
        """Where the leading blocks of a prompt are that the caches have now, by engine."""
        return [of_prompt for [of_prompt] in self._command({"tiers": [prompt]})]

    def hide_removals(self, engine: int) -> None:
        """From now on, an engine tells nobody which blocks it drops."""
        self._command({"hide_removals": engine})

    def proofread(self) -> None:
        """From now on, each stored event is compared with the cache that tells it."""
        self._command({"proofread": True})

    def proofs(self) -> list[list[list[int]]]:
        """What came of that, by engine: see `proofs.py`."""
        found: list[list[list[int]]] = self._command({"proofs": True})
        return found

    def depths(self, prompts: list[Prompt]) -> list[list[Depths]]:
        """What the caches have now of each prompt, by engine, and what a request would reuse. A dead engine has nothing."""
        if not self._child:
            return [[(0, 0)] * len(prompts) for _ in self.engines]
        answer = self._command({"depths": prompts})
        return [[(held, reused) for held, reused in engine] for engine in answer]
