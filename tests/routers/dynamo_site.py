"""Dynamo's mockers, and kvatlas as the indexer that Dynamo's router asks."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from dynamo_records import Etcd, Files, Record, Records
from words import words_model

SIZE = 16
WORDS = 32
WORKERS = 2
PATIENCE = 60.0

Child = subprocess.Popen[bytes]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str, text: str = "") -> bool:
    """Whether a server answers there that all is well, with this text in it."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
        return text in answer.read().decode()
    return False


class Site:
    """The processes of one scenario."""

    def __init__(self, folder: Path, plane: str, stack: contextlib.ExitStack, backend: str = "file") -> None:
        self.folder, self.plane, self.stack = folder, plane, stack
        self.nats = free_port()
        # Other variables with this prefix are settings of kvatlas.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVATLAS_")}
        self.environment = inherited | {
            "DYN_REQUEST_PLANE": plane,
            "DYN_EVENT_PLANE": "zmq",
            "NATS_SERVER": f"nats://127.0.0.1:{self.nats}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        (folder / "discovery").mkdir()
        self.discovery: Records = self._start_etcd() if backend == "etcd" else Files(folder / "discovery")
        self.environment |= self.discovery.environment
        self.start("nats", os.environ["NATS_SERVER_BIN"], "-a", "127.0.0.1", "-p", str(self.nats))
        self._names = words_model(folder / "model", WORDS)

    def _start_etcd(self) -> Records:
        own, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        urls = ("--listen-client-urls", own, "--advertise-client-urls", own, "--listen-peer-urls", peers)
        cluster = ("--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}")
        self.start("etcd", os.environ["ETCD_BIN"], "--data-dir", str(self.folder / "etcd"), *urls, *cluster)
        self.wait_until("etcd answers", lambda: answers(f"{own}/health"))
        return Etcd(own)

    def start(self, name: str, *command: str) -> Child:
        """Starts a process, which ends with the scenario."""
        log = self.stack.enter_context(open(self.folder / f"{name}.log", "ab"))
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=self.environment)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def start_mocker(self, name: str, blocks: int) -> tuple[Child, str, str]:
        """Starts a worker. Returns its process, its name, and where it publishes and replays its events, as kvatlas is told."""
        events, replay = free_port(), free_port()
        before = self.workers()
        process = self.start(
            name, os.environ["DYNAMO_PYTHON"], "-m", "dynamo.mocker", "--model-path", str(self._names), "--model-name", "m",
            "--block-size", str(SIZE), "--num-gpu-blocks-override", str(blocks), "--speedup-ratio", "1000",
            "--discovery-backend", self.environment["DYN_DISCOVERY_BACKEND"], "--request-plane", self.plane,
            "--event-plane", self.environment["DYN_EVENT_PLANE"], "--zmq-kv-events-ports", str(events), "--zmq-replay-ports", str(replay),
        )  # fmt: skip
        self.wait_until(f"{name} has a record", lambda: len(self.workers() - before) == 1)
        [worker] = self.workers() - before
        return process, worker, f"tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay}"

    def records(self, endpoint: str) -> list[Record]:
        """The instances of an endpoint."""
        found = self.discovery.below("v1/instances").values()
        return [record for record in found if record["endpoint"] == endpoint]

    def workers(self) -> set[str]:
        """The names of the workers that have records."""
        return {str(record["instance_id"]) for record in self.records("generate")}

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                logs = {log.name: log.read_text(errors="replace")[-1000:] for log in self.folder.glob("*.log")}
                raise TimeoutError(f"not within {PATIENCE} s: {what}; {logs}")
            time.sleep(0.05)


class Replica:
    """A daemon that Dynamo's router asks. It can be killed, and started again."""

    def __init__(self, site: Site, number: int) -> None:
        self._site, self._name, self._http = site, f"daemon-{number}", free_port()
        self._child: Child | None = None

    def start(self) -> None:
        """Starts it with nothing, and does not wait."""
        site = self._site
        listen = ("--dynamo-listen", "127.0.0.1:0") if site.plane == "tcp" else ()
        self._child = site.start(
            self._name, os.environ["KVATLAS_BIN"], "serve", "--nats-url", f"nats://127.0.0.1:{site.nats}", "--admin-listen", "off",
            "--http-listen", f"127.0.0.1:{self._http}", "--dynamo-components", "dynamo.backend",
            "--dynamo-discovery", site.discovery.place, *listen,
        )  # fmt: skip

    def wait(self) -> None:
        """Waits until it says that it is ready."""
        self._site.wait_until("the daemon is ready", lambda: answers(f"http://127.0.0.1:{self._http}/health"))

    def stop(self) -> None:
        """SIGTERM: all that has been asked is answered first."""
        assert self._child
        self._child.terminate()
        self._child.wait()

    def kill(self) -> None:
        """SIGKILL: no drain."""
        assert self._child
        self._child.kill()
        self._child.wait()


def start_bridge(site: Site, *engines: str) -> Child:
    """A bridge to these engines."""
    url = ("--nats-url", f"nats://127.0.0.1:{site.nats}", "--admin-listen", "off")
    return site.start("bridge", os.environ["KVATLAS_BIN"], "bridge", *url, *engines)


@contextlib.contextmanager
def new_site(plane: str, backend: str = "file") -> Iterator[Site]:
    """A broker, and a place for records."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        yield Site(Path(temporary), plane, stack, backend)


@contextlib.contextmanager
def site(plane: str, blocks: int, indexer: Path | None = None, backend: str = "file") -> Iterator[Site]:
    """Mockers, a daemon, and a bridge to the mockers; or in place of those two a program of Dynamo's that serves its index."""
    with new_site(plane, backend) as own:
        engines = []
        for number in range(WORKERS):
            _, worker, sockets = own.start_mocker(f"mocker-{number}", blocks)
            engines += ["--engine", f"{worker}={sockets}"]
        if indexer is not None:
            own.start("indexer", os.environ["DYNAMO_PYTHON"], str(indexer), str(SIZE))
        else:
            Replica(own, 0).start()
            start_bridge(own, "--model", "m", "--block-size", str(SIZE), *engines)
        own.wait_until("the indexer has a record", lambda: bool(own.records("kv_indexer_query")))
        yield own
