"""What a way keeps of many blocks: engines tell of a million that nobody shares, take them back, and tell of another million.

The events are made by hand and published by vLLM's own publisher, at a rate that all ways can follow. A sample of the prompts is asked for, so that it
is known whether the blocks were taken at all.
"""

from __future__ import annotations

import importlib
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import Process
from vllm_fleet import ENGINES, SIZE, Caches, Site, sites
from ways import Way

BATCH, CHAIN = 64, 256
BLOCKS_PER_SECOND = 30_000
SAMPLES = 20
# Until nobody computes any more.
PATIENCE = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Chain:
    """Consecutive blocks of an engine."""

    place: int
    names: list[int]
    tokens: list[int]


def tree(number: int) -> list[int]:
    """A process and all that it has started."""
    try:
        children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
    except OSError:
        return []
    return [number, *(one for child in children for one in tree(int(child)))]


def numbers(processes: list[Process]) -> list[int]:
    """The numbers of processes and of what they have started."""
    return [number for process in processes for number in tree(process.number)]


def resident_mib(way: Way) -> float:
    """The memory that all of a way's processes have."""
    total = 0
    for number in numbers(way.processes()):
        [line] = [line for line in Path(f"/proc/{number}/status").read_text().splitlines() if line.startswith("VmRSS")]
        total += int(line.split()[1])
    return total / 1024


def ticks(of: list[int]) -> int:
    """What these processes have computed so far, in ticks of the clock."""
    total = 0
    for number in of:
        fields = Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total


def cpu_seconds(way: Way) -> float:
    """What a way's processes have computed so far, and this one, where SMG's relays are."""
    return ticks([os.getpid(), *numbers(way.processes())]) / TICKS


def settle(way: Way) -> None:
    """Waits until a way's processes are idle."""
    deadline, quiet, last = time.monotonic() + PATIENCE, 0, cpu_seconds(way)
    while quiet < 3 and time.monotonic() < deadline:
        time.sleep(0.5)
        now = cpu_seconds(way)
        quiet = quiet + 1 if now - last < 0.1 else 0
        last = now


class Teller:
    """Has engines tell of blocks that are not in their caches."""

    def __init__(self, site: Site, seed: int) -> None:
        self._engines = [worker.engine for worker in site.fleet.workers]
        self._events: Any = importlib.import_module("vllm.distributed.kv_events")
        self._random = random.Random(seed)
        self._began, self._told = 0.0, 0

    def store(self, blocks: int) -> list[Chain]:
        """Tells of so many blocks that nobody else has."""
        self._began, self._told = time.monotonic(), 0
        return [self._chain(number % ENGINES) for number in range(blocks // CHAIN)]

    def remove(self, chains: list[Chain]) -> None:
        """Takes blocks back, tail first, as vLLM evicts them."""
        self._began, self._told = time.monotonic(), 0
        for chain in chains:
            for first in reversed(range(0, CHAIN, BATCH)):
                names = chain.names[first : first + BATCH][::-1]
                self._tell(chain.place, self._events.BlockRemoved(block_hashes=names, medium="GPU", group_idx=0))

    def _chain(self, place: int) -> Chain:
        names = [self._random.getrandbits(64) for _ in range(CHAIN)]
        tokens = [self._random.randrange(128_000) for _ in range(CHAIN * SIZE)]
        for first in range(0, CHAIN, BATCH):
            event = self._events.BlockStored(
                block_hashes=names[first : first + BATCH], parent_block_hash=names[first - 1] if first else None,
                token_ids=tokens[first * SIZE : (first + BATCH) * SIZE], block_size=SIZE, lora_id=None, medium="GPU", lora_name=None,
                group_idx=0, kv_cache_spec_kind="full_attention",
            )  # fmt: skip
            self._tell(place, event)
        return Chain(place, names, tokens)

    def _tell(self, place: int, event: Any) -> None:
        self._engines[place].publish([event])
        self._told += BATCH
        late = self._began + self._told / BLOCKS_PER_SECOND - time.monotonic()
        if late > 0:
            time.sleep(late)


def found(site: Site, chains: list[Chain]) -> int:
    """Of a sample of chains, how many prompts go to the engine that has them."""
    sample = chains[:: max(len(chains) // SAMPLES, 1)][:SAMPLES]
    return sum(site.ask((chain.tokens, None, None))["place"] == chain.place for chain in sample)


def measure(seed: int, way: type[Way], blocks: int) -> dict[str, Any]:
    """MiB with nothing, with the blocks, without them, with others, and without these; and how many of the samples were found."""
    with sites(seed, way, Caches()) as site:
        teller, measured, published, samples = Teller(site, seed), [], [], []

        def note() -> None:
            settle(site.way)
            measured.append(resident_mib(site.way))
            published.append(site.way.broker_bytes())

        note()
        for _ in range(2):
            chains = teller.store(blocks)
            note()
            samples.append(found(site, chains))
            teller.remove(chains)
            note()
    mib = [round(value, 1) for value in measured]
    return {
        "blocks": blocks,
        "mib": dict(zip(("empty", "first", "removed", "second", "removed_again"), mib, strict=True)),
        "bytes_a_block": round((measured[1] - measured[0]) * (1 << 20) / blocks),
        "samples_found": samples,
        "published_bytes": published,
    }
