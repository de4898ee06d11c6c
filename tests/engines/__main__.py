"""Runs kvatlas beside genuine engines, and compares every answer with their caches.

    python3 tests/engines [--seed N] [--seeds COUNT] [--short] [--only TEXT]
    python3 tests/engines --outages [--output FILE] [--seed N] [--only TEXT]

Wants KVATLAS_ENGINES (see fetch.py), KVATLAS_BIN and NATS_SERVER_BIN where they are not where a build and deploy/setup.sh leave them.
Prints a table, a line a scenario. Ends with 1 where an answer that was called exact was wrong, or a scenario failed otherwise.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

from outages import measure
from scenarios import SCENARIOS, Scenario
from servers import Missing
from world import World, summary

SHORT = ("quiet, vLLM", "quiet, SGLang", "daemon restarts", "engine restarts", "gpt-oss", "windows only")


def play(scenario: Scenario, seed: int, rounds: int, folder: Path) -> bool:
    """Plays a scenario, and prints its line. Returns whether all was well."""
    world, failure = None, ""
    try:
        world = World(scenario.layout, seed, folder)
        with world:
            scenario.play(world, random.Random(seed), rounds)
    except Missing as why:
        print(f"SKIPPED: {scenario.name}: {why}", file=sys.stderr)
        return True
    except Exception as error:
        traceback.print_exc()
        failure = f"FAILED: {type(error).__name__} {error}"
    if world:
        lost = Counter({"messages lost": sum(proxy.lost for proxy in world.proxies)})
        if failure:
            world.counts.notes.append(failure)
        print(summary(f"{scenario.name}, seed {seed}", world.counts, +lost), flush=True)
    return world is not None and not failure and world.counts.wrong_exact == 0


def main() -> int:
    """Plays the scenarios that are asked for."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--seeds", type=int, default=1, help="so many seeds, one after the other")
    arguments.add_argument("--short", action="store_true", help="six scenarios, once around")
    arguments.add_argument("--only", default="", help="scenarios with this text in their names")
    arguments.add_argument("--outages", action="store_true", help="measure for how long answers are not exact while parts restart")
    arguments.add_argument("--output", type=Path, help="where the figures of --outages go, as JSON")
    arguments.add_argument("--keep", help="a folder that keeps the logs")
    given = arguments.parse_args()
    if given.outages:
        return measure(given.seed, given.only, given.output)
    print("| scenario | answers | called exact | not right | wrong, called exact | promises | not kept | behind at most | exact within | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    failed = 0
    for seed in range(given.seed, given.seed + given.seeds):
        for number, scenario in enumerate(SCENARIOS):
            if given.only not in scenario.name or (given.short and scenario.name not in SHORT):
                continue
            rounds = 1 if given.short else scenario.rounds
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(given.keep or temporary) / f"{number}-{seed}"
                failed += not play(scenario, seed, rounds, folder)
    print(f"{failed} scenarios failed" if failed else "no answer that was called exact was wrong")
    return min(failed, 1)


sys.exit(main())
