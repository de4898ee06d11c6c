"""Runs kvatlas beside llm-d's own index, and compares their answers with what the engines hold.

    python3 tests/routers/llmd_router.py [--seed N] [--short]

llm-d's event pool fills a real Redis from the payloads that engines publish. kvatlas hears the same payloads through its bridge. llm-d's index
asks both. Wants LLMD_BIN (tests/routers/llmd built in a checkout of llm-d-router), KVATLAS_BIN, NATS_SERVER_BIN and redis-server, and a Python
with pyzmq and msgpack. Prints a line a scenario. Ends with 1 where an answer was wrong.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import random
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import zmq

SIZE = 16
PODS = 4
CAPACITY = 300
MODEL = "o/m"
PATIENCE = 30.0

Extras = list[list[str]]


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what tells its blocks from others with the same tokens."""

    tokens: tuple[int, ...]
    adapter: str = ""
    salt: str = ""
    images: tuple[tuple[int, str], ...] = ()

    def blocks(self) -> int:
        return len(self.tokens) // SIZE

    def extras(self) -> Extras:
        """The texts of each block, as llm-d's request side has them."""
        texts: Extras = [[] for _ in range(self.blocks())]
        for block, image in self.images:
            texts[block].append(image)
        if self.salt:
            texts[0].append(self.salt)
        return texts

    def identity(self, block: int) -> tuple[object, ...]:
        """What names the prefix up to a block."""
        images = tuple(image for image in self.images if image[0] <= block)
        return (self.tokens[: (block + 1) * SIZE], self.adapter, self.salt, images)


@dataclass
class Engine:
    """A cache of blocks that publishes as vLLM does; the least recently used leaf goes first."""

    pod: str
    publisher: zmq.Socket[bytes]
    replays: zmq.Socket[bytes]
    names: dict[tuple[object, ...], int] = field(default_factory=dict)
    parents: dict[tuple[object, ...], tuple[object, ...] | None] = field(default_factory=dict)
    children: dict[tuple[object, ...], int] = field(default_factory=dict)
    used: dict[tuple[object, ...], int] = field(default_factory=dict)
    clock: int = 0
    batches: list[bytes] = field(default_factory=list)

    def depth(self, prompt: Prompt) -> int:
        """How many leading blocks of a prompt it has."""
        blocks = range(prompt.blocks())
        return next((block for block in blocks if prompt.identity(block) not in self.names), prompt.blocks())

    def serve(self, prompt: Prompt) -> list[object]:
        """The events of a request for a prompt."""
        self.clock += 1
        held = self.depth(prompt)
        for block in range(held):
            self.used[prompt.identity(block)] = self.clock
        events = self.evict(len(self.names) + prompt.blocks() - held - CAPACITY)
        if held < prompt.blocks():
            events.append(self.store(prompt, held))
        return events

    def store(self, prompt: Prompt, held: int) -> list[object]:
        names = []
        parent = prompt.identity(held - 1) if held else None
        first = self.names[parent] if parent is not None else None
        for block in range(held, prompt.blocks()):
            identity = prompt.identity(block)
            self.names[identity] = random.getrandbits(63) | 1
            self.parents[identity], self.used[identity], self.children[identity] = parent, self.clock, 0
            if parent is not None:
                self.children[parent] += 1
            names.append(self.names[identity])
            parent = identity
        keys = [self.extra_keys(prompt, block) for block in range(held, prompt.blocks())]
        tokens = list(prompt.tokens[held * SIZE : prompt.blocks() * SIZE])
        adapter = prompt.adapter or None
        return ["BlockStored", names, first, tokens, SIZE, 1 if adapter else None, "GPU", adapter, keys]

    def extra_keys(self, prompt: Prompt, block: int) -> list[object] | None:
        """As vLLM lists them: the adapter, images, the salt."""
        keys: list[object] = [prompt.adapter] if prompt.adapter else []
        keys += [[image, 0] for at, image in prompt.images if at == block]
        keys += [prompt.salt] if prompt.salt and block == 0 else []
        return keys or None

    def evict(self, count: int) -> list[object]:
        names = []
        for _ in range(max(count, 0)):
            leaves = [identity for identity in self.names if not self.children[identity] and self.used[identity] < self.clock]
            if not leaves:
                break
            leaf = min(leaves, key=lambda identity: self.used[identity])
            names.append(self.names.pop(leaf))
            parent = self.parents.pop(leaf)
            if parent is not None:
                self.children[parent] -= 1
        return [["BlockRemoved", names, "GPU"]] if names else []

    def clear(self) -> list[object]:
        for table in (self.names, self.parents, self.children, self.used):
            table.clear()
        return [["AllBlocksCleared"]]

    def publish(self, events: list[object]) -> tuple[str, bytes]:
        """Publishes a batch. Returns its topic and its payload."""
        topic = f"kv@{self.pod}@{MODEL}"
        payload: bytes = msgpack.packb([time.time(), events, 0])
        number = len(self.batches)
        self.batches.append(payload)
        self.publisher.send_multipart([topic.encode(), number.to_bytes(8, "big"), payload])
        return topic, payload

    def answer_replays(self) -> None:
        """Gives a bridge that asks what it has missed."""
        while self.replays.poll(0):
            client, *_, start = self.replays.recv_multipart()
            for number in range(int.from_bytes(start, "big"), len(self.batches)):
                self.replays.send_multipart([client, b"", number.to_bytes(8, "big"), self.batches[number]])
            self.replays.send_multipart([client, b"", (-1).to_bytes(8, "big", signed=True), b""])


