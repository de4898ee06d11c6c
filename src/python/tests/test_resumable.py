"""Which blocks are resumable, as publishers keep it for daemons that ask for the full state."""

from __future__ import annotations

import random

import pytest

import kvatlas
from kvatlas import Removed, Resumable, Stored, resumable_runs
from kvatlas._publish.table import BlockTable

CHAIN = [100 + block for block in range(10)]

Model = dict[int, tuple[int, int]]
"""The tiers of each block, and the classes of tiers in which it is not resumable."""


def classes(tiers: int) -> int:
    return tiers & 3 | (4 if tiers > 3 else 0)


def marked(barred: int, bit: int, resumable: bool) -> int:
    return barred & ~classes(bit) | (0 if resumable else classes(bit))


def store(model: Model, block: int, bit: int, resumable: bool) -> None:
    tiers, barred = model.get(block, (0, 0))
    model[block] = tiers | bit, marked(barred, bit, resumable)


def step(pick: random.Random, table: BlockTable, model: Model) -> None:
    tier = pick.randrange(4)
    bit, some = 1 << tier, pick.sample(CHAIN, 3)
    match pick.randrange(3):
        case 0:
            flags = [pick.random() < 0.6 for _ in range(pick.randrange(1, 11))]
            table.apply(Stored(CHAIN[: len(flags)], resumable=resumable_runs(flags)), tier, 0.0)
            for block, resumable in zip(CHAIN, flags, strict=False):
                store(model, block, bit, resumable)
        case 1:
            table.apply(Removed(some), tier, 0.0)
            for block in some:
                tiers, barred = model.pop(block, (0, 0))
                if tiers & ~bit:
                    model[block] = tiers & ~bit, barred & classes(tiers & ~bit)
        case _:
            resumable = pick.random() < 0.5
            table.apply(Resumable(some, resumable=resumable), tier, 0.0)
            for block in some:
                if model.get(block, (0, 0))[0] & bit:
                    store(model, block, bit, resumable)


@pytest.mark.parametrize("seed", range(100))
def test_a_full_state_says_which_blocks_are_resumable(seed: int) -> None:
    pick, table = random.Random(seed), BlockTable(16, "engine")
    model: Model = {}
    for _ in range(60):
        step(pick, table, model)
    state, told = table.state(0.0), Model()
    assert state is not None and not table.is_short
    for tier, event in state:
        assert isinstance(event, Stored)
        for block, resumable in zip(event.sequence_hashes, event.flags(), strict=True):
            store(told, block, 1 << tier, resumable)
    assert told == model


def test_run_lengths_are_those_of_flags() -> None:
    assert resumable_runs([False, False, True]) == (2, 1)
    assert resumable_runs([True, False]) == (0, 1)
    assert resumable_runs([False]) == ()
    assert resumable_runs([True, True]) is resumable_runs([]) is None
    for runs in [(1, 0), (-1,), (2, 2)]:
        with pytest.raises(kvatlas.InvalidValueError):
            Stored([1, 2, 3], resumable=runs)
