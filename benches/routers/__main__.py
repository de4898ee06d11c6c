"""Lets routers choose among vLLM's caches, and counts how often another engine would have reused more.

    python3 benches/routers [--quick] [--seed N] [--only TEXT] [--ways NAME,...] [--keep] [--output FOLDER]

All ways get the same seeds, engines and requests; see cases.py and the ways beside it. Writes routers.json, routers.md and routers.svg into FOLDER. What a way wants,
and whence it comes, is in run.sh. A way that cannot be had is left out, and said.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / folder) for folder in ("routers", "engines")]

import memory
import overhead
from cases import SCENARIOS, Scenario
from plot import plot
from processes import kvatlas
from ways import Way

REQUESTS, REQUESTS_QUICK = 200, 60
MEMORY, BLOCKS = "memory", 1_000_000
OVERHEAD, OVERHEAD_REQUESTS = "overhead", 1_000
FAILED = "failed"
# A port may be taken between two lives of a process.
ATTEMPTS = 2


@dataclass
class Entry:
    """A way, by what it is called."""

    title: str
    module: str
    name: str
    # What requests may say that this way's interface has no word for.
    lacks: tuple[str, ...] = ()
    # The environment's variable without which it cannot be had.
    wants: str | None = None
    # What the way is called that keeps what it knows in a directory.
    stateful: str | None = None

    def way(self, keeps_state: bool = False) -> type[Way]:
        """The way itself, where what it wants is there."""
        if self.wants and not Path(os.environ.get(self.wants, "")).is_file():
            raise ImportError(f"{self.wants} names no program")
        found: type[Way] = getattr(importlib.import_module(self.module), self.stateful if keeps_state and self.stateful else self.name)
        return found

    def cannot_play(self, scenario: Scenario) -> str | None:
        """Why it has no part in a scenario."""
        if missing := scenario.needs() & set(self.lacks):
            return f"no {', '.join(sorted(missing))}"
        return "keeps nothing" if scenario.keeps_state and not self.stateful else None


WAYS = {
    "vllm": Entry("vllm-router 0.1.17", "ways", "Direct", wants="VLLM_ROUTER"),
    "republished": Entry("the same, behind kvatlas", "ways", "Republished", wants="VLLM_ROUTER"),
    "smg": Entry("SMG 1.13.0", "smg_way", "Smg", lacks=("salts", "adapters")),
    "dynamo": Entry("Dynamo 1.6.1", "dynamo_way", "Dynamo"),
    "llmd": Entry("llm-d's indexer", "llmd_way", "Llmd", wants="LLMD_INDEXER"),
    "kvatlas": Entry("kvatlas, the most blocks", "ways", "Asked", stateful="AskedWithState"),
    "hinted": Entry("kvatlas, with hints", "hinted_way", "Hinted", stateful="HintedWithState"),
    "example": Entry("kvatlas, the example's policy", "example_way", "Example", stateful="ExampleWithState"),
}
# Ways that keep what others keep.
WITHOUT_MEMORY = ("republished", "hinted", "example")
PACKAGES = ("vllm-router", "smg", "smg-grpc-servicer", "ai-dynamo-runtime")


def available(names: list[str]) -> list[str]:
    """The ways of these that can be had; of the others it is said why not."""
    found = []
    for name in names:
        try:
            WAYS[name].way()
        except ImportError as error:
            print(f"SKIPPED: {WAYS[name].title}: {error}", file=sys.stderr, flush=True)
        else:
            found.append(name)
    return found


def cell(rows: list[dict[str, Any]], scenario: str, way: str) -> str:
    """What one way did in one scenario."""
    row = next((row for row in rows if (row["scenario"], row["way"]) == (scenario, way)), None)
    if row is None:
        return ""
    if "tally" not in row:
        return str(row["not_played"])
    tally = row["tally"]
    return f"{tally['missed']} of {tally['requests']}, {tally['blocks_missed']:,} of {tally['blocks']:,}"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of choices as Markdown."""
    ways = [way for way in WAYS if any(row["way"] == way for row in rows)]
    lines = ["| scenario | " + " | ".join(WAYS[way].title for way in ways) + " |", "|---" * (1 + len(ways)) + "|"]
    for name in dict.fromkeys(row["scenario"] for row in rows):
        lines.append(f"| {name} | " + " | ".join(cell(rows, name, way) for way in ways) + " |")
    return "\n".join(lines) + "\n"


