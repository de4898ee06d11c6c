"""Random histories: the answers beside what the publisher really said, and the table beside the daemon's own index."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Sequence

import msgpack
import pytest
from processes import Broker, Daemon, running
from world import NAMESPACE, World, eventually, world

import kvatlas
from kvatlas import (
    Cleared,
    Cursor,
    Event,
    LineageHash,
    Publisher,
    Removed,
    Stored,
    StoredByLineage,
)
from kvatlas._publish.table import BlockTable

RUNS = int(os.environ.get("KVATLAS_TEST_FAULT_RUNS", "2"))


class Truth:
    """What a holder has had, batch by batch, seen where the batches leave the publisher."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompts = prompts
        self._held: set[int] = set()
        self._states: list[tuple[Cursor, list[int]]] = [(Cursor(0, 0), [0] * len(prompts))]
        self._emptied = Cursor(0, 0)

    def see(self, payload: bytes) -> None:
        """A batch, before it can be lost."""
        batch = msgpack.unpackb(payload)
        cursor = Cursor(batch["epoch"], batch["seq"])
        for event in batch["events"]:
            named = event.get("sequence_hashes", b"")
            hashes = {int.from_bytes(named[at : at + 8], "little") for at in range(0, len(named), 8)}
            if event["type"] == "stored":
                self._held |= hashes
            elif event["type"] == "removed":
                self._held -= hashes
            else:
                self._held.clear()
                self._emptied = cursor
        depths = [
            next((at for at, block in enumerate(prompt) if block not in self._held), len(prompt))
            for prompt in self.prompts
        ]
        self._states.append((cursor, depths))

    @property
    def last(self) -> list[int]:
        """How much of each prompt the holder has now."""
        return self._states[-1][1]

    def bounds_since(self, floor: Cursor, prompt: int) -> tuple[int, int]:
        """What an exact answer may say that was asked for when the daemon had applied `floor`.

        An event is applied block by block, so an answer may lie between two states.
        """
        first = max(index for index, (cursor, _) in enumerate(self._states) if cursor <= floor)
        depths = [depths[prompt] for _, depths in self._states[first:]]
        return 0 if self._emptied > floor else min(depths), max(depths)


class Router:
    """Asks all the time; no answer may be wrong and called exact."""

    def __init__(self, here: World, truth: Truth) -> None:
        self._here = here
        self._truth = truth
        self._floor = Cursor(0, 0)
        self.exact = 0
        self.degraded = 0

    async def ask(self) -> bool:
        """Asks about every prompt; says whether all answers are exact and the truth."""
        status = await self._here.holder()
        if status is not None:
            self._floor = max(self._floor, status.cursor)
        is_settled = True
        for number, prompt in enumerate(self._truth.prompts):
            reply = await self._here.ask(prompt, workers=["gpu-0"])
            least, most = self._truth.bounds_since(self._floor, number)
            [found] = reply.holders or [None]
            if found is None:
                is_settled &= self._truth.last[number] == 0
            elif found.exact:
                self.exact += 1
                is_true = least <= found.matched_blocks <= most
                assert is_true, f"answers were wrong: {found} is called exact; it had {least} to {most}"
                is_settled &= found.matched_blocks == self._truth.last[number]
            else:
                self.degraded += 1
                is_settled = False
        return is_settled and status is not None and status.exact


def change(pick: random.Random, prompts: Sequence[Sequence[int]]) -> Event:
    """A plausible next change."""
    prompt = pick.choice(prompts)
    depth = pick.randrange(1, len(prompt))
    kind = pick.random()
    if kind < 0.6:
        return Stored(prompt[:depth])
    if kind < 0.97:
        return Removed(prompt[depth:])
    return Cleared()


def prompts_of(pick: random.Random) -> list[list[int]]:
    """Prompts that share prefixes, as their sequence hashes."""
    base = [pick.randrange(1 << 32) for _ in range(16 * 24)]
    prompts = []
    for _ in range(8):
        shared = 16 * pick.randrange(4, 20)
        tokens = base[:shared] + [pick.randrange(1 << 32) for _ in range(16 * 24 - shared)]
        prompts.append(kvatlas.sequence_hashes(kvatlas.block_hashes(tokens)))
    return prompts


