"""Runs kvatlas beside Dynamo's router, which asks it, and compares the answers with what the workers hold.

    python3 tests/routers [--seed N] [--short] [--restarts]

Wants a Python with ai-dynamo (DYNAMO_PYTHON), KVATLAS_BIN and NATS_SERVER_BIN; with an etcd (ETCD_BIN), that keeps the records in one play.
Prints a line a scenario. Ends with 1 where an answer was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from dynamo_restarts import restarts
from dynamo_site import SIZE, WORDS, Site, answers, free_port, site
from dynamo_tiers import tiers
from lines import Lines, router_of


def compare(driver: Lines, prompts: int, questions: int) -> dict[str, float]:
    """Serves and asks by turns. Returns what came of it in all."""
    totals: dict[str, float] = {}
    rounds = max(1, questions // 500)
    for _ in range(rounds):
        driver.ask(serve=prompts // rounds)
        for name, value in driver.ask(compare=questions // rounds).items():
            totals[name] = totals.get(name, 0) + value
    return totals


def play(name: str, own: Site, given: argparse.Namespace) -> bool:
    """Plays a scenario, and prints its line. Returns whether every answer was right."""
    prompts, questions = (40, 200) if given.short else (400, 5000)
    driver = router_of(own, given.seed)
    found = compare(driver, prompts, questions)
    microseconds = round(found.pop("seconds") / questions * 1e6)
    print(f"| {name} | " + " | ".join(str(value) for value in [*found.values(), microseconds]) + " |", flush=True)
    return found["wrong"] == 0


def front_end(own: Site, given: argparse.Namespace) -> bool:
    """Sends requests to Dynamo's whole front end. Returns whether each went to a worker that had most of it."""
    python, url = os.environ["DYNAMO_PYTHON"], f"http://127.0.0.1:{(port := free_port())}"
    backend = own.environment["DYN_DISCOVERY_BACKEND"]
    planes = ("--discovery-backend", backend, "--request-plane", own.plane, "--event-plane", "zmq")
    routing = ("--router-mode", "kv", "--use-remote-indexer")
    own.start("frontend", python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *planes, *routing)
    own.wait_until("the front end has the model", lambda: answers(f"{url}/v1/models", '"m"'))
    script = str(Path(__file__).parent / "dynamo_frontend.py")
    numbers = (SIZE, WORDS, 3 if given.short else 20, given.seed)
    command = [python, script, url, *(str(number) for number in numbers)]
    done = subprocess.run(command, env=own.environment, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"\npython -m dynamo.frontend over HTTP: {', '.join(f'{value} {name}' for name, value in found.items())}", flush=True)
    return bool(found["elsewhere"] == 0 and found["with a known prefix"] > 0)


def main() -> int:
    """Plays all scenarios."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--short", action="store_true", help="200 questions, and no restarts")
    arguments.add_argument("--restarts", action="store_true", help="restarts in the short form, too")
    given = arguments.parse_args()
    places = [("nats", 4096, "file", "over NATS, roomy caches"), ("tcp", 200, "file", "over TCP, caches that evict")]
    if os.environ.get("ETCD_BIN"):
        places.append(("tcp", 200, "etcd", "over TCP, records in etcd"))
    print("| router | answers | wrong | wrong, by its own index | µs a question |")
    print("|---|---|---|---|---|")
    outcomes = []
    for plane, blocks, backend, name in places:
        with site(plane, blocks, backend=backend) as own:
            outcomes.append(play(f"Dynamo {name}", own, given))
    with site("nats", 4096) as own:
        outcomes += [front_end(own, given), tiers(own, given.seed)]
    if given.restarts or not given.short:
        outcomes.append(restarts(given.seed, given.short))
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
