#!/usr/bin/env python3
"""What a fleet needs of kvatlas: memory, cores, shards, NATS traffic, and how long a query waits.

    python3 deploy/sizing.py [--gpus 10 1000 100000] [--FLAG VALUE ...]

What was measured is in MEASURED, with the table that it is from; what is assumed are the flags. Both are printed. Nothing but the standard library.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

GIB = 1 << 30
HEARTBEAT_SECONDS = 1.0
# A thread that is busy for less of its time leaves queries as quick as if there were nothing else.
QUIET = 0.1


@dataclass(frozen=True)
class Figure:
    """A measured figure."""

    value: float
    unit: str
    source: str


MEASURED = {
    "index_block": Figure(24.4, "bytes of the index a distinct block", "the index beside its peers: 20M blocks in a process of its own"),
    "bridge_block": Figure(120, "bytes of the bridge a block of an engine", "deploy/bridge.md: with names, about"),
    "apply_batch": Figure(0.88, "µs of a core a batch, and", "events and queries beside NATS itself: 1, 4 and 64 blocks a batch"),
    "apply_block": Figure(0.018, "µs a block of it, to receive and apply", "the same"),
    "pass_over": Figure(0.82, "µs of a core to receive a batch of another shard", "the same: the counter, with 64 blocks"),
    "bridge_batch": Figure(2.9, "µs of a core of the bridge a batch, and", "answers beside Dynamo's indexer: 3.3 with 4 blocks"),
    "bridge_block_time": Figure(0.11, "µs a block of it", "engines' events: long, translated and encoded"),
    "broker_message": Figure(0.5, "µs of a core of the NATS server a message", "answers beside Dynamo's indexer"),
    "query": Figure(6.8, "µs of a core a query of 64 blocks", "events and queries beside NATS itself: mixed, 8 in flight"),
    "query_p99": Figure(435, "µs, p99 of a query while nothing else goes on", "events and queries beside NATS itself: mixed, 8 in flight"),
    "query_p99_busy": Figure(1244, "µs, p99 while half the greatest rate of events comes in", "the same"),
    "stored_block": Figure(8.5, "bytes on NATS a stored block", "routers over the same engines: memory"),
    "removed_block": Figure(8.3, "bytes on NATS a removed block", "the same"),
    "message": Figure(100, "bytes on NATS a batch beyond its blocks", "deploy/test-vectors.json: a heartbeat has 30, with its subject and NATS's line"),
    "asked_block": Figure(9, "bytes of a query a block, by sequence hashes", "deploy/test-vectors.json"),
    "answered_holder": Figure(40, "bytes of a reply a holder", "deploy/test-vectors.json"),
}


def measured(name: str) -> float:
    """A measured figure's value."""
    return MEASURED[name].value


@dataclass(frozen=True)
class Assumptions:
    """What a fleet does. Each is a flag."""

    gpus_per_worker: int = 8
    blocks_per_worker: int = 100_000
    block_tokens: int = 16
    requests: float = 4.0
    prompt_tokens: int = 4_000
    cached: float = 0.5
    answer_tokens: int = 300
    batches: float = 20.0
    holders: int = 16
    replicas: int = 2
    query_cores: int = 2
    utilisation: float = 0.5
    memory_gib: float = 32.0

    HELP = {
        "gpus_per_worker": "GPUs of a worker",
        "blocks_per_worker": "blocks that a worker's cache has room for, all of them in use and none held elsewhere",
        "block_tokens": "tokens of a block",
        "requests": "requests a second to each worker, each asked for once",
        "prompt_tokens": "tokens of a prompt",
        "cached": "share of a prompt's blocks that the worker has already",
        "answer_tokens": "tokens of an answer",
        "batches": "batches of events that a worker publishes a second, at most one a step",
        "holders": "workers that an answer names",
        "replicas": "daemons of each shard at least",
        "query_cores": "cores of a daemon that answer queries",
        "utilisation": "share of a core that one thread is given to do",
        "memory_gib": "GiB that a daemon may have for its index",
    }


