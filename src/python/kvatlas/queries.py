"""Queries as they travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any, Final

import msgpack

from ._checks import all_of, unsigned
from .errors import InvalidValueError
from .events import PROTOCOL_VERSION, blob, check_text, lineage_blob, lineages, put_tokens
from .hashing import POSITION_MAX, LineageHash, little_endian, unsigned_array
from .subjects import check_name


class _Kept(Enum):
    """The value of an option that is not given."""

    KEPT = "kept"


_KEPT: Final = _Kept.KEPT


@dataclass(frozen=True, slots=True)
class Query:
    """Which holders hold how long a prefix of a prompt? Made by one of the four ``by_…`` methods.

    :param workers: answer only for these workers; all where it is absent.
    :param limit: at most so many holders, the best first; all where it is absent.
    :param min_blocks: leave out holders with fewer matched blocks.
    :param explain: say where each holder dropped out.
    :param tiers: say how many of its blocks each holder has on the device, and on device and host.
    :param predicted: list apart who will have more of the prompt soon, by what routers have hinted.
    """

    key: dict[str, Any]
    workers: tuple[str, ...] | None = None
    limit: int | None = None
    min_blocks: int = 0
    explain: bool = False
    tiers: bool = False
    predicted: bool = False

    @classmethod
    def by_tokens(
        cls,
        tokens: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        token_count: int | None = None,
    ) -> Query:
        """By the prompt's tokens; the daemon cuts and hashes them.

        ``token_count`` is how many tokens the prompt has, where it goes on behind these: the last one is always computed.
        """
        check_text(lora_name, "lora_name")
        check_text(cache_salt, "cache_salt")
        key: dict[str, Any] = {}
        put_tokens(key, tokens, lora_name, cache_salt)
        count = _token_count(token_count)
        if count and count["token_count"] < len(key["tokens"]) // 4:
            raise InvalidValueError("token_count is less than the number of tokens")
        return cls(key | count)

    @classmethod
    def by_block_hashes(cls, hashes: Iterable[int], *, token_count: int | None = None) -> Query:
        """By the block hash of each block. ``token_count`` is how many tokens the prompt has: the last one is always computed."""
        return cls({"block_hashes": blob(hashes)} | _token_count(token_count))

    @classmethod
    def by_sequence_hashes(
        cls, hashes: Iterable[int], *, positions: Iterable[int] | None = None, token_count: int | None = None
    ) -> Query:
        """By the sequence hash of each block: the cheapest form.

        With ``positions``, the hashes are those of blocks chosen from one chain, and the answer has bounds.
        ``token_count`` is how many tokens the prompt has: the last one is always computed.
        """
        known = unsigned_array("Q", hashes, "hashes")
        key = {"sequence_hashes": little_endian(known)} | _positions(positions, len(known))
        return cls(key | _token_count(token_count))

    @classmethod
    def by_lineage_hashes(
        cls,
        hashes: Iterable[LineageHash],
        *,
        positions: Iterable[int] | None = None,
        token_count: int | None = None,
    ) -> Query:
        """By lineage hashes: one chain from position 0, or blocks chosen from one at ``positions``."""
        known = lineages(hashes)
        key = {"lineage_hashes": lineage_blob(known)} | _positions(positions, len(known))
        return cls(key | _token_count(token_count))

    def narrowed(
        self,
        *,
        workers: Iterable[str] | None | _Kept = _KEPT,
        limit: int | None | _Kept = _KEPT,
        min_blocks: int | _Kept = _KEPT,
        explain: bool | _Kept = _KEPT,
        tiers: bool | _Kept = _KEPT,
        predicted: bool | _Kept = _KEPT,
    ) -> Query:
        """The same query with these options. Those that are not given stay as they are."""
        if workers is not None and not isinstance(workers, _Kept):
            workers = tuple(check_name(worker, "worker") for worker in all_of(workers, str, "workers"))
        if limit is not None and not isinstance(limit, _Kept):
            limit = unsigned(limit, "limit")
        if not isinstance(min_blocks, _Kept):
            min_blocks = unsigned(min_blocks, "min_blocks", 32)
        options: dict[str, Any] = {
            "workers": workers,
            "limit": limit,
            "min_blocks": min_blocks,
            "explain": explain,
            "tiers": tiers,
            "predicted": predicted,
        }
        return replace(self, **{name: value for name, value in options.items() if value is not _KEPT})

    def entries(self) -> dict[str, Any]:
        """The query as a map."""
        entries = dict(self.key)
        if self.workers is not None:
            entries["workers"] = list(self.workers)
        if self.limit is not None:
            entries["limit"] = self.limit
        if self.min_blocks:
            entries["min_blocks"] = self.min_blocks
        if self.explain:
            entries["explain"] = True
        if self.tiers:
            entries["tiers"] = True
        if self.predicted:
            entries["predicted"] = True
        return entries


def _positions(positions: Iterable[int] | None, hashes: int) -> dict[str, bytes]:
    if positions is None:
        return {}
    known = unsigned_array("I", positions, "positions")
    if len(known) != hashes or not known:
        raise InvalidValueError(f"{len(known)} positions for {hashes} hashes; give one a hash")
    if any(after <= before for before, after in pairwise(known)):
        raise InvalidValueError("positions must ascend")
    if known[-1] > POSITION_MAX:
        raise InvalidValueError(f"positions go up to {POSITION_MAX}")
    return {"positions": little_endian(known)}


def _token_count(count: int | None) -> dict[str, int]:
    if count is None:
        return {}
    return {"token_count": unsigned(count, "token_count")}


def encode_query(query: Query) -> bytes:
    """The payload of a request with one query."""
    payload: bytes = msgpack.packb({"v": PROTOCOL_VERSION} | query.entries())
    return payload


def encode_queries(queries: Iterable[Query]) -> bytes:
    """The payload of a request with several queries."""
    listed = [query.entries() for query in queries]
    payload: bytes = msgpack.packb({"v": PROTOCOL_VERSION, "queries": listed})
    return payload
