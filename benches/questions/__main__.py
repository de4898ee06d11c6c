"""Measures how fast routers' own clients are answered, beside what they ask without kvatlas.

    python3 benches/questions [--quick] [--rounds N] [--only redis|grpc|cell|dynamo] [--out FILE]

| asked by | of kvatlas | beside it |
|---|---|---|
| llm-d's index (Go, go-redis) | its Redis listener | a real Redis, which llm-d's event pool fills from the same events |
| a Go client of gRPC | `MatchExternalKvPrefix` | `grpc.health.v1` of the same server, whose answer costs nothing |
| the same, with 256 workers of 32,768 pages | the same | the same, and what SGLang says of its own indexer |
| Dynamo's router (Python) | its remote indexer, over NATS | the index in the router itself, and the one that another such router serves (`serve_indexer`) |

Wants LLMD_BIN, GRPC_LOAD and DYNAMO_PYTHON, or leaves out what is missing; KVATLAS_BIN, a release build, and NATS_SERVER_BIN. In each round all sides are asked
one behind the other, in turns that begin with another one each time. Writes tables of medians with the least and the most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"
sys.path[:0] = [str(TESTS / "engines"), str(TESTS / "routers")]

import dynamo_site
import kvatlas
from lines import Lines

FLIGHTS = (1, 8, 64)
# Blocks of a prompt, and how many questions are one measurement.
DEPTHS = {64: 8000, 1024: 800}
CELL_QUESTIONS = 4000
PROMPTS = 8
HOLDERS = 4
SIZE = 16
# SGLang's own cell: workers, pages of each, how many of them all begin with, and pages of a prompt behind these.
CELL_WORKERS, CELL_PAGES, CELL_PREFIX, CELL_DEPTH = 256, 32_768, 256, 508

# Asks so many questions with so many in flight. Returns questions a second, and the 50th and 99th percentile in µs; where it is
# measured, also the server's processor time for one in µs.
Measure = Callable[[int, int], dict[str, float]]
Rates = list[dict[str, float]]


class Bench:
    """Takes the measurements, and keeps the lines of the tables."""

    def __init__(self, rounds: int, share: float) -> None:
        self._rounds, self._share = rounds, share
        self.lines: list[str] = []

    def head(self, title: str, sides: list[str], more: str = "") -> None:
        """Begins a table. `more` ends the title of each side's second column."""
        columns = " | ".join(f"{side}: questions a second | p50, p99 ms{more}" for side in sides)
        self._print(f"\n## {title}\n\n| blocks | in flight | {columns} |\n|{'---|' * (2 + 2 * len(sides))}")

    def row(self, blocks: int, questions: int, sides: list[Measure]) -> None:
        """The lines of prompts of so many blocks; so many questions are one measurement."""
        for flight in FLIGHTS:
            count = max(8 * flight, int(questions * self._share))
            found: list[Rates] = [[] for _ in sides]
            for turn in range(self._rounds):
                for step in range(len(sides)):
                    place = (turn + step) % len(sides)
                    rates = sides[place](count, flight)
                    if rates["failed"]:
                        raise RuntimeError(f"{rates['failed']} of {count} questions have failed, or were answered otherwise than before")
                    found[place].append(rates)
            self._print(f"| {blocks} | {flight} | " + " | ".join(map(cell, found)) + " |")

    def _print(self, text: str) -> None:
        print(text, flush=True)
        self.lines.append(text)


def cell(rates: Rates) -> str:
    """Medians, with the least and the most."""
    speeds = [rate["per_second"] for rate in rates]
    times = [key for key in ("p50_us", "p99_us", "server_us") if key in rates[0]]
    medians = (statistics.median(rate[key] for rate in rates) / 1000 for key in times)
    return f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f}–{max(speeds):,.0f}) | {', '.join(f'{median:.2f}' for median in medians)}"


def redis(bench: Bench) -> None:
    """llm-d's index asks both."""
    from llmd_site import Driver
    from processes import Process
    from redis_engines import filled_site

    bench.head("llm-d's index over Redis", ["a real Redis", "kvatlas"], ", of the server's processor")
    dice = random.Random(1)
    for blocks, questions in DEPTHS.items():
        prompts = [[dice.randrange(1 << 17) for _ in range(SIZE * blocks)] for _ in range(PROMPTS)]
        with filled_site(prompts) as driver:

            def measure(index: str, server: Process, driver: Driver = driver, tokens: Any = prompts) -> Measure:
                def ask(count: int, flight: int) -> Any:
                    before = server.processor_time()
                    rates: Any = driver.do(op="bench", index=index, prompts=tokens, count=count, flight=flight)
                    return rates | {"server_us": (server.processor_time() - before) / count * 1e6}

                return ask

            bench.row(blocks, questions, [measure("redis", driver.redis), measure("kvatlas", driver.daemon)])


