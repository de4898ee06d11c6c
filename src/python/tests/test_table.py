"""The block table, without a daemon: hashes that stand for several blocks, and names that move."""

from __future__ import annotations

from collections.abc import Sequence

from kvatlas import Event, Removed, Resumable, Stored, StoredByLineage
from kvatlas._publish.table import BlockTable


def table_of(*events: Event) -> BlockTable:
    table = BlockTable(16, "engine")
    for event in events:
        table.apply(event, 0, 0.0)
    return table


def told(table: BlockTable) -> dict[int, Sequence[int] | None]:
    """The runs of resumable blocks by the engine's name for the first of them."""
    found: dict[int, Sequence[int] | None] = {}
    for _, event in table.state(0.0) or ():
        assert isinstance(event, Stored | StoredByLineage)
        assert event.engine_hashes is not None
        found[event.engine_hashes[0]] = event.resumable
    return found


# The hash 9 stands at positions 1 and 2.
TWICE = (
    Stored([1], engine_hashes=[11]),
    Stored([2, 3], engine_hashes=[12, 15]),
    Stored([9], parent=11, engine_hashes=[13]),
    Stored([9], parent=15, engine_hashes=[14]),
)


def test_a_removal_by_a_hash_takes_all_blocks_that_have_it() -> None:
    table = table_of(*TWICE, Removed([9]))
    assert (len(table), table.is_short) == (3, False)
    assert len(table_of(*TWICE, Removed([14]))) == 4, "by its name, one goes"


def test_a_hash_marks_all_blocks_that_have_it() -> None:
    table = table_of(*TWICE, Resumable([9], resumable=False))
    assert told(table) == {11: (0, 1), 12: (0, 2)}, "of two and of three blocks, the last"


def test_a_name_that_moves_leaves_a_doubt() -> None:
    table = table_of(Stored([111], engine_hashes=[7001]), Stored([333], engine_hashes=[7001]))
    assert (len(table), table.is_short) == (1, True)


def test_a_hash_after_two_parents_at_one_position_leaves_a_doubt() -> None:
    roots = Stored([1], engine_hashes=[11]), Stored([2], engine_hashes=[12])
    children = Stored([9], parent=11, engine_hashes=[13]), Stored([9], parent=12, engine_hashes=[14])
    assert table_of(*roots, *children).is_short


def test_a_parent_that_comes_late_under_a_name_leaves_a_doubt() -> None:
    child = Stored([222], parent=7001, position=1, engine_hashes=[7002])
    assert table_of(child, Stored([111], engine_hashes=[7001])).is_short
    assert not table_of(child, Stored([7001])).is_short, "it is the parent"


def test_a_removal_of_a_block_that_waits_takes_no_other() -> None:
    waiting = Stored([9], parent=50, engine_hashes=[1])
    table = table_of(Stored([1], engine_hashes=[11]), waiting, Removed([1, 1]))
    assert len(table) == 1
