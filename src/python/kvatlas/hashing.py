"""The hash contract: what blocks and prefixes are called.

>>> blocks = block_hashes(range(1, 33))
>>> [f"{block:016x}" for block in blocks]
['ea06fc71a5ee6e88', '1fbf39bd106be0b5']
>>> [f"{prefix:016x}" for prefix in sequence_hashes(blocks)]
['ea06fc71a5ee6e88', 'ad01835a37dd294c']
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Final

import xxhash

from ._checks import encoded, unsigned, whole
from .errors import InvalidValueError

BASE_SEED: Final = 1337
"""Seed of every hash, before the names of adapter and salt enter it."""

BLOCK_SIZE: Final = 16
"""Tokens in a block unless a namespace says otherwise."""

POSITION_MAX: Final = (1 << 24) - 1
"""The last position that a lineage hash can carry."""

U64_MAX: Final = (1 << 64) - 1

_PAIR: Final = struct.Struct("<QQ")


def cache_seed(lora_name: str | None = None, cache_salt: str | None = None) -> int:
    """The seed of the block hashes of one cache. An absent or empty name adds nothing."""
    seed = BASE_SEED
    if adapter := encoded(lora_name, "lora_name"):
        seed += xxhash.xxh3_64_intdigest(adapter, seed=0)
    if salt := encoded(cache_salt, "cache_salt"):
        seed += xxhash.xxh3_64_intdigest(salt, seed=1)
    return seed & U64_MAX


def little_endian(values: array[int]) -> bytes:
    """The values one after the other, least significant byte first."""
    if sys.byteorder == "little":
        return values.tobytes()
    swapped = values[:]
    swapped.byteswap()
    return swapped.tobytes()


def unsigned_array(typecode: str, values: Iterable[int], what: str) -> array[int]:
    """An array of type ``I`` (32 bits) or ``Q`` (64 bits); :class:`InvalidValueError` names ``what`` does not fit."""
    if isinstance(values, array) and values.typecode == typecode:
        return values
    try:
        # An array would take bytes for memory that has its values.
        return array(typecode, list(values) if isinstance(values, bytes | bytearray) else values)
    except (OverflowError, TypeError, ValueError) as error:
        bits = 8 * array(typecode).itemsize
        raise InvalidValueError(f"{what} must be unsigned integers of {bits} bits: {error}") from None


def block_hashes(
    tokens: Iterable[int],
    block_size: int = BLOCK_SIZE,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
) -> list[int]:
    """The hash of every whole block of ``tokens``. A tail that does not fill a block has none."""
    if whole(block_size, "block_size") < 1:
        raise InvalidValueError(f"a block size of {block_size} is not possible; use at least 1")
    seed = cache_seed(lora_name, cache_salt)
    encoded = memoryview(little_endian(unsigned_array("I", tokens, "tokens")))
    width = 4 * block_size
    digest = xxhash.xxh3_64_intdigest
    return [digest(encoded[end - width : end], seed=seed) for end in range(width, len(encoded) + 1, width)]


def sequence_hashes(blocks: Iterable[int], parent: int | None = None) -> list[int]:
    """The rolling hash of the prefix up to and including each block; ``parent`` is that of the block before the first."""
    digest, pack = xxhash.xxh3_64_intdigest, _PAIR.pack
    parent = None if parent is None else unsigned(parent, "parent")
    chain: list[int] = []
    for block in unsigned_array("Q", blocks, "block hashes"):
        parent = block if parent is None else digest(pack(parent, block), seed=BASE_SEED)
        chain.append(parent)
    return chain


def _mode(position: int) -> int:
    return 0 if position < 1 << 8 else 1 if position < 1 << 16 else 2


_FRAGMENT_BITS: Final = (59, 55, 51)
_FRAGMENT_MASKS: Final = tuple((1 << bits) - 1 for bits in _FRAGMENT_BITS)


def fragment_mask(position: int) -> int:
    """Which bits of its own sequence hash a block at ``position`` keeps: as many as its child's parent field holds."""
    return _FRAGMENT_MASKS[_mode(position + 1)]