@pytest.mark.parametrize("seed", range(RUNS))
async def test_batches_dropped_duplicated_reordered_and_corrupted(
    broker: Broker, daemon: Daemon, seed: int
) -> None:
    pick = random.Random(seed)
    truth = Truth(prompts_of(pick))
    held_back: list[bytes] = []

    def fate(payload: bytes) -> list[bytes]:
        truth.see(payload)
        chance = pick.random()
        if chance < 0.06:
            return []
        if chance < 0.12:
            return [payload, payload]
        if chance < 0.18:
            held_back.append(payload)
            return []
        if chance < 0.24:
            damaged = bytearray(payload)
            damaged[pick.randrange(len(damaged))] ^= 1 << pick.randrange(8)
            return [bytes(damaged[: pick.randrange(len(damaged))])]
        late, held_back[:] = held_back[:], []
        return [payload, *late]

    async with world(broker.url) as here:
        await _settle_namespace(here)
        here.way.fate = fate
        # Small, so that the ring does not reach back for ever and answers have many chunks.
        publisher = await here.publisher(ring_batches_max=16, chunk_bytes_max=700)
        router = Router(here, truth)
        for number in range(600):
            await publisher.publish(change(pick, truth.prompts))
            if number % 10 == 0:
                await router.ask()
            else:
                await asyncio.sleep(0)
        await publisher.flush()

        def sound(payload: bytes) -> list[bytes]:
            truth.see(payload)
            return [payload]

        here.way.fate = sound
        await eventually("every answer is exact and the truth", router.ask)
        assert router.exact > 0
        assert publisher.counters.answers_missing + publisher.counters.answers_full > 0


async def _settle_namespace(here: World) -> None:
    """Lets the namespace exist, so that every query has an answer."""
    other = await here.publisher("other")
    await other.publish(Stored([1]))
    await here.matching([1], [("other", 0, 1, True)])


class History:
    """Changes of every form that the contract has, over few blocks and names, so that they meet."""

    def __init__(self, pick: random.Random) -> None:
        self._pick = pick
        # Many prefixes are shared: a block has one of two contents.
        self.chains = [
            kvatlas.sequence_hashes([pick.choice([1, 1, 1, 2]) for _ in range(12)]) for _ in range(6)
        ]
        # Some blocks have several names. No name means two blocks: that would leave the holder rejected.
        blocks = sorted({block for chain in self.chains for block in chain})
        self._names_of_engine = {block: range(100 + 3 * at, 103 + 3 * at) for at, block in enumerate(blocks)}
        self._pool = [name for names in self._names_of_engine.values() for name in names] + blocks

    def _names(self, blocks: Sequence[int]) -> list[int] | None:
        if self._pick.random() >= 0.4:
            return None
        return [self._pick.choice(self._names_of_engine[block]) for block in blocks]

    def _some(self) -> tuple[list[int], list[LineageHash]]:
        """Some blocks of a chain, and their lineage hashes."""
        chain = self._pick.choice(self.chains)
        pairs = list(zip(chain, kvatlas.lineage_hashes(chain), strict=True))
        picked = self._pick.sample(pairs, self._pick.randrange(1, len(pairs)))
        return [block for block, _ in picked], [lineage for _, lineage in picked]

    def change(self) -> Event:
        pick = self._pick
        chain = pick.choice(self.chains)
        first = pick.randrange(len(chain))
        last = pick.randrange(first, len(chain)) + 1
        kind = pick.random()
        if kind < 0.15:
            blocks, lineage = self._some()
            if pick.random() < 0.5:
                return StoredByLineage(lineage)
            return StoredByLineage(lineage, self._names(blocks))
        if kind < 0.25:
            return Removed(pick.sample(chain, pick.randrange(1, 4)), self._some()[1][:2])
        if kind < 0.5:
            return Removed(pick.choices(self._pool, k=pick.randrange(1, 6)))
        if kind < 0.505:
            return Cleared()
        part = chain[first:last]
        parent = chain[first - 1] if first else None
        # Without a position, the event waits until the parent comes.
        position = first if first and pick.random() < 0.8 else None
        return Stored(part, parent=parent, position=position, engine_hashes=self._names(part))


class ClashingHistory(History):
    """Changes of an engine whose hashes are no chain: a hash follows several parents, and a name means several blocks."""

    def __init__(self, pick: random.Random) -> None:
        super().__init__(pick)
        self.chains = [[pick.randrange(1, 9) for _ in range(4)] for _ in range(6)]
        blocks = sorted({block for chain in self.chains for block in chain})
        self._names_of_engine = {block: range(100 + 2 * block, 104 + 2 * block) for block in blocks}
        self._pool = [*range(102, 122), *blocks]


