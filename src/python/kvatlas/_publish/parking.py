"""Stored events whose parent has not come yet. The bounds are those of a daemon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from ..events import Stored

EVENTS_MAX: Final = 64
BLOCKS_MAX: Final = 65_536
WAIT_MAX: Final = 30.0
STATE_WAIT_MAX: Final = 1.0
"""Seconds for which a full state waits, at most, for the parent of an event."""
UNPLACED_MAX: Final = 65_536
"""Most removals that are kept in mind while events wait."""

Unplaced = int | tuple[int, int | None]
"""A removed block that is not held by that name: by its sequence hash, or by its place and that of its parent."""


@dataclass(slots=True)
class Parked:
    """An event that waits, and those of its names that have been removed while it does."""

    stored: Stored
    parent: int
    tier: int
    deadline: float
    names: frozenset[int]
    stamp: int = 0
    removed: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, stored: Stored, tier: int, now: float) -> Parked:
        """Lets an event wait from ``now`` on."""
        names = stored.engine_hashes if stored.engine_hashes is not None else stored.sequence_hashes
        if stored.engine_hashes is not None:
            # Named by the engine, the blocks need no content.
            stored = replace(stored, block_hashes=None, tokens=None, lora_name=None, cache_salt=None)
        parent = stored.parent if stored.parent is not None else 0
        return cls(stored, parent, tier, now + WAIT_MAX, frozenset(names))

    @property
    def blocks(self) -> int:
        """How many blocks wait."""
        return len(self.stored.sequence_hashes)


class Parking:
    """The events of one holder that wait for their parents, oldest first."""

    def __init__(self) -> None:
        self._events: list[Parked] = []
        self._blocks = 0
        # Counts the events that had to wait.
        self._stamp = 0
        # What was removed while some event waited, by its tier, and how many events had had to wait when it last was.
        self._unplaced: dict[tuple[int, Unplaced], int] = {}
        self.has_dropped = False
        """Whether an event was dropped before its parent came. Until :meth:`clear`."""

    def __len__(self) -> int:
        return len(self._events)

    def clear(self) -> None:
        """Forgets what waits."""
        self._events.clear()
        self._unplaced.clear()
        self._blocks = self._stamp = 0
        self.has_dropped = False

    def park(self, parked: Parked) -> None:
        """Lets an event wait; the oldest make room."""
        if parked.blocks > BLOCKS_MAX:
            self.has_dropped = True
            return
        if not self._events:
            self._unplaced.clear()
        self._stamp += 1
        parked.stamp = self._stamp
        while self._events and (len(self._events) >= EVENTS_MAX or self._blocks + parked.blocks > BLOCKS_MAX):
            self._drop_oldest()
        self._blocks += parked.blocks
        self._events.append(parked)

    def take_ready(self, is_known: Callable[[int], bool]) -> Parked | None:
        """The oldest event whose parent is known now."""
        for index, parked in enumerate(self._events):
            if is_known(parked.parent):
                return self._take(index)
        return None

    def expire(self, now: float) -> None:
        """Drops what has waited too long."""
        while self._events and self._events[0].deadline <= now:
            self._drop_oldest()

    def has_waited(self, now: float) -> bool:
        """Whether the oldest event has waited for so long that a full state is given without it."""
        return bool(self._events) and self._events[0].deadline - WAIT_MAX + STATE_WAIT_MAX <= now

    def note_removed(self, name: int, tier: int) -> bool:
        """A block that is removed while it waits must not come back. Says whether an event that waits has one of that name."""
        is_noted = False
        for parked in self._events:
            if parked.tier == tier and name in parked.names and name not in parked.removed:
                parked.removed.add(name)
                is_noted = True
        return is_noted

    def note_unplaced(self, removed: Unplaced, tier: int) -> None:
        """A block that is not held was removed: it must not come with an event that waits, where that turns out to have it."""
        if not self._events:
            return
        self._unplaced[tier, removed] = self._stamp
        if len(self._unplaced) <= UNPLACED_MAX:
            return
        oldest = self._events[0].stamp
        self._unplaced = {key: stamp for key, stamp in self._unplaced.items() if stamp >= oldest}
        if len(self._unplaced) > UNPLACED_MAX // 2:
            self.has_dropped = True
            self._events.clear()
            self._unplaced.clear()
            self._blocks = 0

    def is_gone(self, parked: Parked, sequence: int, key: tuple[int, int | None]) -> bool:
        """Whether a block of an event that has waited was removed meanwhile, by its sequence hash or by its place."""
        stamps = (self._unplaced.get((parked.tier, removed), 0) for removed in (sequence, key))
        return any(stamp >= parked.stamp for stamp in stamps)

    def _drop_oldest(self) -> None:
        self.has_dropped = True
        self._take(0)

    def _take(self, index: int) -> Parked:
        parked = self._events.pop(index)
        self._blocks -= parked.blocks
        return parked
