"""What a publisher says: events, and the batches that carry them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeAlias, TypeVar

import msgpack

from ._checks import all_of, encoded, flag, whole
from .errors import InvalidValueError
from .hashing import POSITION_MAX, U64_MAX, LineageHash, little_endian, unsigned_array
from .profile import Profile

PROTOCOL_VERSION: Final = 1
"""The version of the contract: the ``v1`` in subjects and the ``v`` in payloads."""

TEXT_BYTES_MAX: Final = 1024
"""Longest adapter name or cache salt, in bytes."""


class Tier(IntEnum):
    """Where in a worker's memory hierarchy blocks lie. 4 to 7 are free for the publisher."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3
    OTHER_4 = 4
    OTHER_5 = 5
    OTHER_6 = 6
    OTHER_7 = 7


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A batch: its publisher's incarnation, and its number in it."""

    epoch: int
    seq: int


_Owner = TypeVar("_Owner")


def _set(event: _Owner, **values: object) -> None:
    # A frozen dataclass that normalises its own fields has no other way.
    for name, value in values.items():
        object.__setattr__(event, name, value)


def _own(typecode: str, values: Iterable[int], what: str) -> array[int]:
    packed = unsigned_array(typecode, values, what)
    # What is queued must not change with the caller's list.
    return packed[:] if packed is values else packed


def _hashes(values: Iterable[int], what: str) -> array[int]:
    return _own("Q", values, what)


def _named(values: Iterable[int] | None, what: str, blocks: int) -> array[int] | None:
    if values is None:
        return None
    packed = _hashes(values, what)
    if len(packed) != blocks:
        raise InvalidValueError(f"{what} has {len(packed)} elements for {blocks} blocks")
    return packed


def lineages(values: Iterable[LineageHash]) -> tuple[LineageHash, ...]:
    """Lineage hashes, of which each has to be one."""
    return tuple(all_of(values, LineageHash, "lineage_hashes"))


def _runs(values: Sequence[int] | None, blocks: int) -> tuple[int, ...] | None:
    if values is None:
        return None
    runs = tuple(whole(run, "a run of resumable") for run in values)
    if any(run < (place > 0) for place, run in enumerate(runs)):
        raise InvalidValueError("resumable has a run of no blocks; only the first may be 0")
    if sum(runs) > blocks:
        raise InvalidValueError(f"resumable has {sum(runs)} elements for {blocks} blocks")
    return runs


def _flags(runs: Sequence[int] | None, blocks: int) -> list[bool]:
    if runs is None:
        return [True] * blocks
    flags = [place % 2 == 1 for place, run in enumerate(runs) for _ in range(run)]
    return flags + [False] * (blocks - len(flags))


def resumable_runs(flags: Iterable[bool]) -> tuple[int, ...] | None:
    """Run lengths of flags, one a block, as :class:`Stored` takes them; none where all blocks are resumable."""
    runs, last = [0], False
    for flag in flags:
        if bool(flag) is not last:
            runs.append(0)
            last = not last
        runs[-1] += 1
    if runs[0] == 0 and len(runs) <= 2:
        return None
    return tuple(runs[:-1] if len(runs) % 2 else runs)