async def depths(here: World, history: History) -> list[int]:
    lineages = (list(kvatlas.lineage_hashes(chain)) for chain in history.chains)
    prefixes = [lineage[:start] for lineage in lineages for start in range(1, len(lineage) + 1)]
    replies = await here.queries.query_batch(NAMESPACE, [kvatlas.Query.by_lineage_hashes(prefix) for prefix in prefixes])
    return [sum(holder.matched_blocks for holder in reply.holders if holder.worker == "gpu-0") for reply in replies]


async def _placed(here: World, cursor: kvatlas.Cursor) -> kvatlas.HolderStatus:
    """Waits until the daemon is there, and its state is certain."""

    async def look() -> kvatlas.HolderStatus | None:
        status = await here.holder()
        return status if status is not None and status.cursor >= cursor and status.exact else None

    return await eventually(f"the daemon is exact at {cursor}", look)


@contextlib.asynccontextmanager
async def beside_a_shadow(broker: Broker) -> AsyncIterator[tuple[Daemon, World, World, Publisher]]:
    """A daemon, and another one that hears the same events under another prefix. The publisher gives them full states only."""
    with running(broker.url, subjects_prefix="shadow"), running(broker.url) as daemon:
        async with world(broker.url) as here:
            shadow = World(here.nats, "shadow")
            await eventually("the other daemon answers", shadow.answers)
            here.way.mirror = "shadow"
            yield daemon, here, shadow, await here.publisher(ring_batches_max=0)


@pytest.mark.parametrize("seed", range(3 * RUNS))
async def test_the_table_decides_as_the_index_does(broker: Broker, seed: int) -> None:
    """One daemon hears every event. Another is given the full state, again and again. They never differ."""
    pick = random.Random(1000 + seed)
    history = History(pick)
    async with beside_a_shadow(broker) as (daemon, here, shadow, publisher):
        for _ in range(6):
            for _ in range(pick.randrange(2, 40)):
                await publisher.publish(history.change(), tier=pick.choice([0, 0, 0, 1, 2]))
            cursor = await publisher.flush()
            # What waits for a parent is no part of a full state: the parents come, or all is cleared.
            for remedy in (map(Stored, history.chains), [Cleared(), *map(Stored, history.chains[:3])]):
                if (await _placed(shadow, cursor)).parked_events:
                    await publisher.publish(remedy)
                    cursor = await publisher.flush()
            answers = publisher.counters.answers_full
            # What was given before had names and tiers that queries don't show, and removals do.
            await _placed(here, cursor)
            assert await depths(here, history) == await depths(shadow, history)
            daemon.kill()
            daemon.start()
            restored, heard = await _placed(here, cursor), await _placed(shadow, cursor)
            assert publisher.counters.answers_full > answers
            assert await depths(here, history) == await depths(shadow, history)
            assert restored.blocks == heard.blocks == len(_table(publisher))


@pytest.mark.parametrize("seed", range(3 * RUNS))
async def test_what_the_table_cannot_tell_apart_is_in_doubt(broker: Broker, seed: int) -> None:
    """As above, where the index itself cannot be certain of all, and tells blocks apart that the table does not."""
    pick = random.Random(2000 + seed)
    history, certain = ClashingHistory(pick), 0
    async with beside_a_shadow(broker) as (daemon, here, shadow, publisher):
        for _ in range(8):
            await publisher.publish(Cleared())
            for _ in range(pick.randrange(1, 7)):
                await publisher.publish(history.change(), tier=pick.choice([0, 0, 1]))
            heard = await shadow.applied(await publisher.flush())
            if heard.parked_events:
                continue
            daemon.kill()
            daemon.start()
            restored = await here.applied(heard.cursor)
            table = _table(publisher)
            assert table.is_short == ("upstream_gap" in restored.degraded)
            if table.is_short:
                continue
            assert (heard.exact, restored.exact) == (True, True)
            assert await depths(here, history) == await depths(shadow, history)
            assert restored.blocks == heard.blocks == len(table)
            certain += 1
    assert certain > 0


def _table(publisher: Publisher) -> BlockTable:
    table = publisher._outbox.table
    assert table is not None
    return table
