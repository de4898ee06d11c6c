"""kvatlas beside Dynamo's standalone indexer: both follow the same publishers; every answer of both is compared with the truth, and timed.

    compare.py --peer BINARY --kvatlas BINARY [--seed N] [--steps N] [--seconds N] [--rounds N] [--only PART]

Run by run.sh. Publishers are pyzmq's, with payloads as vLLM sends them. Prints tables in Markdown; ends with 1 where an answer of
kvatlas is wrong, or where one of the peer differs for no reason that is known.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq
from publisher import BLOCK, Publisher
from relayed import Relayed, payloads_of

MODEL = "m"
ENGINES = 4


class Names:
    """What engines call blocks: a number for each path, of no meaning."""

    def __init__(self, seeded: random.Random) -> None:
        self._random = seeded
        self._known: dict[tuple[int, ...], int] = {}

    def of(self, tokens: list[int]) -> list[int]:
        """The names of the whole blocks."""
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        return [self._known.setdefault(tuple(tokens[:end]), self._random.getrandbits(63)) for end in ends]


class Indexer:
    """One of the two, asked over HTTP."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def ask(self, path: str, body: object) -> Any:
        """The answer as JSON. A connection that was idle may have been closed meanwhile: then another is made."""
        try:
            return self._ask(path, body)
        except (OSError, http.client.HTTPException):
            return self._ask(path, body)

    def _ask(self, path: str, body: object) -> Any:
        try:
            self._connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = self._connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise
        return json.loads(text) if response.status < 300 else {}

    def depths(self, tokens: list[int]) -> list[int]:
        """Blocks by engine, in Dynamo's dialect."""
        scores = self.ask("/query", {"model_name": MODEL, "token_ids": tokens}).get("scores", {})
        return [scores.get(str(engine), {}).get("0", 0) // BLOCK for engine in range(ENGINES)]


def wait_until(what: str, condition: Callable[[], bool]) -> None:
    """Waits until the condition holds."""
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if condition():
                return
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.002)