# The least and the greatest value of each assumption.
BOUNDS = {
    "gpus_per_worker": (1, 1_000),
    "blocks_per_worker": (1, 1e9),
    "block_tokens": (1, 65_536),
    "requests": (0, 1e6),
    "prompt_tokens": (1, 1e9),
    "cached": (0, 1),
    "answer_tokens": (0, 1e9),
    "batches": (0.001, 1e6),
    "holders": (0, 1e6),
    "replicas": (1, 1_000),
    "query_cores": (1, 1_000),
    "utilisation": (0.01, 1),
    "memory_gib": (0.001, 1e6),
}


@dataclass(frozen=True)
class Size:
    """What a fleet of so many GPUs needs."""

    gpus: int
    workers: int
    blocks: float
    index_gib: float
    bridges_gib: float
    batches: float
    blocks_per_batch: float
    queries: float
    cells: int
    shards: int
    shard_workers: int
    replicas: int
    daemons: int
    daemon_cores: float
    bridges_cores: float
    broker_cores: float
    events_in_mb: float
    events_out_mb: float
    queries_mb: float
    receive_share: float
    query_share: float
    query_p99_ms: float


def changed_blocks(assumed: Assumptions) -> float:
    """Blocks that a worker stores a second; in the long run as many are removed."""
    tokens = assumed.prompt_tokens * (1 - assumed.cached) + assumed.answer_tokens
    return assumed.requests * tokens / assumed.block_tokens


def wait_p99(per_second: float, service_us: float, arrivals: int = 100_000, seed: int = 1) -> float:
    """The p99 of how long something waits for a thread that others come to at random, each for so long: Lindley's recursion, in µs."""
    if per_second <= 0:
        return 0.0
    chance, wait, waits = random.Random(seed), 0.0, []
    for _ in range(arrivals):
        waits.append(wait)
        wait = max(0.0, wait + service_us - chance.expovariate(per_second) * 1e6)
    return sorted(waits)[int(arrivals * 0.99)]


def sent_batches(assumed: Assumptions) -> float:
    """Batches that a worker sends a second, with its heartbeats: one comes only after so long without a batch."""
    return max(assumed.batches, 1 / HEARTBEAT_SECONDS)


def apply_us(assumed: Assumptions) -> float:
    """µs of a core to receive and apply one batch."""
    return measured("apply_batch") + measured("apply_block") * 2 * changed_blocks(assumed) / sent_batches(assumed)


def shards_of(cell_batches: float, cell_index_gib: float, assumed: Assumptions) -> int:
    """Shards of a cell: each has room for its blocks, and a lane with time for their events."""
    by_memory = cell_index_gib / assumed.memory_gib
    by_lane = cell_batches * apply_us(assumed) / 1e6 / assumed.utilisation
    return max(1, math.ceil(by_memory), math.ceil(by_lane))


def size(gpus: int, assumed: Assumptions) -> Size:
    """What a fleet needs. Cells are deployments of their own: every shard receives all events of its cell, so shards alone do not divide that."""
    workers = math.ceil(gpus / assumed.gpus_per_worker)
    blocks = workers * assumed.blocks_per_worker
    index_gib = blocks * measured("index_block") / GIB
    changed = workers * changed_blocks(assumed)
    batches = workers * sent_batches(assumed)
    queries = workers * assumed.requests
    cells = max(1, math.ceil(batches * measured("pass_over") / 1e6 / assumed.utilisation))
    shards = shards_of(batches / cells, index_gib / cells, assumed)
    # Every shard of every cell is asked, so only replicas divide queries.
    query_load = queries * measured("query") / 1e6 / assumed.query_cores
    replicas = max(assumed.replicas, math.ceil(query_load / assumed.utilisation))
    daemons = cells * shards * replicas
    event_us = batches * (apply_us(assumed) + measured("pass_over") * (shards - 1))
    query_us = queries * measured("query") * shards * cells
    event_bytes = batches * measured("message") + changed * (measured("stored_block") + measured("removed_block"))
    asked = assumed.prompt_tokens / assumed.block_tokens * measured("asked_block") + measured("message")
    answered = assumed.holders * measured("answered_holder") + measured("message")
    # A query comes in once, goes to a replica of each shard of each cell, and each reply comes in and goes out.
    messages = batches * (1 + shards * replicas) + queries * (1 + 3 * shards * cells)
    receive_share = batches / cells * measured("pass_over") / 1e6
    base = measured("query_p99" if max(receive_share, query_load / replicas) < QUIET else "query_p99_busy")
    waits = wait_p99(queries / replicas / assumed.query_cores, measured("query"))
    return Size(
        gpus=gpus,
        workers=workers,
        blocks=blocks,
        index_gib=index_gib * replicas,
        bridges_gib=blocks * measured("bridge_block") / GIB,
        batches=batches,
        blocks_per_batch=2 * changed / batches,
        queries=queries,
        cells=cells,
        shards=shards,
        shard_workers=math.ceil(workers / cells / shards),
        replicas=replicas,
        daemons=daemons,
        daemon_cores=(event_us * replicas + query_us) / 1e6,
        bridges_cores=(batches * measured("bridge_batch") + 2 * changed * measured("bridge_block_time")) / 1e6,
        broker_cores=messages * measured("broker_message") / 1e6,
        events_in_mb=event_bytes / 1e6,
        events_out_mb=event_bytes * shards * replicas / 1e6,
        queries_mb=queries * (asked + answered) * shards * cells / 1e6,
        receive_share=receive_share,
        query_share=query_load / replicas,
        query_p99_ms=(base + waits) / 1e3,
    )