def pages(dice: random.Random, blocks: int) -> list[int]:
    """The hashes of a prompt of SGLang: any, as nobody computes them here."""
    return [dice.getrandbits(63) for _ in range(blocks)]


async def publish(url: str, prompts: list[list[int]]) -> None:
    """Holders with addresses store the prompts, which the daemon then knows."""
    namespace = "m_ssglang"
    async with kvatlas.connect(url) as connection:
        client = kvatlas.QueryClient(connection)
        for number in range(HOLDERS):
            profile = kvatlas.Profile(address=f"http://10.0.0.{number}:30000")
            options = kvatlas.PublisherOptions(profile=profile)
            publisher = await kvatlas.Publisher.start(connection, namespace, f"sglang-{number}", options=options)
            for hashes in prompts:
                await publisher.publish(kvatlas.Stored(hashes))
            await client.applied(namespace, f"sglang-{number}", await publisher.flush())
            # No goodbye: the holders stay.
            await publisher.aclose()


@contextlib.contextmanager
def grpc_site() -> Iterator[tuple[int, Lines]]:
    """A broker by its port, and a client of gRPC of the daemon beside it."""
    from processes import Broker, Daemon, free_ports

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        nats_port, http_port, port = free_ports(3)
        broker = Broker(Path(folder), nats_port)
        settings: dict[str, object] = {"grpc-listen": f"127.0.0.1:{port}"}
        # Never: nobody publishes any more.
        settings["namespace-defaults-stale-after-ms"] = settings["namespace-defaults-remove-after-ms"] = 0
        daemon = Daemon(Path(folder), nats_port, http_port, settings, ["serve"])
        for process in (broker, daemon):
            process.start()
            stack.callback(process.stop)
        load = Lines([os.environ["GRPC_LOAD"], f"127.0.0.1:{port}"])
        stack.callback(load.close)
        yield nats_port, load


def measure_grpc(load: Lines, asked: list[list[int]]) -> Measure:
    """Asks about these prompts; without any, about the server's health."""
    return lambda count, flight: load.ask(prompts=asked, count=count, flight=flight)


def grpc(bench: Bench) -> None:
    """A client of gRPC asks, and beside it what takes no search."""
    bench.head("gRPC", ["health, which asks nothing", "`MatchExternalKvPrefix`"])
    dice = random.Random(1)
    for blocks, questions in DEPTHS.items():
        with grpc_site() as (nats_port, load):
            prompts = [pages(dice, blocks) for _ in range(PROMPTS)]
            asyncio.run(publish(f"nats://127.0.0.1:{nats_port}", prompts))
            bench.row(blocks, questions, [measure_grpc(load, asked) for asked in ([], prompts)])


def cell_prompts() -> tuple[list[list[int]], list[list[list[int]]]]:
    """The prefix of all workers' prompts in pages, and each worker's own prompts behind it: 32,768 pages a worker with the prefix."""
    dice = random.Random(2)
    prefix = pages(dice, CELL_PREFIX)
    own = (CELL_PAGES - CELL_PREFIX) // CELL_DEPTH
    return prefix, [[pages(dice, CELL_DEPTH) for _ in range(own)] for _ in range(CELL_WORKERS)]


async def publish_cell(url: str, prefix: list[int], prompts: list[list[list[int]]]) -> None:
    """All workers store what is theirs."""
    async with kvatlas.connect(url) as connection:
        client = kvatlas.QueryClient(connection)
        for number, own in enumerate(prompts):
            profile = kvatlas.Profile(address=f"http://10.0.{number // 256}.{number % 256}:30000")
            publisher = await kvatlas.Publisher.start(
                connection, "m_ssglang", f"sglang-{number}", options=kvatlas.PublisherOptions(profile=profile)
            )
            await publisher.publish(kvatlas.Stored(prefix))
            for hashes in own:
                await publisher.publish(kvatlas.Stored(hashes, parent=prefix[-1]))
            await client.applied("m_ssglang", f"sglang-{number}", await publisher.flush())
            await publisher.aclose()


