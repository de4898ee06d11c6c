"""For how long answers are not exact while a part restarts: genuine engines serve 30 requests a second meanwhile, and each answer is compared.

Each fault strikes once more while nothing is served: as many blocks have to be known behind it as before.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from processes import kvatlas
from world import Layout, World

REQUESTS_PER_SECOND = 30
# Requests before the first fault: the caches are full, and short replays no longer reach back to the start.
WARM_REQUESTS = 600
# After a fault, answers are watched for so long, in seconds.
WATCHED = 8.0
# How long NATS is away, and for how long a bridge stands still, in seconds.
AWAY = 2.0
STILL = 4.0
# Answers that are called exact may be behind engines for so long: before that, nobody can know that the bridge is gone.
BEHIND = 5.0
# For so long answers may be not exact at most, with one bridge and with two of them.
LIMIT_OF_ONE, LIMIT_OF_TWO = 5.0, 2.0
ROUNDS = 4


class Watched(World):
    """A world in which each look at the holders' states is noted."""

    def __init__(self, layout: Layout, seed: int, folder: Path) -> None:
        # When holders were looked at, and whether all were exact.
        self.looks: list[tuple[float, bool]] = []
        # Whether no requests come.
        self.is_quiet = False
        super().__init__(layout, seed, folder)

    def status(self) -> dict[tuple[str, int], bool]:
        found = super().status()
        are_exact = all(found.get((holder.worker, holder.rank)) for holder in self.holders)
        self.looks.append((time.monotonic(), are_exact))
        return found

    def go(self, seconds: float) -> None:
        """Serves requests unless it is quiet, and compares an answer after each, for some time."""
        due = time.monotonic()
        end = due + seconds
        while due < end:
            if not self.is_quiet:
                self.serve(1)
            self.compare(1, behind=BEHIND)
            due = max(due + 1 / REQUESTS_PER_SECOND, time.monotonic() - 1)
            time.sleep(max(0.0, due - time.monotonic()))

    def known_blocks(self) -> int:
        """How many blocks all holders are known to have, copies counted, once all are exact."""
        self.all_exact()
        answer = self.daemon.ask(f"/v1/status?{urlencode(self.about)}")
        return sum(int(holder["blocks"]) for holder in answer["holders"])

    def inexact_since(self, begun: float) -> float:
        """From the first look on that found a holder not exact, until the next look after the last one, in seconds."""
        looks = [look for look in self.looks if look[0] >= begun]
        doubtful = [number for number, (_, are_exact) in enumerate(looks) if not are_exact]
        if not doubtful:
            return 0.0
        after = looks[min(doubtful[-1] + 1, len(looks) - 1)]
        return after[0] - looks[doubtful[0]][0]


@dataclass
class Fault:
    """A fault, and in which world."""

    name: str
    strike: Callable[[Watched, int], None]
    layout: Layout
    # Where NATS is away, the time for which it is away counts, too.
    limit: float


@dataclass
class Row:
    """What came of a fault."""

    fault: str
    rounds: int
    limit_seconds: float
    not_exact_seconds: float = 0.0
    # For how long an answer was called exact and was behind, at most: until somebody could know that nothing comes any more.
    behind_seconds: float = 0.0
    # Known blocks of all holders before and after the fault, while nothing was served.
    known_before: int = 0
    known_after: int = 0
    answers: int = 0
    wrong_exact: int = 0
    # Blocks of a hundred prompts that caches had and nobody knew, and the other way about, when all was quiet again.
    unknown_blocks: int = 0
    invented_blocks: int = 0
    failure: str | None = None

    def __str__(self) -> str:
        if self.failure:
            return f"| {self.fault} | {self.failure} | | | | | | | |"
        known = f"{self.known_before:,} | {self.known_after:,} | {self.unknown_blocks}"
        lasted = f"{self.not_exact_seconds:.2f} s | {self.limit_seconds:.0f} s | {self.behind_seconds:.2f} s"
        return f"| {self.fault} | {lasted} | {known} | {self.answers:,} | {self.wrong_exact} |"

    @property
    def is_well(self) -> bool:
        """Whether nothing failed, nothing was lost or invented, no exact answer was wrong, and it did not take too long."""
        is_lasting = self.not_exact_seconds > self.limit_seconds
        is_lost = self.known_before != self.known_after or self.unknown_blocks or self.invented_blocks
        return not (self.failure or self.wrong_exact or is_lasting or is_lost)


