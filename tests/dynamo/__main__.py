"""Follows genuine workers of Dynamo in three ways: by the replay of their own events, by Dynamo's event plane with discovery, and by nothing but its records.

    python3 tests/dynamo [--seed N] [--short]

All have to give the same answers, exactly: after a late start, lost messages, a bridge that is killed, and with caches that evict. Wants a Python
with ai-dynamo (DYNAMO_PYTHON), and KVATLAS_BIN and NATS_SERVER_BIN. Prints a line a check. Ends with 1 where one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "engines"))
sys.path.append(str(HERE.parent / "routers"))

from prompts import prompts  # noqa: E402
from proxy import Loop, Proxy  # noqa: E402

specification = importlib.util.spec_from_file_location("routers", HERE.parent / "routers/__main__.py")
assert specification and specification.loader
routers = importlib.util.module_from_spec(specification)
specification.loader.exec_module(routers)

SIZE = routers.SIZE
PATIENCE = 30.0
# Blocks of each worker: some prompts push others out.
BLOCKS = 400
TOPIC = "namespace.dynamo.component.backend.endpoint.generate.kv-events"


class Plane:
    """Two workers, a daemon, and a bridge that follows each worker twice."""

    def __init__(self, site: Any, request_plane: str, event_plane: str, seed: int) -> None:
        self.site, self.seed, self.served = site, seed, 0
        self.http = routers.free_port()
        self.python, self.kvatlas = os.environ["DYNAMO_PYTHON"], os.environ["KVATLAS_BIN"]
        site.environment |= {"DYN_EVENT_PLANE": event_plane, "PYTHONPATH": str(HERE)}
        site.start("nats", os.environ["NATS_SERVER_BIN"], "-a", "127.0.0.1", "-p", str(site.nats))
        self._event_plane = event_plane
        first = routers.free_port()
        self._answer_ports = f"{first}-{first}"
        self.workers: dict[str, Any] = {}
        self.engines: list[str] = []
        names = routers.words_model(site.folder / "model", routers.WORDS)
        for number in range(2):
            self._start_worker(number, names, request_plane, event_plane)
        self.nats = f"nats://127.0.0.1:{site.nats}"
        url = ("--nats-url", self.nats, "--admin-listen", "off")
        site.start("daemon", self.kvatlas, "serve", *url, "--http-listen", f"127.0.0.1:{self.http}")
        self.lossy: Proxy | None = None
        self._name_planes(event_plane)
        self._bridge: subprocess.Popen[bytes] | None = None
        site.stack.callback(self.kill_bridge)

    def _start_worker(self, number: int, names: Path, request_plane: str, event_plane: str) -> None:
        events, replay = routers.free_port(), routers.free_port()
        process = self._started(
            f"mocker-{number}", self.python, "-m", "dynamo.mocker", "--model-path", str(names), "--model-name", "m",
            "--block-size", str(SIZE), "--num-gpu-blocks-override", str(BLOCKS), "--speedup-ratio", "1000",
            "--discovery-backend", "file", "--request-plane", request_plane, "--event-plane", event_plane,
            "--zmq-kv-events-ports", str(events), "--zmq-replay-ports", str(replay),
        )  # fmt: skip
        found = {str(record["instance_id"]) for record in self.site.wait_for("generate", number + 1)}
        [worker] = found - self.workers.keys()
        self.workers[worker] = process
        self.engines += ["--engine", f"{worker}=tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay},tenant=truth"]

    def _started(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        log = self.site.stack.enter_context(open(self.site.folder / f"{name}.log", "ab"))
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=self.site.environment)
        self.site.stack.callback(process.wait)
        self.site.stack.callback(process.kill)
        return process

    def _name_planes(self, event_plane: str) -> None:
        """One over NATS; on ZeroMQ one of each worker, the last behind a network that loses messages."""
        discovery = f"format=dynamo,discovery=file:{self.site.discovery}"
        if event_plane == "nats":
            self.engines += ["--engine", f"plane={self.nats},{discovery},topic={TOPIC}"]
            return
        folder = self.site.discovery / "v1/event_channels"
        channels = [json.loads(path.read_text()) for path in folder.iterdir() if "kv%2Devents" in path.name]
        endpoints = [channel["transport"]["config"]["endpoint"] for channel in channels]
        port = routers.free_port()
        host, _, target = endpoints[-1].removeprefix("tcp://").rpartition(":")
        self.lossy = Proxy(Loop(), port, int(target), self.seed, loses_messages=True)
        endpoints[-1] = f"tcp://127.0.0.1:{port}"
        for number, endpoint in enumerate(endpoints):
            self.engines += ["--engine", f"plane-{number}={endpoint},{discovery}"]

    def start_bridge(self) -> None:
        """A bridge that knows nothing."""
        command = [self.kvatlas, "bridge", "--nats-url", self.nats, "--admin-listen", "off", "--model", "m", "--block-size", str(SIZE)]
        self._bridge = self._started("bridge", *command, *self.engines)

    def kill_bridge(self) -> None:
        """Ends it at once."""
        if self._bridge:
            self._bridge.kill()
            self._bridge.wait()

    def start_finder(self) -> None:
        """A bridge that is told where the records are, and no worker, model or block size."""
        nats = f",nats={self.nats}" if self._event_plane == "nats" else ""
        source = f"dynamo:file:{self.site.discovery}{nats},component=dynamo.backend"
        command = [self.kvatlas, "bridge", "--nats-url", self.nats, "--admin-listen", "off", "--tenant", "found", "--answer-ports", self._answer_ports]
        self._started("finder", *command, "--discover", source)

    def serve(self, count: int) -> None:
        """Has the workers serve so many further prompts."""
        command = [self.python, str(HERE / "generate.py"), *map(str, (SIZE, self.seed, self.served, self.served + count))]
        done = subprocess.run(command, env=self.site.environment, capture_output=True, text=True, timeout=300, check=False)
        if "done" not in done.stdout:
            raise RuntimeError(done.stderr[-2000:])
        self.served += count

    def _ask(self, tokens: list[int], tenant: str) -> dict[str, tuple[int, bool]]:
        """By worker, how many leading blocks it has, and whether that is exact."""
        asked = json.dumps({"model": "m", "tenant": tenant, "tokens": tokens}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}/v1/query", asked, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                holders = json.load(answer)["holders"]
        except urllib.error.HTTPError as error:
            if error.code in (404, 503):
                return {}
            raise
        return {holder["worker"]: (holder["matched_blocks"], holder["exact"]) for holder in holders}

    def _differences(self, tenant: str) -> list[str]:
        """The prompts about which both ways say something else, or not for certain."""
        found = []
        for number, prompt in enumerate(prompts(SIZE, self.seed, self.served)):
            plane, truth = self._ask(prompt, tenant), self._ask(prompt, "truth")
            if plane != truth or not all(exact for _, exact in truth.values()):
                found.append(f"prompt {number}: {plane} by the plane, {truth} by replay")
        return found

    def agrees(self, tenant: str = "default") -> str:
        """Waits until all answers are the same. Says how many blocks they are about."""
        deadline = time.monotonic() + PATIENCE
        while differences := self._differences(tenant):
            if time.monotonic() > deadline:
                raise AssertionError(f"{len(differences)} of {self.served}: {differences[:3]}")
            time.sleep(0.5)
        found = [self._ask(prompt, tenant) for prompt in prompts(SIZE, self.seed, self.served)]
        blocks = sum(depth for holders in found for depth, _ in holders.values())
        assert blocks > 0, "nothing was found at all"
        return f"{self.served} prompts, {blocks} blocks found"

    def known(self) -> set[str]:
        """The workers that the plane has, or that were found."""
        last = prompts(SIZE, self.seed, self.served)[-20:]
        return {worker for prompt in last for tenant in ("default", "found") for worker in self._ask(prompt, tenant)}


@contextlib.contextmanager
def plane(request_plane: str, event_plane: str, seed: int) -> Iterator[Plane]:
    """The processes of one scenario."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        yield Plane(routers.Site(Path(temporary), request_plane, stack), request_plane, event_plane, seed)