@dataclass(frozen=True, slots=True, order=True)
class LineageHash:
    """Content, position and parent of a block, packed in 128 bits. Layout version 1.

    :raises InvalidValueError: for what no block can have.
    """

    packed: int

    def __post_init__(self) -> None:
        if not isinstance(self.packed, int) or not 0 <= self.packed < 1 << 128:
            raise InvalidValueError("a lineage hash is an unsigned integer of 128 bits")
        if self.mode > 2:
            raise InvalidValueError("lineage mode 3 does not exist")
        position = self.position
        if self.mode != _mode(position):
            raise InvalidValueError(f"position {position} is not of lineage mode {self.mode}")
        if position == 0 and self.parent_fragment:
            raise InvalidValueError("position 0 has no parent")
        if self.current_fragment & ~fragment_mask(position):
            raise InvalidValueError(f"the current fragment is too wide for position {position}")

    @classmethod
    def of(cls, current: int, parent: int | None, position: int) -> LineageHash:
        """Packs the block with sequence hash ``current`` at ``position``; position 0 has no parent."""
        try:
            position, own, before = index(position), index(current), 0 if parent is None else index(parent)
        except TypeError as error:
            raise InvalidValueError(f"a lineage hash is made of whole numbers: {error}") from None
        if own >> 64 or before >> 64:
            raise InvalidValueError("the sequence hashes must be unsigned integers of 64 bits")
        if not 0 <= position <= POSITION_MAX:
            raise InvalidValueError(f"position {position} is not one of 0 to {POSITION_MAX}")
        if (parent is None) != (position == 0):
            which = "position 0 has no parent" if position == 0 else "a position above 0 needs a parent"
            raise InvalidValueError(which)
        mode = _mode(position)
        width = _FRAGMENT_BITS[mode]
        parent_fragment = before & _FRAGMENT_MASKS[mode]
        fragment = own & fragment_mask(position)
        # A block can have what is packed here, so the checks of what others have packed are left out.
        packed = object.__new__(cls)
        object.__setattr__(packed, "packed", mode << 126 | position << (2 * width) | parent_fragment << width | fragment)
        return packed

    @classmethod
    def from_bytes(cls, encoded: bytes) -> LineageHash:
        """Reads the wire form, 16 bytes, most significant first. Refuses what no block can have."""
        if len(encoded) != 16:
            raise InvalidValueError(f"a lineage hash has 16 bytes, not {len(encoded)}")
        return cls(int.from_bytes(encoded, "big"))

    def to_bytes(self) -> bytes:
        """The wire form, 16 bytes, most significant first."""
        return self.packed.to_bytes(16, "big")

    @property
    def mode(self) -> int:
        """The encoding mode: 0, 1 or 2."""
        return self.packed >> 126

    @property
    def position(self) -> int:
        """The index of the block in its sequence, from 0."""
        return (self.packed & (1 << 126) - 1) >> (2 * self._bits)

    @property
    def parent_fragment(self) -> int:
        """The low bits of the parent's sequence hash; 0 at position 0."""
        return self.packed >> self._bits & (1 << self._bits) - 1

    @property
    def current_fragment(self) -> int:
        """The low bits of the block's own sequence hash."""
        return self.packed & (1 << self._bits) - 1

    @property
    def _bits(self) -> int:
        return _FRAGMENT_BITS[self.mode]

    def child(self, current: int) -> LineageHash:
        """The block with sequence hash ``current`` that follows this one."""
        return LineageHash.of(current, self.current_fragment, self.position + 1)

    def is_child_of(self, parent: LineageHash) -> bool:
        """Whether this block follows ``parent``."""
        return self.position == parent.position + 1 and self.parent_fragment == parent.current_fragment

    def __str__(self) -> str:
        return f"{self.packed:032x}"


def lineage_hashes(
    sequence: Sequence[int], position: int = 0, parent: int | None = None
) -> Iterator[LineageHash]:
    """The lineage hashes of a chain whose first block is at ``position``."""
    for current in sequence:
        yield LineageHash.of(current, parent, position)
        parent, position = current, position + 1