def memory_table(rows: list[dict[str, Any]]) -> str:
    """The rows of memory as Markdown."""
    lines = ["| | MiB with nothing | with a million blocks | when they are gone | with another million | when these are gone | bytes a block | prompts found |"]
    lines.append("|---" * 8 + "|")
    for row in rows:
        figures = [f"{mib:,.0f}" for mib in row["memory"]["mib"].values()] + [f"{row['memory']['bytes_a_block']:,}"]
        figures.append(f"{sum(row['memory']['samples_found'])} of {2 * memory.SAMPLES}")
        lines.append(f"| {WAYS[row['way']].title} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n"


def overhead_table(rows: list[dict[str, Any]]) -> str:
    """The rows of overhead as Markdown."""
    lines = ["| | added to a request, ms: p50 | p99 | computing of its processes, ms a request |", "|---" * 4 + "|"]
    for row in rows:
        found = row["overhead"]
        added = found["added_ms"]
        lines.append(f"| {WAYS[row['way']].title} | {added['p50']:.2f} | {added['p99']:.2f} | {found['computing_ms']:.2f} |")
    return "\n".join(lines) + "\n"


def installed(package: str) -> str | None:
    """The version of a package of this Python."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def about(seed: int, requests: int) -> dict[str, Any]:
    """What was measured with what, where, and when."""
    own = subprocess.run([kvatlas(), "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {"cores": os.cpu_count(), "architecture": platform.machine(), "system": platform.platform(terse=True)},
        "versions": {"kvatlas": own, "vllm": "0.33.0", "llm-d-router": os.environ.get("LLMD_VERSION"), "python": platform.python_version()}
        | {package: installed(package) for package in PACKAGES},
        "seed": seed,
        "requests": requests,
    }


def play(scenario: str, way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One way in one scenario, in a process of its own, which can have one kind of engine only."""
    row: dict[str, Any] = {"scenario": scenario, "way": way, "date": datetime.date.today().isoformat()}
    if scenario in SCENARIOS and (why_not := WAYS[way].cannot_play(SCENARIOS[scenario])):
        return row | {"not_played": why_not}
    command = [sys.executable, str(HERE), "--seed", str(arguments.seed), *(["--quick"] if arguments.quick else [])]
    for attempt in range(ATTEMPTS):
        began = time.monotonic()
        played = subprocess.run([*command, "--one", scenario, way], stdout=subprocess.PIPE, check=False)
        row |= {"seconds": round(time.monotonic() - began, 1), "load": round(os.getloadavg()[0], 1), "attempts": attempt + 1}
        if played.returncode == 0:
            row |= json.loads(played.stdout.splitlines()[-1])
            return row
    return row | {"not_played": FAILED}


def one(scenario: str, entry: Entry, seed: int, is_quick: bool) -> dict[str, Any]:
    """What one way does in one scenario."""
    if scenario == MEMORY:
        return {"memory": memory.measure(seed, entry.way(), BLOCKS // 10 if is_quick else BLOCKS)}
    if scenario == OVERHEAD:
        return {"overhead": overhead.measure(seed, entry.way(), OVERHEAD_REQUESTS // 10 if is_quick else OVERHEAD_REQUESTS)}
    played = SCENARIOS[scenario]
    return {"tally": asdict(played.run(seed, entry.way(played.keeps_state), REQUESTS_QUICK if is_quick else REQUESTS))}


def write(folder: Path, described: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Writes what has been measured so far. Returns the tables."""
    choices = [row for row in rows if row["scenario"] in SCENARIOS]
    tables = table(choices)
    for name, of_rows in ((MEMORY, memory_table), (OVERHEAD, overhead_table)):
        tables += "\n" + of_rows([row for row in rows if name in row])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "routers.json").write_text(json.dumps(described | {"rows": rows}, indent=1) + "\n")
    (folder / "routers.md").write_text(tables)
    (folder / "routers.svg").write_text(plot(choices, {name: entry.title for name, entry in WAYS.items()}, described))
    return tables


def main() -> int:
    """Plays all. Ends with 1 where a way failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{REQUESTS_QUICK} requests instead of {REQUESTS}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help=f"the scenarios with this text in their names: also '{MEMORY}' or '{OVERHEAD}'")
    parser.add_argument("--ways", default=",".join(WAYS), help="these ways only: %(default)s")
    parser.add_argument("--output", type=Path, default=HERE.parents[1] / "target/routers")
    parser.add_argument("--keep", action="store_true", help="keep what is in the folder, and play only what is not")
    parser.add_argument("--one", nargs=2, metavar=("SCENARIO", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        scenario, way = arguments.one
        print(json.dumps(one(scenario, WAYS[way], arguments.seed, arguments.quick)))
        return 0
    described = about(arguments.seed, REQUESTS_QUICK if arguments.quick else REQUESTS)
    kept = arguments.output / "routers.json"
    before = json.loads(kept.read_text())["rows"] if arguments.keep and kept.exists() else []
    rows = [row for row in before if row.get("not_played") != FAILED]
    ways = available(arguments.ways.split(","))
    for scenario in filter(lambda name: arguments.only in name, [*SCENARIOS, MEMORY, OVERHEAD]):
        for way in ways:
            is_known = any((row["scenario"], row["way"]) == (scenario, way) for row in rows)
            if is_known or (scenario == MEMORY and way in WITHOUT_MEMORY):
                continue
            rows.append(play(scenario, way, arguments))
            print(f"{scenario}, {WAYS[way].title}: {rows[-1]}", flush=True)
            write(arguments.output, described, rows)
    print(write(arguments.output, described, rows))
    return int(any(row.get("not_played") == FAILED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