def late_start(own: Plane, count: int) -> str:
    """The workers have served before anyone listened. Behind the lossy network, a message has to come first."""
    own.serve(count)
    own.start_bridge()
    if own.lossy:
        # A bridge hears of that worker by its first message.
        own.serve(count)
    return own.agrees()


def lost_messages(own: Plane, count: int) -> str:
    """A third of the messages of one worker is lost."""
    if not own.lossy:
        return "nothing is lost over NATS here"
    own.lossy.lose(0.33)
    own.serve(count)
    said = own.agrees()
    assert own.lossy.lost > 0, "nothing was lost"
    own.lossy.heal()
    return f"{said}; {own.lossy.lost} messages lost"


def killed_bridge(own: Plane, count: int) -> str:
    """A bridge is killed while workers serve, and another one begins with nothing."""
    own.kill_bridge()
    own.serve(count)
    own.start_bridge()
    if own.lossy:
        own.serve(count)
    return own.agrees()


def found_worker(own: Plane, count: int) -> str:
    """A bridge finds the workers, which have served before, by their records. They answer it at one port."""
    own.start_finder()
    said = own.agrees("found")
    own.serve(count)
    assert own.agrees("found") != said, "nothing was served"
    return own.agrees("found")


def gone_worker(own: Plane, _count: int) -> str:
    """A worker ends."""
    gone, process = next(iter(own.workers.items()))
    process.terminate()
    started = time.monotonic()
    while gone in own.known():
        if time.monotonic() - started > PATIENCE:
            raise AssertionError(f"{gone} is still there")
        time.sleep(0.05)
    return f"forgotten {time.monotonic() - started:.1f} s after it was told to end"


CHECKS = {"late start": late_start, "lost messages": lost_messages, "bridge killed": killed_bridge, "found by records": found_worker, "worker ends": gone_worker}


def main() -> int:
    """Plays all scenarios."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--short", action="store_true")
    given = arguments.parse_args()
    count, failed = (30 if given.short else 150), 0
    print("| Dynamo | what happens | result |\n|---|---|---|")
    for request_plane, event_plane in (("tcp", "zmq"), ("nats", "nats")):
        with plane(request_plane, event_plane, given.seed) as own:
            for name, check in CHECKS.items():
                try:
                    said = check(own, count)
                except (AssertionError, RuntimeError, OSError, subprocess.SubprocessError) as error:
                    failed, said = 1, f"FAILED: {error}"
                    for log in own.site.folder.glob("bridge.log"):
                        print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
                print(f"| asked over {request_plane}, events over {event_plane} | {name} | {said} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