def number(value: float) -> str:
    """A figure with as many digits as it deserves."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


ROWS = {
    "workers": "workers",
    "blocks in all caches": "blocks",
    "memory of all indexes, GiB": "index_gib",
    "memory of all bridges, GiB": "bridges_gib",
    "batches of events a second": "batches",
    "blocks stored or removed, a batch": "blocks_per_batch",
    "queries a second": "queries",
    "cells": "cells",
    "shards of a cell": "shards",
    "workers of a shard": "shard_workers",
    "replicas of a shard": "replicas",
    "daemons in all": "daemons",
    "cores of all daemons": "daemon_cores",
    "cores of all bridges": "bridges_cores",
    "cores of all NATS servers": "broker_cores",
    "events into NATS, MB/s": "events_in_mb",
    "events out of NATS, MB/s": "events_out_mb",
    "queries and replies, MB/s": "queries_mb",
    "share of its time that a daemon's receiving thread is busy": "receive_share",
    "share of their time that its cores for queries are busy": "query_share",
    "p99 of a query, ms": "query_p99_ms",
}


def table(sizes: list[Size]) -> str:
    """The sizes as Markdown."""
    lines = ["| GPUs | " + " | ".join(f"{one.gpus:,}" for one in sizes) + " |", "|---" * (1 + len(sizes)) + "|"]
    for title, name in ROWS.items():
        lines.append(f"| {title} | " + " | ".join(number(getattr(one, name)) for one in sizes) + " |")
    return "\n".join(lines)


def report(sizes: list[Size], assumed: Assumptions) -> str:
    """The sizes, and what they rest on."""
    lines = [table(sizes), "", "Assumed (flags):", ""]
    lines += [f"- `--{name.replace('_', '-')} {getattr(assumed, name):g}`: {what}" for name, what in Assumptions.HELP.items()]
    lines += ["", "Measured (benches/README.md, two cores):", ""]
    lines += [f"- {figure.value:g} {figure.unit} ({figure.source})" for figure in MEASURED.values()]
    return "\n".join(lines)


def within(kind: type[int] | type[float], least: float, most: float) -> Callable[[str], float]:
    """What reads a number between two bounds from the command line."""

    def read(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"write a number from {least:g} to {most:g}, not {text}")
        return value

    read.__name__ = kind.__name__
    return read


def main() -> None:
    """Prints what the fleets need."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=within(int, 1, 1e9), nargs="+", default=[10, 1_000, 100_000], help="fleets, by their GPUs")
    defaults = Assumptions()
    for name, what in Assumptions.HELP.items():
        default = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=within(type(default), *BOUNDS[name]), default=default, help=f"{what} (%(default)s)")
    arguments = vars(parser.parse_args())
    gpus = arguments.pop("gpus")
    assumed = Assumptions(**arguments)
    print(report([size(count, assumed) for count in gpus], assumed))


if __name__ == "__main__":
    main()