def check_text(text: str | None, what: str) -> None:
    """Refuses an adapter name or salt that is no text, or is too long for the contract."""
    if len(encoded(text, what)) > TEXT_BYTES_MAX:
        raise InvalidValueError(f"{what} has more than {TEXT_BYTES_MAX} bytes")


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of one sequence that the holder has now.

    :param sequence_hashes: what the blocks are called; the contract's hashes, or the engine's own.
    :param parent: the hash of the block before the first; absent at position 0.
    :param position: of the first block; where it is absent it follows from the parent, which the holder must hold.
    :param engine_hashes: what the engine calls the blocks in later removals and parents, if anything else.
    :param block_hashes: what the blocks consist of.
    :param tokens: instead of ``block_hashes``: the tokens of all blocks.
    :param lora_name: beside ``tokens``: the adapter that enters the block hashes.
    :param cache_salt: beside ``tokens``: the salt that enters the block hashes.
    :param resumable: behind which blocks a request can resume: run lengths that alternate and begin with blocks behind which it cannot; it
        cannot behind those after the last run either. All are resumable where it is absent. :func:`resumable_runs` makes one of flags.
    """

    sequence_hashes: Sequence[int]
    parent: int | None = None
    position: int | None = None
    engine_hashes: Sequence[int] | None = None
    block_hashes: Sequence[int] | None = None
    tokens: Sequence[int] | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    resumable: Sequence[int] | None = None

    def __post_init__(self) -> None:
        hashes = _hashes(self.sequence_hashes, "sequence_hashes")
        blocks = len(hashes)
        _set(
            self,
            sequence_hashes=hashes,
            parent=None if self.parent is None else whole(self.parent, "parent"),
            position=None if self.position is None else whole(self.position, "position"),
            resumable=_runs(self.resumable, blocks),
            engine_hashes=_named(self.engine_hashes, "engine_hashes", blocks),
            block_hashes=_named(self.block_hashes, "block_hashes", blocks),
        )
        self._check_start(blocks)
        if self.tokens is None:
            if self.lora_name is not None or self.cache_salt is not None:
                raise InvalidValueError("lora_name and cache_salt stand beside tokens only")
            return
        if self.block_hashes is not None:
            raise InvalidValueError("give block_hashes or tokens, not both")
        tokens = _own("I", self.tokens, "tokens")
        if len(tokens) % max(blocks, 1):
            raise InvalidValueError(f"{len(tokens)} tokens do not make {blocks} blocks of one size")
        _set(self, tokens=tokens)
        check_text(self.lora_name, "lora_name")
        check_text(self.cache_salt, "cache_salt")

    def flags(self) -> list[bool]:
        """Whether each block is resumable."""
        return _flags(self.resumable, len(self.sequence_hashes))

    def _check_start(self, blocks: int) -> None:
        if self.parent is None:
            if self.position:
                raise InvalidValueError("a position above 0 needs a parent")
        elif not 0 <= self.parent <= U64_MAX:
            raise InvalidValueError("the parent must be an unsigned integer of 64 bits")
        elif self.position == 0:
            raise InvalidValueError("position 0 has no parent; leave it out")
        first = self.position or 0
        if first < 0 or first + max(blocks, 1) - 1 > POSITION_MAX:
            raise InvalidValueError(f"the blocks are not at positions 0 to {POSITION_MAX}")


@dataclass(frozen=True, slots=True)
class StoredByLineage:
    """Blocks that the holder has now, called by lineage hashes, in any order.

    :param engine_hashes: what the engine calls the blocks in later removals and parents, if it does.
    :param resumable: as of :class:`Stored`.
    """

    lineage_hashes: Sequence[LineageHash]
    engine_hashes: Sequence[int] | None = None
    resumable: Sequence[int] | None = None

    def __post_init__(self) -> None:
        hashes = lineages(self.lineage_hashes)
        _set(
            self,
            lineage_hashes=hashes,
            engine_hashes=_named(self.engine_hashes, "engine_hashes", len(hashes)),
            resumable=_runs(self.resumable, len(hashes)),
        )

    def flags(self) -> list[bool]:
        """Whether each block is resumable."""
        return _flags(self.resumable, len(self.lineage_hashes))


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that the holder no longer has, in the batch's tier. Those it does not hold are passed over.

    :param sequence_hashes: sequence hashes, or engine hashes where the blocks were stored with them.
    """

    sequence_hashes: Sequence[int] = ()
    lineage_hashes: Sequence[LineageHash] = ()

    def __post_init__(self) -> None:
        hashes = _hashes(self.sequence_hashes, "sequence_hashes")
        _set(self, sequence_hashes=hashes, lineage_hashes=lineages(self.lineage_hashes))


@dataclass(frozen=True, slots=True)
class Resumable:
    """Blocks that have become resumable, or are so no longer, in the batch's tier. Those that the holder does not have are passed over.

    :param sequence_hashes: sequence hashes, or engine hashes where the blocks were stored with them.
    :param resumable: whether they are from now on.
    """

    sequence_hashes: Sequence[int] = ()
    lineage_hashes: Sequence[LineageHash] = ()
    resumable: bool = True

    def __post_init__(self) -> None:
        hashes = _hashes(self.sequence_hashes, "sequence_hashes")
        _set(
            self,
            sequence_hashes=hashes,
            lineage_hashes=lineages(self.lineage_hashes),
            resumable=flag(self.resumable, "resumable"),
        )


@dataclass(frozen=True, slots=True)
class Cleared:
    """The holder has no block any more, in no tier. It is exact again."""


DOUBTS: Final = (
    "upstream_gap",
    "upstream_lost",
    "unknown_groups",
    "untold_salts",
    "untold_adapters",
    "looks_ahead",
    "hashes_pairs",
    "host_gap",
    "disk_gap",
    "external_gap",
)
"""What a publisher can doubt: events of the engine are lost for good; the engine is out of sight; not all of its groups of layers are known.

The others are doubts for some queries only: for those with a salt or an adapter, which the engine's events do not tell; for those by hashes,
where the engine hashes each block with the token behind it; for none, where it hashes pairs of tokens, which answers take into account; for those of which nearer tiers don't have all blocks, where it is not known what a
tier beyond the device has.
"""


