"""Blocks beyond the device, as Dynamo's router counts them: of two workers that have a prompt on the device, the host, a disk and elsewhere."""

from __future__ import annotations

import json
import os
import subprocess

from dynamo_site import SIZE, Site
from lines import router_of

BLOCKS = 6
# By worker, how many leading blocks lie in which tier: 0 is the device, 3 what is beyond a disk.
HELD = {"77": {0: 2, 1: 4, 2: 6}, "78": {0: 1, 3: 5}}
# What the router makes of it: leading blocks on the device; with the host's; with all. It counts a disk and what is beyond it alike.
EXPECTED = {"77": [2, 4, 6], "78": [1, 1, 5]}


def publisher(own: Site, worker: str) -> subprocess.Popen[str]:
    """Publishes what it is given for a worker, which ends with the scenario."""
    where = ("--nats-url", f"nats://127.0.0.1:{own.nats}", "--namespace", "m", "--worker", worker, "--block-size", str(SIZE))
    process = subprocess.Popen([os.environ["KVATLAS_BIN"], "publish", "-", *where], stdin=subprocess.PIPE, text=True, env=own.environment)
    own.stack.callback(process.wait)
    own.stack.callback(process.kill)
    return process


def tell(process: subprocess.Popen[str], batch: dict[str, object]) -> None:
    """Has a batch published."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(batch) + "\n")
    process.stdin.flush()


def tiers(own: Site, seed: int) -> bool:
    """Returns whether the router counts what the workers have, in each tier."""
    router = router_of(own, seed)
    hashes = router.ask(tiers=BLOCKS)["hashes"]
    processes = {worker: publisher(own, worker) for worker in HELD}
    for worker, depths in HELD.items():
        for tier, depth in depths.items():
            tell(processes[worker], {"tier": tier, "events": [{"type": "stored", "sequence_hashes": hashes[:depth]}]})

    def is_counted() -> bool:
        for process in processes.values():
            # Who says nothing for 3 s is in doubt.
            tell(process, {"events": []})
        return bool(router.ask(tiers=BLOCKS)["workers"] == EXPECTED)

    try:
        own.wait_until("the router counts all tiers", is_counted)
    except TimeoutError as error:
        print(f"tiers: {router.ask(tiers=BLOCKS)['workers']} instead of {EXPECTED}: {error}", flush=True)
        return False
    print(f"tiers, as Dynamo's router counts them: {EXPECTED}", flush=True)
    return True
