"""Follows genuine workers of Dynamo in three ways: by the replay of their own events, by Dynamo's event plane with discovery, and by nothing but its records.

    python3 tests/dynamo [--seed N] [--short]

All have to give the same answers, exactly: after a late start, lost messages, a bridge that is killed, and with caches that evict. Wants a Python
with ai-dynamo (DYNAMO_PYTHON), and KVATLAS_BIN and NATS_SERVER_BIN; with an etcd (ETCD_BIN), also that keeps the records. Prints a line a check. Ends with 1 where one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "engines"))
sys.path.append(str(HERE.parent / "routers"))

from dynamo_site import SIZE, Child, Site, free_port, new_site  # noqa: E402
from prompts import prompts  # noqa: E402
from proxy import Loop, Proxy  # noqa: E402

PATIENCE = 30.0
# Blocks of each worker: some prompts push others out.
BLOCKS = 400
TOPIC = "namespace.dynamo.component.backend.endpoint.generate.kv-events"


class Plane:
    """Two workers, a daemon, and a bridge that follows each worker twice."""

    def __init__(self, site: Site, event_plane: str, seed: int) -> None:
        self.site, self.seed, self.served = site, seed, 0
        self.http = free_port()
        self.python, self.kvatlas = os.environ["DYNAMO_PYTHON"], os.environ["KVATLAS_BIN"]
        site.environment |= {"DYN_EVENT_PLANE": event_plane, "PYTHONPATH": str(HERE)}
        self._event_plane = event_plane
        first = free_port()
        self._answer_ports = f"{first}-{first}"
        self.workers: dict[str, Child] = {}
        self.engines: list[str] = []
        for number in range(2):
            process, worker, sockets = site.start_mocker(f"mocker-{number}", BLOCKS)
            self.workers[worker] = process
            self.engines += ["--engine", f"{worker}={sockets},tenant=truth"]
        self.nats = f"nats://127.0.0.1:{site.nats}"
        url = ("--nats-url", self.nats, "--admin-listen", "off")
        site.start("daemon", self.kvatlas, "serve", *url, "--http-listen", f"127.0.0.1:{self.http}")
        self.lossy: Proxy | None = None
        self._name_planes(event_plane)
        self._bridge: Child | None = None

    def _name_planes(self, event_plane: str) -> None:
        """One over NATS; on ZeroMQ one of each worker, the last behind a network that loses messages."""
        discovery = f"format=dynamo,discovery={self.site.discovery.place}"
        if event_plane == "nats":
            self.engines += ["--engine", f"plane={self.nats},{discovery},topic={TOPIC}"]
            return
        channels = self.site.discovery.below("v1/event_channels")
        endpoints = [channel["transport"]["config"]["endpoint"] for key, channel in channels.items() if "/topic/kv-events/" in key]
        port = free_port()
        host, _, target = endpoints[-1].removeprefix("tcp://").rpartition(":")
        self.lossy = Proxy(Loop(), port, int(target), self.seed, loses_messages=True)
        endpoints[-1] = f"tcp://127.0.0.1:{port}"
        for number, endpoint in enumerate(endpoints):
            self.engines += ["--engine", f"plane-{number}={endpoint},{discovery}"]

    def start_bridge(self) -> None:
        """A bridge that knows nothing."""
        command = [self.kvatlas, "bridge", "--nats-url", self.nats, "--admin-listen", "off", "--model", "m", "--block-size", str(SIZE)]
        self._bridge = self.site.start("bridge", *command, *self.engines)

    def kill_bridge(self) -> None:
        """Ends it at once."""
        if self._bridge:
            self._bridge.kill()
            self._bridge.wait()

    def start_finder(self) -> None:
        """A bridge that is told where the records are, and no worker, model or block size."""
        nats = f",nats={self.nats}" if self._event_plane == "nats" else ""
        source = f"dynamo:{self.site.discovery.place}{nats},component=dynamo.backend"
        command = [self.kvatlas, "bridge", "--nats-url", self.nats, "--admin-listen", "off", "--tenant", "found", "--answer-ports", self._answer_ports]
        self.site.start("finder", *command, "--discover", source)

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
    planes = [("tcp", "zmq", "file"), ("nats", "nats", "file")] + [("tcp", "zmq", "etcd")] * bool(os.environ.get("ETCD_BIN"))
    for request_plane, event_plane, backend in planes:
        with new_site(request_plane, backend) as site:
            own = Plane(site, event_plane, given.seed)
            for name, check in CHECKS.items():
                try:
                    said = check(own, count)
                except (AssertionError, RuntimeError, OSError, subprocess.SubprocessError) as error:
                    failed, said = 1, f"FAILED: {error}"
                    for log in own.site.folder.glob("bridge.log"):
                        print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
                print(f"| asked over {request_plane}, events over {event_plane}, records in {backend} | {name} | {said} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