def stopped(world: Watched, _: int) -> None:
    """SIGTERM, and the next one begins."""
    world.bridge.stop()
    world.bridge.start()


def killed(world: Watched, _: int) -> None:
    """SIGKILL, and the next one begins."""
    world.bridge.kill()
    world.bridge.start()


def one_of_two(how: str) -> Callable[[Watched, int], None]:
    """One of two bridges ends, and does not come back while it is watched; by turns the one and the other."""

    def strike(world: Watched, number: int) -> None:
        assert world.spare
        for bridge in (world.bridge, world.spare):
            if not bridge.lives:
                bridge.start()
                world.all_exact()
                world.go(2.0)
        getattr((world.bridge, world.spare)[number % 2], how)()

    return strike


def still(world: Watched, number: int) -> None:
    """One of two bridges stands still until its lease is lost, and goes on."""
    assert world.spare
    bridge = (world.bridge, world.spare)[number % 2]
    bridge.pause()
    world.go(STILL)
    bridge.resume()


def away(world: Watched, _: int) -> None:
    """NATS is killed, and comes back."""
    world.broker.kill()
    world.go(AWAY)
    world.broker.start()


ONE = Layout(kinds=("vllm", "sglang"), engines=4, keeps_state=True)
TWO = Layout(kinds=("vllm", "sglang"), engines=4, has_spare=True)
SHORT = Layout(engines=4, keeps_state=True, buffer_steps=100)

FAULTS = (
    Fault("one bridge, SIGTERM, started again", stopped, ONE, LIMIT_OF_ONE),
    Fault("one bridge, SIGKILL, started again", killed, ONE, LIMIT_OF_ONE),
    Fault("one bridge, upgrade, replays of 100 batches", stopped, SHORT, LIMIT_OF_ONE),
    Fault("one of two bridges, SIGTERM", one_of_two("stop"), TWO, LIMIT_OF_TWO),
    Fault("one of two bridges, SIGKILL", one_of_two("kill"), TWO, LIMIT_OF_TWO),
    Fault(f"one of two bridges, {STILL:.0f} s still: the lease is lost", still, TWO, LIMIT_OF_TWO),
    Fault(f"NATS away for {AWAY:.0f} s, one bridge", away, ONE, AWAY + LIMIT_OF_ONE),
    Fault(f"NATS away for {AWAY:.0f} s, two bridges", away, TWO, AWAY + LIMIT_OF_TWO),
)


def play(fault: Fault, seed: int, folder: Path) -> Row:
    """Plays a fault some times over."""
    row = Row(fault.name, ROUNDS, fault.limit)
    try:
        with Watched(fault.layout, seed, folder) as world:
            world.serve(WARM_REQUESTS)
            world.settles(20)
            for number in range(ROUNDS):
                begun = time.monotonic()
                fault.strike(world, number)
                world.go(WATCHED)
                row.not_exact_seconds = max(row.not_exact_seconds, world.inexact_since(begun))
            world.is_quiet = True
            world.settles(20)
            row.known_before = world.known_blocks()
            fault.strike(world, ROUNDS)
            world.go(WATCHED / 2)
            row.known_after = world.known_blocks()
            world.settles(20)
            row.behind_seconds = world.counts.behind
            row.unknown_blocks, row.invented_blocks = world.differences(world.chats.probes(100))
            row.answers, row.wrong_exact = world.counts.answers, world.counts.wrong_exact
    except Exception as error:
        traceback.print_exc()
        row.failure = f"FAILED: {type(error).__name__} {error}"
    return row


def measure(seed: int, only: str, output: Path | None) -> int:
    """Plays all faults, prints the table, and writes it. Returns 1 where one was not well."""
    version = subprocess.run([kvatlas(), "--version"], capture_output=True, text=True, check=True).stdout.strip()
    about: dict[str, Any] = {"date": datetime.date.today().isoformat(), "kvatlas": version, "cores": os.cpu_count(), "system": platform.platform(terse=True)}
    about |= {"python": platform.python_version(), "seed": seed, "requests_per_second": REQUESTS_PER_SECOND, "load": round(os.getloadavg()[0], 1)}
    about |= {"behind_limit_seconds": BEHIND}
    print("| fault | not exact for, at most | limit | called exact and behind, at most | known before | after | not known again | answers | wrong, called exact |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for number, fault in enumerate(FAULTS):
        if only not in fault.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(play(fault, seed, Path(folder) / str(number)))
        print(rows[-1], flush=True)
    if output:
        output.write_text(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return int(not all(row.is_well for row in rows))

