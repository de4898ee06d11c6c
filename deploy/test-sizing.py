#!/usr/bin/env python3
"""Checks sizing.py: against theory, against what it rests on, and that sizing.md has its tables."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from sizing import BOUNDS, GIB, MEASURED, ROWS, Assumptions, measured, size, wait_p99

HERE = Path(__file__).resolve().parent


def share_that_waits_less(wait: float, per_second: float, service_us: float) -> float:
    """The share of arrivals that wait no longer than so long, in the queue M/D/1 (Erlang's formula)."""
    rate, load = per_second / 1e6, per_second / 1e6 * service_us
    total = 0.0
    for number in range(int(wait // service_us) + 1):
        exponent = rate * (number * service_us - wait)
        total += exponent**number / math.factorial(number) * math.exp(-exponent)
    return (1 - load) * total


def check_waits() -> None:
    """The simulated queue waits as theory says."""
    assert wait_p99(0, 1.0) == 0
    for load in (0.3, 0.5, 0.7):
        per_second = load * 1e6 / 2.0
        share = share_that_waits_less(wait_p99(per_second, 2.0), per_second, 2.0)
        assert 0.985 < share < 0.995, (load, share)


def check_bounds() -> None:
    """No daemon is given more than it may have, and more GPUs never need less."""
    for assumed in (Assumptions(), replace(Assumptions(), gpus_per_worker=1, blocks_per_worker=25_000), replace(Assumptions(), memory_gib=4.0)):
        sizes = [size(10**power, assumed) for power in range(7)]
        for one in sizes:
            daemon_gib = one.blocks * measured("index_block") / GIB / one.cells / one.shards
            assert daemon_gib <= assumed.memory_gib and one.receive_share <= assumed.utilisation >= one.query_share, one
        for name in set(ROWS.values()) - {"shard_workers", "receive_share", "query_share", "query_p99_ms", "blocks_per_batch"}:
            figures = [getattr(one, name) for one in sizes]
            assert figures == sorted(figures), (name, figures)


def check_counts() -> None:
    """Messages are counted as the page says, and heartbeats only where batches leave room for them."""
    assumed = replace(Assumptions(), replicas=1)
    one = size(1_000, assumed)
    assert one.shards == one.cells == 1 and one.batches == one.workers * assumed.batches, one
    # A batch comes in and goes out. A query does, too, and so does its reply.
    messages = 2 * one.batches + 4 * one.queries
    assert math.isclose(one.broker_cores, messages * measured("broker_message") / 1e6), one
    idle = size(1_000, replace(assumed, batches=0.5))
    assert idle.batches == idle.workers, idle


def check_refusals() -> None:
    """What would divide by nothing, or say nonsense, is refused."""
    for flag, text in [("gpus", "0"), ("batches", "0"), ("utilisation", "0"), ("cached", "1.5"), ("replicas", "0"), ("cached", "nan"), ("gpus", "ten")]:
        ran = subprocess.run([sys.executable, HERE / "sizing.py", f"--{flag}", text], capture_output=True, text=True)
        assert ran.returncode == 2 and f"--{flag}" in ran.stderr and "Traceback" not in ran.stderr, ran
    assert set(BOUNDS) == set(Assumptions.HELP)


def check_sources() -> None:
    """What is read off the vectors and the table of figures is there."""
    vectors = json.loads((HERE / "test-vectors.json").read_text())
    heartbeat = next(batch for batch in vectors["batches"] if batch["name"] == "a heartbeat")
    assert len(heartbeat["payload"]) // 2 == 30 < measured("message")
    figures = (HERE.parent / "benches/README.md").read_text()
    for shown in ("24.4", "| mixed | 8 | 35,264 | 102 % | 6.8 | 215 / 435", "227 / 1,244", "| 64 | 391,566 (381,775–412,567) | 2.01"):
        assert shown in figures, f"benches/README.md has no longer: {shown}"
    assert abs(measured("apply_batch") + 64 * measured("apply_block") - 2.01) < 0.05
    assert abs(measured("bridge_batch") + 4 * measured("bridge_block_time") - 3.3) < 0.1


def check_page() -> None:
    """The page has what its commands print."""
    page = (HERE / "sizing.md").read_text()
    commands = [line.removeprefix("python3 deploy/") for line in page.splitlines() if line.startswith("python3 deploy/sizing.py")]
    assert len(commands) == 2, commands
    for command in commands:
        script, *arguments = shlex.split(command)
        printed = subprocess.run([sys.executable, HERE / script, *arguments], capture_output=True, text=True, check=True).stdout
        assert printed.partition("\n\n")[0] in page, f"sizing.md has not what {command} prints:\n{printed}"
    assert all(f"| {figure.value:g} {figure.unit}" in page for figure in MEASURED.values()), "a measured figure is not in sizing.md"


check_waits()
check_bounds()
check_counts()
check_refusals()
check_sources()
check_page()
print("sizing.py counts as theory does, and sizing.md has its tables")
