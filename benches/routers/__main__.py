"""Lets routers choose among vLLM's caches, and counts how often another engine would have reused more.

    python3 benches/routers [--quick] [--seed N] [--only TEXT] [--output FOLDER]

The ways are those of tests/routers/vllm_fleet.py: vLLM's router on the engines' own sockets, the same on what kvatlas publishes once more, and a small
router that asks kvatlas. All get the same seeds, engines and requests. Writes routers.json and routers.md into FOLDER. Wants what
tests/routers/vllm_router.py wants.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / folder) for folder in ("routers", "engines")]

from chats import Chats
from processes import kvatlas
from vllm_fleet import ADAPTERS, SIZE, WAYS, Site, Tally, plain_chats, sites

NAMES = {"direct": "vllm-router 0.1.17", "republished": "the same, behind kvatlas", "asked": "a small router that asks kvatlas"}


def spaced(seed: int, way: str, requests: int, **more: Any) -> Tally:
    """Requests 25 ms apart."""
    with sites(seed, way, **more) as site:
        return site.drive(plain_chats(seed), requests)


def back_to_back(seed: int, way: str, requests: int) -> Tally:
    """Each request as soon as the last one is answered."""
    with sites(seed, way) as site:
        return site.drive(plain_chats(seed), requests, spacing=0)


def apart(seed: int, way: str, requests: int, salts: list[str | None], adapters: list[str | None]) -> Tally:
    """Conversations that begin alike, with and without salts or adapters."""
    with sites(seed, way) as site:
        return site.drive(Chats(seed, SIZE, salts, adapters), requests)


def router_restarts(seed: int, way: str, requests: int, buffer_steps: int) -> Tally:
    """The router restarts, and where it asks kvatlas, that does, too."""
    with sites(seed, way, buffer_steps=buffer_steps) as site:
        chats = plain_chats(seed)
        site.drive(chats, requests)
        restarted = site.kvatlas if way == "asked" else site.router
        restarted.stop()
        site.begin(restarted)
        return site.drive(chats, requests // 2)


def lost(seed: int, way: str, requests: int) -> Tally:
    """A fifth of the messages of a while is lost, and nothing replays them."""

    def lose(site: Site, share: float) -> None:
        for worker in site.fleet.workers:
            if worker.proxy:
                worker.proxy.lose(share)

    with sites(seed, way, has_replay=False) as site:
        chats = plain_chats(seed)
        site.drive(chats, requests)
        lose(site, 0.2)
        site.drive(chats, requests // 4)
        lose(site, 0)
        return site.drive(chats, requests // 2)


def scenarios(requests: int) -> dict[str, Callable[[int, str], Tally]]:
    """All scenarios, by their names."""
    salts: list[str | None] = [None, "red", "blue"]
    adapters: list[str | None] = [None, *ADAPTERS]
    return {
        "25 ms apart": lambda seed, way: spaced(seed, way, requests, blocks=420),
        "back to back": lambda seed, way: back_to_back(seed, way, requests),
        "gpt-oss, 1,600 blocks": lambda seed, way: spaced(seed, way, requests, kind="gpt-oss", blocks=1600),
        "Gemma 3, 1,600 blocks": lambda seed, way: spaced(seed, way, requests, kind="gemma-3", blocks=1600),
        "salts": lambda seed, way: apart(seed, way, requests, salts, [None]),
        "adapters": lambda seed, way: apart(seed, way, requests, [None], adapters),
        "the index restarts, replays reach": lambda seed, way: router_restarts(seed, way, requests, 10_000),
        "the index restarts, replays out of reach": lambda seed, way: router_restarts(seed, way, requests, 20),
        "messages lost, no replay": lambda seed, way: lost(seed, way, requests),
    }


def one(name: str, way: str, seed: int, requests: int) -> None:
    """Plays one scenario in this process, which can have one kind of engine only, and prints its tally."""
    print(json.dumps(asdict(scenarios(requests)[name](seed, way))))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| scenario | " + " | ".join(NAMES[way] for way in WAYS) + " |", "|---" * (1 + len(WAYS)) + "|"]
    for name in dict.fromkeys(row["scenario"] for row in rows):
        cells = []
        for way in WAYS:
            tally = next(row["tally"] for row in rows if (row["scenario"], row["way"]) == (name, way))
            cells.append(f"{tally['missed']} of {tally['requests']}, {tally['blocks_missed']:,} of {tally['blocks']:,}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Plays all, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="60 requests instead of 400")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="the scenarios with this text in their names")
    parser.add_argument("--output", type=Path, default=HERE.parents[1] / "target/routers")
    parser.add_argument("--one", nargs=2, metavar=("SCENARIO", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    requests = 60 if arguments.quick else 400
    if arguments.one:
        name, way = arguments.one
        one(name, way, arguments.seed, requests)
        return 0
    rows = []
    for name in filter(lambda name: arguments.only in name, scenarios(requests)):
        for way in WAYS:
            command = [sys.executable, str(HERE), "--seed", str(arguments.seed), *(["--quick"] if arguments.quick else [])]
            began = time.monotonic()
            played = subprocess.run([*command, "--one", name, way], stdout=subprocess.PIPE, check=True)
            tally = json.loads(played.stdout)
            rows.append({"scenario": name, "way": way, "tally": tally, "seconds": round(time.monotonic() - began, 1)})
            print(f"{name}, {NAMES[way]}: {tally}", flush=True)
    version = subprocess.run([kvatlas(), "--version"], capture_output=True, text=True, check=True).stdout.strip()
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": {"cores": os.cpu_count(), "architecture": platform.machine(), "system": platform.platform(terse=True)},
        "versions": {"kvatlas": version, "vllm-router": "0.1.17", "vllm": "0.33.0", "python": platform.python_version()},
        "seed": arguments.seed,
        "requests": requests,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "routers.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    (arguments.output / "routers.md").write_text(table(rows))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