class History:
    """A seeded history: prompts that share prefixes are stored; removed are leaves only, or any block."""

    def __init__(self, seed: int, has_holes: bool) -> None:
        self.random, self.has_holes = random.Random(seed), has_holes
        self.names = Names(self.random)
        self._prompts: list[list[int]] = [[]]

    def prompt(self) -> list[int]:
        """A prompt that continues one before."""
        before = self.random.choice(self._prompts[-60:])
        before = before[: self.random.randrange(len(before) // BLOCK + 1) * BLOCK]
        longer = before + [self.random.randrange(128_000) for _ in range(self.random.randint(1, 6) * BLOCK)]
        if len(longer) < 40 * BLOCK:
            self._prompts.append(longer)
        return longer

    def probe(self) -> list[int]:
        """A prompt to ask for."""
        prompt = self.random.choice(self._prompts[-80:])
        return prompt + [128_001] * BLOCK if self.random.random() < 0.2 or not prompt else prompt

    def step(self, publisher: Publisher) -> None:
        """Something happens in an engine."""
        chance = self.random.random()
        if chance < 0.02:
            publisher.clear()
        elif chance < 0.35 and publisher.held:
            parents = set(publisher.held.values())
            names = [name for name in publisher.held if self.has_holes or name not in parents]
            publisher.remove(self.random.sample(names, min(len(names), self.random.randint(1, 4))))
        else:
            prompt = self.prompt()
            names = self.names.of(prompt)
            # An engine stores what follows what it has; with holes, also behind a hole: the parent is known by name.
            publisher.store(prompt, names)


def conformance(title: str, seed: int, steps: int, has_holes: bool, site: Site) -> bool:
    """Compares every answer after every few steps; prints a line. Returns whether all is well."""
    history = History(seed, has_holes)
    answers = ours_wrong = theirs_wrong = over = 0
    for number in range(steps):
        for _ in range(5):
            history.step(history.random.choice(site.publishers))
        probes = [history.probe() for _ in range(5)]
        truth = [[publisher.depth(history.names.of(probe)) for publisher in site.publishers] for probe in probes]
        site.settle()
        for probe, expected in zip(probes, truth, strict=True):
            ours, theirs = site.ours.depths(probe), site.theirs.depths(probe)
            answers += ENGINES
            ours_wrong += sum(one != other for one, other in zip(ours, expected, strict=True))
            theirs_wrong += sum(one != other for one, other in zip(theirs, expected, strict=True))
            over += sum(one > other for one, other in zip(theirs, expected, strict=True))
    for publisher in site.publishers:
        publisher.clear()
    print(f"| {title}, seed {seed} | {answers:,} | {ours_wrong} | {theirs_wrong} | {over} |", flush=True)
    return ours_wrong == 0 and (has_holes or theirs_wrong == 0)


class Site:
    """Publishers and both indexers."""

    def __init__(self, peer: str, kvatlas: str, folder: Path) -> None:
        context: zmq.Context[Any] = zmq.Context()
        self.publishers = [Publisher(context, number) for number in range(ENGINES)]
        self._markers = 0
        free = [context.socket(zmq.PUB) for _ in range(2)]
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in free]
        for socket in free:
            socket.close(0)
        self.ours, self.theirs = Indexer(ports[0]), Indexer(ports[1])
        engines = []
        for publisher in self.publishers:
            publishing, replaying = publisher.ports
            engines += ["--engine", f"{publisher.number}=tcp://127.0.0.1:{publishing},replay=tcp://127.0.0.1:{replaying}"]
        up = [kvatlas, "up", "--model", MODEL, *engines, "--http-listen", f"127.0.0.1:{ports[0]}", "--admin-listen", "off"]
        log = (folder / "log").open("wb")
        self.processes = [
            subprocess.Popen(up, stdout=log, stderr=log),
            subprocess.Popen([peer, "--port", str(ports[1]), "--model", MODEL], stdout=log, stderr=log),
        ]
        for indexer in (self.ours, self.theirs):
            wait_until("it listens", lambda one=indexer: one.ask("/query", {}) == {})  # type: ignore[misc]
        for publisher in self.publishers:
            publishing, replaying = publisher.ports
            registered = {
                "instance_id": publisher.number,
                "endpoint": f"tcp://127.0.0.1:{publishing}",
                "replay_endpoint": f"tcp://127.0.0.1:{replaying}",
                "model_name": MODEL,
                "block_size": BLOCK,
            }
            self.theirs.ask("/register", registered)
        # Subscriptions reach a publisher some time after it was connected to: what is not seen by both is published again.
        for publisher in self.publishers:
            wait_until(f"engine {publisher.number} is followed", lambda one=publisher: self._is_followed(one))  # type: ignore[misc]

    def _is_followed(self, publisher: Publisher) -> bool:
        publisher.clear()
        self._mark(publisher)
        time.sleep(0.05)
        return self._are_marked(publisher)

    def _mark(self, publisher: Publisher) -> None:
        self._markers += 1
        self._marker = [200_000 + self._markers] * BLOCK
        publisher.publish([["BlockStored", [self._markers], None, self._marker, BLOCK, None, "GPU"]])

    def _are_marked(self, publisher: Publisher) -> bool:
        return all(indexer.depths(self._marker)[publisher.number] == 1 for indexer in (self.ours, self.theirs))

    def settle(self) -> None:
        """Waits until both have everything that was published: a block of its own is the last of each publisher."""
        for publisher in self.publishers:
            self._mark(publisher)
            wait_until("both have the marker", lambda one=publisher: self._are_marked(one))  # type: ignore[misc]
            publisher.publish([["BlockRemoved", [self._markers], "GPU"]])

    @contextlib.contextmanager
    def alone(self, indexer: Indexer) -> Iterator[None]:
        """The other one stands still meanwhile."""
        other = self.processes[1 if indexer is self.ours else 0]
        other.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            other.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends both."""
        for process in self.processes:
            process.kill()
            process.wait()


SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = [==[{}]==]
"""


def wrk(port: int, path: str, body: object, connections: int, seconds: int, folder: Path) -> tuple[float, float, float]:
    """Requests a second, and p50 and p99 in microseconds."""
    script = folder / "wrk.lua"
    script.write_text(SCRIPT.format(json.dumps(body)))
    threads = str(min(2, connections))
    command = ["wrk", "-t", threads, "-c", str(connections), "-d", f"{seconds}s", "--latency", "-s", str(script)]
    text = subprocess.run([*command, f"http://127.0.0.1:{port}{path}"], capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in text or "Socket errors" in text:
        raise RuntimeError(text)
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", text)[1])  # type: ignore[index]
    return rate, _microseconds(text, "50%"), _microseconds(text, "99%")


def _microseconds(text: str, share: str) -> float:
    value, unit = re.search(rf"{share}\s+([\d.]+)(us|ms|s)", text).groups()  # type: ignore[union-attr]
    return float(value) * {"us": 1, "ms": 1e3, "s": 1e6}[unit]


def speed(site: Site, seed: int, seconds: int, rounds: int, folder: Path) -> None:
    """Queries of 1,024 tokens, of which the engines have all, three quarters, half and a quarter."""
    seeded = random.Random(seed)
    names = Names(seeded)
    prompt = [seeded.randrange(128_000) for _ in range(1024)]
    for publisher in site.publishers:
        part = prompt[: 1024 * (ENGINES - publisher.number) // ENGINES]
        publisher.store(part, names.of(part))
        for _ in range(200):
            other = [seeded.randrange(128_000) for _ in range(512)]
            publisher.store(other, names.of(other))
    site.settle()
    dialect: dict[str, object] = {"model_name": MODEL, "token_ids": prompt}
    contract: dict[str, object] = {"model": MODEL, "tokens": prompt}
    for indexer in (site.ours, site.theirs):
        wait_until("everything is there", lambda one=indexer: one.depths(prompt) == [64, 48, 32, 16])  # type: ignore[misc]
    ways = [("dynamo", site.theirs, "/query", dialect), ("kvatlas", site.ours, "/query", dialect)]
    ways.append(("kvatlas, `/v1/query`", site.ours, "/v1/query", contract))
    print("\n| connections | | queries a second | p50 | p99 |\n|---|---|---|---|---|")
    for connections in (1, 8, 64):
        measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name, *_ in ways}
        for _ in range(rounds):
            for name, indexer, path, body in ways:
                measured[name].append(wrk(indexer.port, path, body, connections, seconds, folder))
        for name, results in measured.items():
            # The round in the middle, by rate.
            rate, middle, late = sorted(results)[len(results) // 2]
            print(f"| {connections} | {name} | {rate:,.0f} | {middle:,.0f} µs | {late / 1e3:,.2f} ms |", flush=True)


def visibility(site: Site, seed: int, samples: int) -> None:
    """From a batch's send to an answer that has it, at 1,000 batches a second from one engine."""
    seeded = random.Random(seed)
    publisher = site.publishers[0]
    print("\n| from send to answer, 1,000 batches a second | p50 | p99 |\n|---|---|---|")
    for title, indexer in (("dynamo", site.theirs), ("kvatlas", site.ours)):
        with site.alone(indexer):
            taken = sorted(_times_until_seen(publisher, indexer, seeded, samples))
        middle, late = taken[len(taken) // 2], taken[len(taken) * 99 // 100]
        print(f"| {title} | {middle * 1e3:.2f} ms | {late * 1e3:.2f} ms |", flush=True)
    publisher.clear()
    site.settle()


def _times_until_seen(publisher: Publisher, indexer: Indexer, seeded: random.Random, samples: int) -> Iterator[float]:
    due = time.monotonic()
    for number in range(samples * 10):
        due += 0.001
        time.sleep(max(0.0, due - time.monotonic()))
        tokens = [seeded.randrange(128_000) for _ in range(BLOCK)]
        publisher.publish([["BlockStored", [seeded.getrandbits(63)], None, tokens, BLOCK, None, "GPU"]])
        if number % 10 == 9:
            begun = time.monotonic()
            while indexer.depths(tokens)[0] == 0:
                pass
            yield time.monotonic() - begun


def relayed(site: Site, relay: Relayed, seed: int, batches: int, rounds: int) -> None:
    """Batches a second that arrive, from one engine that sends as fast as it can."""
    bare, alone = "bare subscriber of pyzmq", "kvatlas, relayed to a bare subscriber of NATS"
    theirs, ours = "dynamo, applied", "kvatlas, applied"
    measured: dict[str, list[float]] = {title: [] for title in (bare, alone, theirs, ours)}
    for number in range(rounds):
        payloads = payloads_of(random.Random(seed + number), batches)
        measured[bare].append(Publisher.bare(payloads))
        measured[alone].append(relay.rate(payloads))
        relay.pause()
        for title, indexer in ((theirs, site.theirs), (ours, site.ours)):
            measured[title].append(_applied(site, indexer, payloads, seed + number))
    print("\n| batches of 4 blocks | a second | least | most |\n|---|---|---|---|")
    for title, rates in measured.items():
        middle = sorted(rates)[len(rates) // 2]
        print(f"| {title} | {middle:,.0f} | {min(rates):,.0f} | {max(rates):,.0f} |", flush=True)


def _applied(site: Site, indexer: Indexer, payloads: list[bytes], seed: int) -> float:
    """How many a second, until an answer has the last."""
    publisher = site.publishers[1]
    seeded = random.Random(-seed)
    marker, name = [seeded.randrange(128_000) for _ in range(BLOCK)], seeded.getrandbits(63)
    with site.alone(indexer):
        begun = time.monotonic()
        for payload in payloads:
            publisher.send(payload)
        publisher.publish([["BlockStored", [name], None, marker, BLOCK, None, "GPU"]])
        wait_until("the last", lambda: indexer.depths(marker)[1] == 1)
        rate = len(payloads) / (time.monotonic() - begun)
    publisher.clear()
    site.settle()
    return rate


def main() -> int:
    """All tables."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--peer", required=True)
    arguments.add_argument("--kvatlas", required=True)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--seconds", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--only", choices=["answers", "queries", "events"], help="one part")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        site = Site(given.peer, given.kvatlas, folder)
        try:
            well = True
            if given.only in (None, "answers"):
                print("| history | answers | wrong, kvatlas | wrong, dynamo | of them too many |\n|---|---|---|---|---|")
                well = conformance("leaves are removed", given.seed, given.steps, False, site)
                well &= conformance("any block is removed", given.seed + 1, given.steps, True, site)
            if given.only in (None, "queries"):
                speed(site, given.seed, given.seconds, given.rounds, folder)
            if given.only in (None, "events"):
                # Other seeds: a name that has been used for other tokens is left out.
                visibility(site, given.seed + 1000, 300)
                relay = Relayed(zmq.Context(), given.kvatlas, folder)
                try:
                    relayed(site, relay, given.seed + 2000, 60_000, given.rounds)
                finally:
                    relay.close()
        except BaseException:
            print((folder / "log").read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            site.close()
    return 0 if well else 1


sys.exit(main())