class Driver:
    """llm-d's code, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], engines: list[Engine]) -> None:
        self.process, self.engines = process, engines

    def do(self, **request: object) -> dict[str, dict[str, object]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        # The bridge may ask for what it has missed meanwhile.
        while not self.poll():
            for engine in self.engines:
                engine.answer_replays()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("llm-d's process has ended")
        answered: dict[str, dict[str, object]] = json.loads(line)
        return answered

    def poll(self) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0.005)[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise TimeoutError(f"nobody listens on port {port}")


@contextlib.contextmanager
def site(algorithm: str, seed: str) -> Iterator[Driver]:
    """Engines, a broker, kvatlas with a bridge, a real Redis, and llm-d's code."""
    kvatlas = os.environ["KVATLAS_BIN"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVATLAS_")}
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:

        def start(name: str, *command: str) -> None:
            log = stack.enter_context(open(Path(temporary) / f"{name}.log", "wb"))
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        nats, redis, own = free_port(), free_port(), free_port()
        start("nats", os.environ["NATS_SERVER_BIN"], "-a", "127.0.0.1", "-p", str(nats))
        start("redis", "redis-server", "--port", str(redis), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
        url = ("--nats-url", f"nats://127.0.0.1:{nats}", "--admin-listen", "off")
        start("daemon", kvatlas, "serve", *url, "--redis-listen", f"127.0.0.1:{own}")
        context = stack.enter_context(zmq.Context())
        scheme = f"llm-d-{algorithm}" + (f":{seed}" if seed else "")
        engines, flags = [], []
        for number in range(PODS):
            publisher, replays = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
            stack.callback(publisher.close, 0)
            stack.callback(replays.close, 0)
            ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (publisher, replays)]
            pod = f"10.0.0.{number}:8000"
            engines.append(Engine(pod, publisher, replays))
            flags += ["--engine", f"{pod}=tcp://127.0.0.1:{ports[0]},replay=tcp://127.0.0.1:{ports[1]},scheme={scheme}"]
        start("bridge", kvatlas, "bridge", *url, "--model", MODEL, "--block-size", str(SIZE), *flags)
        for port in (redis, own):
            wait_for_port(port)
        addresses = [f"redis://127.0.0.1:{port}" for port in (redis, own)]
        command = [os.environ["LLMD_BIN"], *addresses, algorithm, seed, MODEL, str(SIZE)]
        log = stack.enter_context(open(Path(temporary) / "llmd.log", "wb"))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        stack.callback(process.wait)
        stack.callback(process.kill)
        try:
            yield Driver(process, engines)
        except Exception:
            for path in Path(temporary).glob("*.log"):
                print(path.name, path.read_text(errors="replace")[-1500:], file=sys.stderr)
            raise


def prompts_of(dice: random.Random, count: int) -> list[Prompt]:
    """Prompts that share beginnings; some with an adapter, a salt or images."""
    roots = [[dice.randrange(1 << 17) for _ in range(SIZE * 8)] for _ in range(8)]
    made = []
    for _ in range(count):
        tokens = list(dice.choice(roots))[: SIZE * dice.randint(1, 8)]
        tokens += [dice.randrange(1 << 17) for _ in range(dice.randint(0, SIZE * 12))]
        kind = dice.random()
        blocks = len(tokens) // SIZE
        if kind < 0.1:
            prompt = Prompt(tuple(tokens), adapter=dice.choice(["sql", "chat"]))
        elif kind < 0.2:
            prompt = Prompt(tuple(tokens), salt=dice.choice(["tenant-a", "tenant-b"]))
        elif kind < 0.3 and blocks > 1:
            first = dice.randrange(blocks)
            prompt = Prompt(tuple(tokens), images=((first, "z" * 8), (first, "a" * 8)))
        else:
            prompt = Prompt(tuple(tokens))
        made.append(prompt)
    return made


@dataclass
class Tally:
    """What a scenario has found."""

    answers: int = 0
    wrong: int = 0
    redis_wrong: int = 0
    unequal: int = 0
    adapters: int = 0
    adapters_missed: int = 0


def tell(driver: Driver, engine: Engine, events: list[object]) -> None:
    """An engine publishes a batch, which the pool gets, too."""
    topic, payload = engine.publish(events)
    driver.do(op="event", topic=topic, payload=base64.b64encode(payload).decode())


def marker_of(number: int) -> Prompt:
    """A prompt of one block that nobody else has."""
    return Prompt(tuple(range(1 << 20, (1 << 20) + SIZE - 1)) + ((1 << 21) + number,))


def settle(driver: Driver, engine: Engine, events: list[object], marker: Prompt) -> None:
    """The engine publishes last what stores a marker. Waits until both have heard it."""
    tell(driver, engine, events)
    driver.do(op="wait", pod=engine.pod, tokens=marker.tokens)


def compare(driver: Driver, prompt: Prompt, tally: Tally) -> None:
    """Asks both about a prompt, and compares with what the engines hold."""
    truth = {engine.pod: depth for engine in driver.engines if (depth := engine.depth(prompt))}
    answer = driver.do(op="ask", tokens=prompt.tokens, model=prompt.adapter, extras=prompt.extras())
    own, redis = answer["kvatlas"], answer["redis"]
    tally.answers += 1
    if own["depths"] != truth:
        tally.wrong += 1
        print("wrong:", prompt, own, "holds:", truth, file=sys.stderr)
    if prompt.adapter:
        # llm-d's events have the adapter's name in each block, and its requests have not.
        tally.adapters += 1
        tally.adapters_missed += redis["depths"] != truth
        return
    tally.redis_wrong += redis["depths"] != truth
    tally.unequal += (own["depths"], own["scores"]) != (redis["depths"], redis["scores"])


def play(algorithm: str, seed: str, number: int, rounds: int) -> bool:
    """Plays a scenario, and prints its line. Returns whether every answer was right."""
    dice = random.Random(number)
    random.seed(number)
    tally = Tally()
    with site(algorithm, seed) as driver:
        prompts = prompts_of(dice, 200)
        markers = 0
        # The bridge is told of engines that nobody has heard yet.
        for turn in range(rounds):
            for engine in driver.engines:
                for prompt in dice.sample(prompts, 5):
                    events = engine.clear() if dice.random() < 0.01 else engine.serve(prompt)
                    if events:
                        tell(driver, engine, events)
                markers += 1
                marker = marker_of(markers)
                settle(driver, engine, engine.serve(marker), marker)
            for prompt in dice.sample(prompts, 25):
                compare(driver, prompt, tally)
            if turn % 5 == 0:
                guess(driver, dice.choice(prompts), tally)
    print(f"| llm-d, {algorithm} {seed} | {tally.answers} | {tally.wrong} | {tally.redis_wrong} | {tally.unequal} | "
          f"{tally.adapters_missed} of {tally.adapters} |", flush=True)  # fmt: skip
    return tally.wrong == 0 and tally.unequal == 0


def guess(driver: Driver, prompt: Prompt, tally: Tally) -> None:
    """Writes a speculative entry to both, looks, and takes it back."""
    if prompt.extras() != [[] for _ in range(prompt.blocks())] or prompt.adapter or not prompt.blocks():
        return
    driver.do(op="guess", tokens=prompt.tokens, pod="10.9.9.9:8000", back=False)
    answer = driver.do(op="ask", tokens=prompt.tokens)
    own, redis = answer["kvatlas"], answer["redis"]
    known = (own["depths"], own["scores"], own["first"]) == (redis["depths"], redis["scores"], redis["first"])
    driver.do(op="guess", tokens=prompt.tokens, pod="10.9.9.9:8000", back=True)
    tally.answers += 1
    tally.unequal += not known or "10.9.9.9:8000@[speculative]" not in json.dumps(own["first"])
    compare(driver, prompt, tally)


def fill(driver: Driver, prompts: list[Prompt]) -> None:
    """All engines store all prompts, however many blocks they have. Both know them then."""
    for place, engine in enumerate(driver.engines):
        for prompt in prompts:
            tell(driver, engine, [engine.store(prompt, 0)])
        marker = marker_of(place)
        settle(driver, engine, [engine.store(marker, 0)], marker)


def main() -> int:
    """Plays all scenarios."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--short", action="store_true")
    given = arguments.parse_args()
    rounds = 8 if given.short else 200
    print("| router | answers | wrong | wrong, by its own index | unequal | adapters that its own index missed |")
    print("|---|---|---|---|---|---|")
    outcomes = [play("xxh64", "", given.seed, rounds), play("cbor-fnv", "42", given.seed + 1, rounds)]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
