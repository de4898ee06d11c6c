"""All that a holder has, by the rules of the daemon's index, for daemons that need the full state.

A block has one *place*: its position, and the bits of its sequence hash that lineage hashes keep. It is held in tiers, under the
names that the engine gives it. A name means one block. The table takes the same events as the daemon and decides alike, so the
state that a daemon is given is the one that it would have if it had received every batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ..events import (
    Cleared,
    Doubted,
    Event,
    Goodbye,
    Removed,
    Resumable,
    Stored,
    StoredByLineage,
    Tier,
    resumable_runs,
)
from ..hashing import (
    POSITION_MAX,
    LineageHash,
    block_hashes,
    fragment_mask,
    sequence_hashes,
)
from .options import Hashing
from .parking import Parked, Parking

EVENT_BLOCKS_MAX: Final = 4096
"""Most blocks in an event of a full state."""

_AWAITED_SPARE: Final = 1024
"""Most parents that were not there of which note is kept, beside two a block."""

_BLOCK_BYTES: Final = 32
"""Most bytes that a block takes in such an event: a lineage hash, a name, and a run."""

NAMES_PER_BLOCK_MAX: Final = 16
"""Most names of one block; keeps the names of a holder in proportion to its blocks."""

Place = int
"""A position above 64 bits of fragment."""


def _classes(tiers: int) -> int:
    """The device, the host, and all other tiers, one bit each."""
    return tiers & 3 | (4 if tiers > 3 else 0)


def _place(position: int, hash_or_fragment: int) -> Place:
    return position << 64 | hash_or_fragment & fragment_mask(position)


class _Block:
    """One resident block.

    ``tiers`` are those of all names together, one bit each. ``aliases`` has the tiers of each name, where there are several.
    """

    __slots__ = ("aliases", "barred", "name", "parent", "place", "sequence", "tiers")

    def __init__(
        self, place: Place, parent: Place | None, sequence: int | None, name: int | None, tiers: int
    ) -> None:
        self.place = place
        self.parent = parent
        self.sequence = sequence
        self.name = name
        self.tiers = tiers
        self.aliases: dict[int, int] | None = None
        # The classes of tiers in which it is not resumable, one bit each.
        self.barred = 0

    @property
    def position(self) -> int:
        return self.place >> 64

    @property
    def key(self) -> tuple[Place, Place | None]:
        """What its lineage hash says."""
        return self.place, self.parent

    def is_hash(self, sequence: int) -> bool:
        """Whether this is its sequence hash, as far as that is known."""
        if self.sequence is not None:
            return self.sequence == sequence
        return (self.place ^ sequence) & fragment_mask(self.position) == 0

    def first_tiers(self) -> int:
        """The tiers under the first name."""
        if self.aliases is not None and self.name is not None:
            return self.aliases[self.name]
        return self.tiers

    def mark(self, bit: int, resumable: bool) -> None:
        """Notes whether it is resumable in a tier."""
        self.barred &= ~_classes(bit)
        if not resumable:
            self.barred |= _classes(bit)

    def lineage(self) -> LineageHash:
        parent = None if self.parent is None else self.parent & _FRAGMENT
        return LineageHash.of(self.place & _FRAGMENT, parent, self.position)


_FRAGMENT: Final = (1 << 64) - 1
_COMMON: Final = fragment_mask(POSITION_MAX)
"""The bits of a sequence hash that every block keeps, whatever its position."""


@dataclass(slots=True)
class _Start:
    """Where a sequence begins, and the sequence hash before it, if that is known as a whole."""

    position: int
    parent: int | None
    parent_is_known: bool


class BlockTable:
    """The blocks of one holder."""

    def __init__(self, block_size: int, hashing: Hashing) -> None:
        self._block_size = block_size
        self._recomputes = hashing == "recompute"
        self._blocks: dict[Place, _Block] = {}
        self._names: dict[int, _Block] = {}
        # By the bits of the sequence hash that every block keeps.
        self._hashes: dict[int, list[_Block]] = {}
        # Places that events have given for parents that were not there.
        self._awaited: set[Place] = set()
        self._parking = Parking()
        self._is_short = False
        self._has_given_less = False

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Forgets everything."""
        self._blocks.clear()
        self._names.clear()
        self._hashes.clear()
        self._awaited.clear()
        self._parking.clear()
        self._is_short = False
        self._has_given_less = False

    @property
    def is_short(self) -> bool:
        """Whether blocks are left out that the holder may still have.

        They wait for their parent. Or, until everything is cleared: there was no place or no room for them, or another block has taken
        their name or their place.
        """
        return self._is_short or self._parking.has_dropped or len(self._parking) > 0

    @property
    def has_given_less(self) -> bool:
        """Whether a state was given that left out blocks that the holder may still have. Until everything is cleared."""
        return self._has_given_less or self._is_short or self._parking.has_dropped

    def apply(self, event: Event, tier: int, now: float) -> None:
        """Takes a change up. ``now`` is a clock in seconds that does not run backwards."""
        match event:
            case Stored():
                self._store(event, tier, now, None)
                self._store_ready(now)
            case StoredByLineage():
                self._store_by_lineage(event, tier)
                self._store_ready(now)
            case Removed():
                self._remove(event, tier)
            case Resumable():
                self._mark(event, tier)
            case Cleared() | Goodbye():
                self.clear()
            case Doubted():
                pass

    # Storing.

    def _store(self, stored: Stored, tier: int, now: float, parked: Parked | None) -> None:
        if not stored.sequence_hashes:
            return
        start = self._start(stored)
        if start is None:
            assert stored.parent is not None
            self._parking.park(Parked.of(stored, tier, now))
            return
        hashes: Sequence[int] = stored.sequence_hashes
        names = stored.engine_hashes if stored.engine_hashes is not None else hashes
        if self._recomputes and stored.engine_hashes is None:
            recomputed = self._recompute(stored, start)
            if recomputed is None:
                self._is_short = True
                return
            hashes = recomputed
        if start.position + len(hashes) - 1 > POSITION_MAX:
            self._is_short = True
            return
        position, bit = start.position, 1 << tier
        parent = None if position == 0 else _place(position - 1, start.parent or 0)
        if parent is not None and parent not in self._blocks:
            self._await(parent)
        for sequence, name, resumable in zip(hashes, names, stored.flags(), strict=True):
            place = _place(position, sequence)
            if parked is None or not self._is_removed(parked, place, parent, sequence, name):
                self._store_block(place, parent, sequence, name, bit, resumable)
            parent, position = place, position + 1

    def _is_removed(self, parked: Parked, place: Place, parent: Place | None, sequence: int, name: int) -> bool:
        """Whether a block of an event that has waited was removed meanwhile."""
        return name in parked.removed or self._parking.is_gone(parked, sequence, (place, parent))

    def _start(self, stored: Stored) -> _Start | None:
        """None where the parent has to come first."""
        if stored.parent is None:
            return _Start(0, None, True)
        resident = self._parent(stored.parent, stored.position)
        if resident is not None:
            block, sequence = resident
            # The fragment is all that a lineage hash needs of its parent, so it can stand in for the whole.
            known = sequence is not None
            return _Start(block.position + 1, sequence if known else block.place & _FRAGMENT, known)
        if stored.position is None:
            return None
        return _Start(stored.position, stored.parent, False)

    def _parent(self, name: int, position: int | None) -> tuple[_Block, int | None] | None:
        """The block that an event means as a parent, and its sequence hash: by the engine's name for it, or else by its sequence hash.

        ``position`` is that of the child, where the event has one.
        """
        named = self._names.get(name)
        if named is not None and position in (None, named.position + 1):
            return named, named.sequence
        there = (block for block in self._find_hash(name) if position in (None, block.position + 1))
        hashed = min(there, key=lambda block: block.position, default=None)
        # Of a block that was stored by its lineage hash, the event says the rest.
        return None if hashed is None else (hashed, name if hashed.sequence is None else hashed.sequence)

    def _find_hash(self, sequence: int) -> list[_Block]:
        """All blocks with this sequence hash: several where hashes are no chain."""
        return [block for block in self._hashes.get(sequence & _COMMON, ()) if block.is_hash(sequence)]

    def _await(self, parent: Place) -> None:
        """Keeps in mind that an event has given a parent that is not there."""
        self._awaited.add(parent)
        if len(self._awaited) > _AWAITED_SPARE + 2 * len(self._blocks):
            parents = {block.parent for block in self._blocks.values() if block.parent is not None}
            self._awaited &= parents
            self._awaited.add(parent)

    def _is_awaited(self, place: Place, name: int) -> bool:
        """Whether blocks without their parent were given this name for its sequence hash, and so may belong to this block."""
        awaited = _place(place >> 64, name)
        if awaited == place or awaited not in self._awaited:
            return False
        if awaited not in self._blocks and any(block.parent == awaited for block in self._blocks.values()):
            return True
        self._awaited.discard(awaited)
        return False

    def _recompute(self, stored: Stored, start: _Start) -> list[int] | None:
        """The contract's chain over the content; none where it cannot be computed."""
        if start.parent is not None and not start.parent_is_known:
            return None
        blocks = stored.block_hashes
        if stored.tokens is not None:
            if len(stored.tokens) != len(stored.sequence_hashes) * self._block_size:
                return None
            names = {"lora_name": stored.lora_name, "cache_salt": stored.cache_salt}
            blocks = block_hashes(stored.tokens, self._block_size, **names)
        return None if blocks is None else sequence_hashes(blocks, start.parent)

    def _store_by_lineage(self, stored: StoredByLineage, tier: int) -> None:
        names: Sequence[int | None] = stored.engine_hashes or [None] * len(stored.lineage_hashes)
        for lineage, name, resumable in zip(stored.lineage_hashes, names, stored.flags(), strict=True):
            place, parent = _key(lineage)
            self._store_block(place, parent, None, name, 1 << tier, resumable)

    def _store_block(
        self,
        place: Place,
        parent: Place | None,
        sequence: int | None,
        name: int | None,
        bit: int,
        resumable: bool,
    ) -> None:
        if name is not None:
            self._take_name(name, place, parent)
        known = self._blocks.get(place)
        is_other = known is not None and sequence is not None and known.sequence not in (None, sequence)
        if known is not None and (known.parent != parent or is_other):
            # The same hash after two parents: the holder may have both.
            self._is_short = True
            self._erase(known)
            known = None
        if known is None:
            block = self._blocks[place] = _Block(place, parent, sequence, name, bit)
            self._hashes.setdefault(place & _COMMON, []).append(block)
            if name is not None:
                self._names[name] = block
            block.mark(bit, resumable)
        elif self._extend(known, sequence, name, bit):
            known.mark(bit, resumable)

    def _take_name(self, name: int, place: Place, parent: Place | None) -> None:
        """Takes a name that a block is about to get from any other block."""
        if self._awaited and self._is_awaited(place, name):
            self._is_short = True
        other = self._names.get(name)
        if other is not None and (other.place != place or other.parent != parent):
            # Nobody can tell whether the engine still has the other one.
            self._is_short = True
            self._drop_name(other, name)

    def _extend(self, known: _Block, sequence: int | None, name: int | None, bit: int) -> bool:
        """Stores a block again; false where it has too many names."""
        if known.sequence is None:
            known.sequence = sequence
        first = known.name
        if first is None:
            # A first name takes over what was stored without one.
            known.name = name
            if name is not None:
                self._names[name] = known
        elif (name is not None and name != first) or known.aliases is not None:
            name = first if name is None else name
            aliases = known.aliases or {first: known.tiers}
            if name not in aliases and len(aliases) == NAMES_PER_BLOCK_MAX:
                self._is_short = True
                return False
            aliases[name] = aliases.get(name, 0) | bit
            known.aliases = aliases
            self._names[name] = known
        known.tiers |= bit
        return True

    def _store_ready(self, now: float) -> None:
        """Stores what waited for blocks that are there now, and then what waited for these."""
        while (parked := self._parking.take_ready(lambda name: self._parent(name, None) is not None)) is not None:
            # What was removed meanwhile stays away, even if an event that came later has stored it again.
            self._store(parked.stored, parked.tier, now, parked)

    def _mark(self, event: Resumable, tier: int) -> None:
        if len(self._parking):
            # It may mean blocks of an event that waits, of which nobody keeps that.
            self._is_short = True
        found: list[_Block] = []
        for name in event.sequence_hashes:
            named = self._names.get(name)
            found += self._find_hash(name) if named is None else [named]
        for place, parent in map(_key, event.lineage_hashes):
            block = self._blocks.get(place)
            if block is not None and block.parent == parent:
                found.append(block)
        for block in found:
            if block.tiers & 1 << tier:
                block.mark(1 << tier, event.resumable)

    # Removing.

    def _remove(self, removed: Removed, tier: int) -> None:
        bit = 1 << tier
        keys = [_key(lineage) for lineage in removed.lineage_hashes]
        for key in keys:
            self._parking.note_unplaced(key, tier)
        named: list[tuple[tuple[Place, Place], int]] = []
        waiting, unplaced = set(), []
        for name in removed.sequence_hashes:
            waits = self._parking.note_removed(name, tier)
            block = self._names.get(name)
            if block is not None:
                named.append((_order(block.key), name))
            elif waits:
                # It means a block of an event that waits, and no other one.
                waiting.add(name)
            elif name not in waiting:
                unplaced.append(name)
                # By their sequence hash, all blocks that have it go, under all their names.
                keys += (found.key for found in self._find_hash(name))
        # Deepest first, as the daemon does.
        for _, name in sorted(named, key=lambda one: one[0], reverse=True):
            self._remove_name(name, bit)
        for name in unplaced:
            self._parking.note_unplaced(name, tier)
        for place, parent in sorted(keys, key=_order, reverse=True):
            block = self._blocks.get(place)
            if block is not None and block.parent == parent and block.tiers & bit:
                self._remove_tier(block, bit)

    def _remove_name(self, name: int, bit: int) -> None:
        """Removes a block from one tier, under one name."""
        block = self._names.get(name)
        if block is None:
            return
        if block.aliases is None:
            if block.tiers & bit:
                self._remove_tier(block, bit)
        elif block.aliases[name] & bit:
            block.aliases[name] &= ~bit
            self._settle_names(block)

    def _remove_tier(self, block: _Block, bit: int) -> None:
        """Removes a block from one tier, under all its names."""
        block.tiers &= ~bit
        block.barred &= _classes(block.tiers)
        if block.tiers == 0:
            self._erase(block)
        elif block.aliases is not None:
            for name in block.aliases:
                block.aliases[name] &= ~bit
            self._settle_names(block)

    def _drop_name(self, block: _Block, name: int) -> None:
        """Takes one name from a block; a block that loses its last name is removed."""
        if block.aliases is None:
            self._erase(block)
        else:
            block.aliases[name] = 0
            self._settle_names(block)

    def _settle_names(self, block: _Block) -> None:
        """Drops the names that no tier is left for. Some name is left."""
        aliases = block.aliases or {}
        for name in [name for name, tiers in aliases.items() if tiers == 0]:
            del aliases[name]
            self._names.pop(name, None)
        block.name = next(iter(aliases), None)
        block.tiers = 0
        for tiers in aliases.values():
            block.tiers |= tiers
        block.barred &= _classes(block.tiers)
        block.aliases = aliases if len(aliases) > 1 else None

    def _erase(self, block: _Block) -> None:
        del self._blocks[block.place]
        alike = self._hashes[block.place & _COMMON]
        alike.remove(block)
        if not alike:
            del self._hashes[block.place & _COMMON]
        for name in block.aliases or (() if block.name is None else (block.name,)):
            del self._names[name]

    # The full state.

    def expire(self, now: float) -> None:
        """Drops stored blocks that have waited for their parent for too long. ``now`` is as in :meth:`apply`."""
        self._parking.expire(now)

    def state(self, now: float, event_bytes_max: float = float("inf")) -> Iterator[tuple[Tier, Event]] | None:
        """Events that make a fresh holder equal to this one, parents first. They take about so many bytes each at most.

        None while stored blocks wait for a parent. Where some have waited for a second, the state is given without what waits, and is
        short: whoever gets it has passed the batches that told of these blocks.
        """
        if len(self._parking):
            if not self._parking.has_waited(now):
                return None
            self._has_given_less = True
        return self._dump(int(min(max(event_bytes_max / _BLOCK_BYTES, 1), EVENT_BLOCKS_MAX)))

    def _dump(self, blocks_max: int) -> Iterator[tuple[Tier, Event]]:
        blocks = self._blocks
        # Most blocks have one child. A list for each would take several times as long.
        first_child: dict[Place, _Block] = {}
        siblings: dict[Place, list[_Block]] = {}
        stack: list[_Block] = []
        for block in blocks.values():
            parent = block.parent
            if parent is None or parent not in blocks:
                stack.append(block)
            elif parent in first_child:
                siblings.setdefault(parent, []).append(block)
            else:
                first_child[parent] = block
        while stack:
            last = stack.pop()
            piece = [last]
            while (child := first_child.get(last.place)) is not None:
                stack += siblings.get(last.place, ())
                if len(piece) == blocks_max or not _continues(last, child):
                    stack.append(child)
                    break
                piece.append(child)
                last = child
            yield from self._events(piece)

    def _events(self, piece: list[_Block]) -> Iterator[tuple[Tier, Event]]:
        """A piece under the first names of its blocks, then its further names; each once for each tier."""
        names = None if piece[0].name is None else [block.name or 0 for block in piece]
        for tier in _each_tier(piece[0].first_tiers()):
            yield tier, self._stored(piece, names, tier)
        for block in piece:
            if block.aliases is None:
                continue
            for name, tiers in list(block.aliases.items())[1:]:
                for tier in _each_tier(tiers):
                    yield tier, self._stored([block], [name], tier)

    def _stored(self, piece: list[_Block], names: list[int] | None, tier: Tier) -> Event:
        first, own = piece[0], _classes(1 << tier)
        runs = resumable_runs(not block.barred & own for block in piece)
        if first.sequence is None:
            return StoredByLineage([block.lineage() for block in piece], names, runs)
        hashes = array("Q", [block.sequence or 0 for block in piece])
        parent = None
        if first.parent is not None:
            # A resident parent has come before, so its name finds it. Of another one the fragment is all that is needed.
            resident = self._blocks.get(first.parent)
            named = None if resident is None else resident.name
            parent = first.parent & _FRAGMENT if named is None else named
        # Where hashes are recomputed, what comes without names would have to come with its content.
        repeats = not self._recomputes and names is not None and names == hashes.tolist()
        return Stored(
            hashes,
            parent=parent,
            position=first.position or None,
            engine_hashes=None if repeats else names,
            resumable=runs,
        )


def _key(lineage: LineageHash) -> tuple[Place, Place | None]:
    """The place that a lineage hash stands for, and that of its parent."""
    position = lineage.position
    parent = None if position == 0 else _place(position - 1, lineage.parent_fragment)
    return _place(position, lineage.current_fragment), parent


def _order(key: tuple[Place, Place | None]) -> tuple[Place, Place]:
    """Shallow blocks come first."""
    return key[0], key[1] or 0


def _continues(block: _Block, child: _Block) -> bool:
    """Whether a child can be in one event with its parent."""
    tiers = block.tiers if block.aliases is None else block.first_tiers()
    return (
        tiers == (child.tiers if child.aliases is None else child.first_tiers())
        and (block.name is None) == (child.name is None)
        and (block.sequence is None) == (child.sequence is None)
    )


def _each_tier(tiers: int) -> Iterator[Tier]:
    return (tier for tier in Tier if tiers >> tier & 1)