@dataclass(frozen=True, slots=True)
class Doubted:
    """What the publisher itself doubts about the blocks that it tells, from now on. For relays.

    It replaces what was doubted before. No reason at all, :class:`Cleared` and a new epoch end the doubt.

    :param reasons: out of :data:`DOUBTS`.
    """

    reasons: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.reasons, str) or not isinstance(self.reasons, Iterable):
            raise InvalidValueError(f"reasons are a list of doubts, not {self.reasons!r}")
        unknown = set(self.reasons) - set(DOUBTS)
        if unknown:
            raise InvalidValueError(f"{sorted(unknown)} are no doubts; those are {', '.join(DOUBTS)}")
        _set(self, reasons=tuple(reason for reason in DOUBTS if reason in self.reasons))


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The holder shuts down in good order; daemons forget it, its numbers included."""


Event: TypeAlias = Stored | StoredByLineage | Removed | Resumable | Cleared | Doubted | Goodbye
"""One change to what a holder holds."""


def blob(hashes: Iterable[int]) -> bytes:
    """A list of 64-bit hashes as the contract carries it."""
    return little_endian(unsigned_array("Q", hashes, "hashes"))


def lineage_blob(hashes: Sequence[LineageHash]) -> bytes:
    """A list of lineage hashes as the contract carries it."""
    return b"".join(lineage.to_bytes() for lineage in hashes)


def put_tokens(
    entries: dict[str, Any], tokens: Sequence[int], lora_name: str | None, cache_salt: str | None
) -> None:
    """Adds the entries of a list of tokens, and of what enters their hashes."""
    entries["tokens"] = little_endian(unsigned_array("I", tokens, "tokens"))
    if lora_name is not None:
        entries["lora_name"] = lora_name
    if cache_salt is not None:
        entries["cache_salt"] = cache_salt


def _stored_entries(event: Stored) -> dict[str, Any]:
    entries: dict[str, Any] = {"type": "stored"}
    if event.parent is not None:
        entries["parent"] = event.parent
    if event.position is not None:
        entries["position"] = event.position
    entries["sequence_hashes"] = blob(event.sequence_hashes)
    if event.block_hashes is not None:
        entries["block_hashes"] = blob(event.block_hashes)
    if event.tokens is not None:
        put_tokens(entries, event.tokens, event.lora_name, event.cache_salt)
    if event.engine_hashes is not None:
        entries["engine_hashes"] = blob(event.engine_hashes)
    if event.resumable is not None:
        entries["resumable"] = list(event.resumable)
    return entries


def _entries(event: Event) -> dict[str, Any]:
    match event:
        case Stored():
            return _stored_entries(event)
        case StoredByLineage(hashes, names, runs):
            entries: dict[str, Any] = {"type": "stored", "lineage_hashes": lineage_blob(hashes)}
            if names is not None:
                entries["engine_hashes"] = blob(names)
            if runs is not None:
                entries["resumable"] = list(runs)
            return entries
        case Removed(hashes, lineage):
            entries = {"type": "removed", "sequence_hashes": blob(hashes)}
            if lineage:
                entries["lineage_hashes"] = lineage_blob(lineage)
            return entries
        case Resumable(hashes, lineage, resumable):
            entries = {"type": "resumable", "sequence_hashes": blob(hashes)}
            if lineage:
                entries["lineage_hashes"] = lineage_blob(lineage)
            return entries | {"resumable": resumable}
        case Cleared():
            return {"type": "cleared"}
        case Doubted(reasons):
            return {"type": "doubted", "reasons": list(reasons)}
        case Goodbye():
            return {"type": "goodbye"}


def encode_batch(
    cursor: Cursor,
    rank: int,
    events: Iterable[Event],
    *,
    tier: int = Tier.DEVICE,
    block_size: int | None = None,
    time_us: int | None = None,
    profile: Profile | None = None,
) -> bytes:
    """The payload for an events subject. Without events it is a heartbeat. A ``profile`` tells the holder's address and labels."""
    batch: dict[str, Any] = {"v": PROTOCOL_VERSION, "epoch": cursor.epoch, "seq": cursor.seq, "rank": rank}
    if time_us is not None:
        batch["time_us"] = time_us
    if tier != Tier.DEVICE:
        batch["tier"] = int(tier)
    if block_size is not None:
        batch["block_size"] = block_size
    if profile is not None:
        batch |= profile.entries()
    batch["events"] = [_entries(event) for event in events]
    payload: bytes = msgpack.packb(batch)
    return payload


_BATCH_BYTES: Final = 64
_EVENT_BYTES: Final = 128
_RUN_BYTES: Final = 5


def event_bytes(event: Event) -> int:
    """About how many bytes an event takes in a batch; never less than it does."""
    size = _EVENT_BYTES
    match event:
        case Stored():
            size += 8 * len(event.sequence_hashes)
            size += 8 * len(event.block_hashes or ()) + 8 * len(event.engine_hashes or ())
            size += _RUN_BYTES * len(event.resumable or ())
            if event.tokens is not None:
                size += 4 * len(event.tokens)
                size += sum(len(text.encode()) for text in (event.lora_name, event.cache_salt) if text)
        case StoredByLineage(hashes, names, runs):
            size += 16 * len(hashes) + 8 * len(names or ()) + _RUN_BYTES * len(runs or ())
        case Removed(hashes, lineage) | Resumable(hashes, lineage):
            size += 8 * len(hashes) + 16 * len(lineage)
        case Cleared() | Doubted() | Goodbye():
            pass
    return size


def events_bytes(events: Iterable[Event]) -> int:
    """About how many bytes these events take as a batch; never less than they do."""
    return _BATCH_BYTES + sum(event_bytes(event) for event in events)