def cell_of_sglang(bench: Bench) -> None:
    """SGLang's own measurement of its indexer: 256 workers with 32,768 blocks each. Theirs took 2.0 ms in the mean, 2.5 ms at most for 99 %."""
    prefix, prompts = cell_prompts()
    dice = random.Random(3)
    some = [prefix + dice.choice(dice.choice(prompts)) for _ in range(8 * PROMPTS)]
    shared = [prefix[:depth] for depth in (CELL_PREFIX // 2, CELL_PREFIX)]
    sides = ["health, which asks nothing", "one worker has all, 255 the beginning", "all workers have all"]
    bench.head(f"gRPC, {CELL_WORKERS} workers with {CELL_PAGES:,} pages each", sides)
    with grpc_site() as (nats_port, load):
        asyncio.run(publish_cell(f"nats://127.0.0.1:{nats_port}", prefix, prompts))
        sides_asked = [[], some, shared]
        bench.row(CELL_PREFIX + CELL_DEPTH, CELL_QUESTIONS, [measure_grpc(load, asked) for asked in sides_asked])


def dynamo(bench: Bench) -> None:
    """Dynamo's router asks itself, another router, or kvatlas."""
    bench.head("Dynamo's router", ["the index in the router", "another router's index", "kvatlas"])
    for blocks, questions in DEPTHS.items():
        with contextlib.ExitStack() as stack:

            def site(indexer: Path | None, blocks: int = blocks, stack: contextlib.ExitStack = stack) -> Lines:
                own = stack.enter_context(dynamo_site.site("nats", 4 * PROMPTS * blocks, indexer))
                log = stack.enter_context(open(own.folder / "load.log", "wb"))
                arguments = [str(HERE / "dynamo_load.py"), str(SIZE), str(dynamo_site.WORDS)]
                load = Lines([os.environ["DYNAMO_PYTHON"], *arguments], env=own.environment, stderr=log)
                stack.callback(load.close)
                load.ask(blocks=blocks, prompts=PROMPTS)
                return load

            def measure(load: Lines, index: str) -> Measure:
                return lambda count, flight: load.ask(index=index, count=count, flight=flight)

            ours, theirs = site(None), site(HERE / "dynamo_serve.py")
            bench.row(blocks, questions, [measure(ours, "own"), measure(theirs, "remote"), measure(ours, "remote")])


def output(*command: str) -> str:
    """The first line that a command prints."""
    with contextlib.suppress(OSError):
        return (subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines() or ["?"])[0]
    return "not there"


def surroundings(rounds: int) -> Iterator[str]:
    """What the figures are of."""
    processors = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    yield "# Routers' questions, answered\n"
    yield f"`benches/questions/run.sh`, {time.strftime('%Y-%m-%d')}; medians of {rounds} rounds, with (least–most).\n"
    yield f"- {len(processors)} × {processors[0] if processors else 'unknown'}, Linux {platform.release()}; clients and servers share it"
    for name, command in {
        "kvatlas": (os.environ["KVATLAS_BIN"], "--version"),
        "Redis": ("redis-server", "--version"),
        "Go": ("go", "version"),
        "Dynamo": (os.environ.get("DYNAMO_PYTHON", "python3"), "-c", "import importlib.metadata as m; print(m.version('ai-dynamo-runtime'))"),
    }.items():
        yield f"- {name}: {output(*command)}"
    yield f"- {PROMPTS} prompts, which {HOLDERS} workers have whole (with Dynamo one of two)"


def main() -> None:
    """Measures what can be measured."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="a twentieth of the questions, and one round: whether it works")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--only", choices=["redis", "grpc", "cell", "dynamo"])
    arguments.add_argument("--out", type=Path, default=HERE / "figures.md")
    given = arguments.parse_args()
    rounds = 1 if given.quick else given.rounds
    bench = Bench(rounds, 0.05 if given.quick else 1.0)
    parts = {"redis": (redis, "LLMD_BIN"), "grpc": (grpc, "GRPC_LOAD"), "cell": (cell_of_sglang, "GRPC_LOAD"), "dynamo": (dynamo, "DYNAMO_PYTHON")}
    for name, (part, needed) in parts.items():
        if os.environ.get(needed) and given.only in (None, name):
            part(bench)
    given.out.write_text("\n".join([*surroundings(rounds), *bench.lines, ""]))
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
