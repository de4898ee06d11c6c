"""Replies as they travel, and what routers tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, TypeVar

import msgpack

from ._checks import check_type, unsigned
from .errors import InvalidValueError, RefusedError, UndecodableError, refusal
from .events import PROTOCOL_VERSION, Cursor
from .hashing import LineageHash
from .queries import Query
from .subjects import check_name

ERROR_HEADER: Final = "Nats-Service-Error"
"""Header with the text of an error reply."""

ERROR_CODE_HEADER: Final = "Nats-Service-Error-Code"
"""Header with the number of an error reply."""


@dataclass(frozen=True, slots=True)
class DropOut:
    """Where a holder dropped out of a query.

    :param position: of the first block that the holder does not have.
    :param lineage_hash: that block's.
    :param other_holders: how many others hold the query up to and including that block.
    """

    position: int
    lineage_hash: LineageHash
    other_holders: int


BEYOND_DEVICE: Final = ("host_gap", "disk_gap", "external_gap")
"""Reasons about one tier beyond the device: it is not known what lies there."""


@dataclass(frozen=True, slots=True)
class HolderMatch:
    """One holder of a prefix.

    :param matched_blocks: leading blocks of the query that it holds, without a hole; of a compressed chain, at least so many.
    :param matched_blocks_max: of a compressed chain: how many it holds at most; else ``matched_blocks``.
    :param usable_blocks: leading blocks that a request can reuse: up to the last resumable one within ``matched_blocks``, and before the last
        token; of a compressed chain, at least so many.
    :param device_blocks: with ``tiers``: how many of ``matched_blocks`` it has on the device, up to the first that lies elsewhere.
    :param host_blocks: the same, on device and host together.
    :param device_usable_blocks: as ``usable_blocks``, of ``device_blocks``.
    :param host_usable_blocks: as ``usable_blocks``, of ``host_blocks``.
    :param exact: whether what is said of it is known for certain.
    :param degraded: why it is not. Where there is nothing but :data:`BEYOND_DEVICE`, what is said of nearer tiers is certain.
    :param dropped_out: with ``explain``, unless it holds the whole query.
    :param limited_by: with ``explain``, why no more blocks are usable: ``full_attention``, ``window``, ``state``, ``window_or_state`` or ``last_token``; ``None``
        where the whole query is.
    :param address: where requests for it go; ``None`` where that is not known.
    :param labels: such as its role, zone and model.
    :param kind: ``pool`` for storage that every worker of the namespace can load from, to which no request can be sent; ``None`` for
        workers.
    :param fields: the whole map, for keys that this release does not know.
    """

    worker: str
    rank: int
    matched_blocks: int
    matched_blocks_max: int
    usable_blocks: int
    device_blocks: int | None
    host_blocks: int | None
    device_usable_blocks: int | None
    host_usable_blocks: int | None
    exact: bool
    degraded: tuple[str, ...]
    dropped_out: DropOut | None
    limited_by: str | None
    fields: dict[str, Any]
    address: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    kind: str | None = None

    @property
    def device_exact(self) -> bool:
        """Whether what is said of the device is certain, whatever lies beyond it."""
        return self.exact or (bool(self.degraded) and set(self.degraded) <= set(BEYOND_DEVICE))

    @property
    def host_exact(self) -> bool:
        """Whether what is said of device and host is certain."""
        return self.device_exact and BEYOND_DEVICE[0] not in self.degraded


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a reply was put together from.

    :param shards: how many there are.
    :param missing: those that did not answer in time: nothing is known of their workers.
    """

    shards: int
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Predicted:
    """A holder to which a router has sent a request with the same beginning, of which no event has told yet. Never exact.

    :param blocks: leading blocks of the query that it should have soon.
    :param address: where requests for it go; ``None`` where that is not known.
    """

    worker: str
    rank: int
    blocks: int
    address: str | None


@dataclass(frozen=True, slots=True)
class QueryReply:
    """The answer to one query.

    :param query_blocks: how many blocks were asked for; of a compressed chain, how many it stands for.
    :param holders: most usable blocks first, then most matched, then by worker and rank.
    :param holders_total: how many matched before ``limit`` cut the list.
    :param foreign_holders: holders that a query by tokens or block hashes cannot find.
    :param doubtful_holders: those asked about that are not in ``holders``, while their state is not certain.
    :param unseen_blocks_max: of a compressed chain: how many blocks a holder of none of the blocks sent can hold.
    :param gathered: in a reply that was put together from those of shards.
    :param behind_us: the age of the oldest event of the namespace that was known of and not applied, in microseconds.
    :param fields: the whole map, for keys that this release does not know.
    :param predicted: with ``predicted``: who will have more of the prompt soon than is known, the most first.
    :param block_size: tokens in a block of the namespace; 0 in replies of older daemons.
    """

    query_blocks: int
    holders: tuple[HolderMatch, ...]
    holders_total: int
    foreign_holders: int
    doubtful_holders: int
    unseen_blocks_max: int
    gathered: Gathered | None
    behind_us: int
    fields: dict[str, Any]
    predicted: tuple[Predicted, ...] = ()
    block_size: int = 0

    @property
    def exact(self) -> bool:
        """Whether the whole answer is certain: who is named, how much each has, and that nobody else has more."""
        is_whole = self.gathered is None or not self.gathered.missing
        are_found = self.foreign_holders == 0 and self.doubtful_holders == 0
        return is_whole and are_found and all(holder.exact for holder in self.holders)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an answer promised of a holder, and what the request found there.

    :param worker: the worker that the request went to.
    :param rank: its data-parallel rank.
    :param promised_blocks: ``usable_blocks`` of the answer.
    :param found_tokens: how many tokens of the prompt the engine found in its cache: ``usage.prompt_tokens_details.cached_tokens``.
    :param prompt_tokens: how many tokens the prompt has; an engine always computes the last one.
    :param exact: whether the answer called the holder exact.
    :raises InvalidValueError: for what a report cannot have. Servers that do not tell ``cached_tokens`` have no outcomes to tell.
    """

    worker: str
    rank: int
    promised_blocks: int
    found_tokens: int
    prompt_tokens: int | None
    exact: bool

    def __post_init__(self) -> None:
        # One outcome that daemons cannot read takes all others of its report with it.
        check_name(self.worker, "worker")
        check_type(self.exact, bool, "exact")
        for name in ("rank", "promised_blocks", "found_tokens", "prompt_tokens"):
            value = getattr(self, name)
            if value is not None or name != "prompt_tokens":
                object.__setattr__(self, name, unsigned(value, name, 32))

    @classmethod
    def of(cls, holder: HolderMatch, found_tokens: int, prompt_tokens: int | None = None) -> Outcome:
        """The outcome of a request that went to a holder of an answer."""
        promised = holder.usable_blocks
        return cls(holder.worker, holder.rank, promised, found_tokens, prompt_tokens, holder.exact)


@dataclass(frozen=True, slots=True)
class Hint:
    """Where a request has been sent: its blocks will be there soon.

    :param prompt: the query about the request's prompt, by all of its blocks.
    :raises InvalidValueError: for what a report cannot have.
    """

    worker: str
    prompt: Query
    rank: int = 0

    def __post_init__(self) -> None:
        check_name(self.worker, "worker")
        check_type(self.prompt, Query, "prompt")
        object.__setattr__(self, "rank", unsigned(self.rank, "rank", 32))


def encode_hint(hint: Hint) -> bytes:
    """A report of one hint."""
    entry = {"worker": hint.worker, "rank": hint.rank, "prompt": hint.prompt.key}
    payload: bytes = msgpack.packb({"v": PROTOCOL_VERSION, "hints": [entry]})
    return payload


OUTCOMES_MAX: Final = 256
"""Most outcomes in one report."""


def encode_outcomes(outcomes: Sequence[Outcome]) -> bytes:
    """A report of outcomes."""

    def entry(outcome: Outcome) -> dict[str, Any]:
        fields = asdict(outcome)
        return {key: value for key, value in fields.items() if value is not None}

    payload: bytes = msgpack.packb({"v": PROTOCOL_VERSION, "outcomes": [entry(outcome) for outcome in outcomes]})
    return payload


@dataclass(frozen=True, slots=True)
class HolderStatus:
    """How far a daemon has followed one holder. ``cursor`` is the last batch applied.

    :param epoch_ahead_s: how far its epoch lies ahead of the daemon's clock, in seconds; 0 where clocks may differ by that.
    :param since_us: since when it is not exact, in microseconds since the Unix epoch; ``None`` where it is, or where that is not known.
    :param address: where requests for it go; ``None`` where that is not known.
    :param labels: such as its role, zone and model.
    """

    worker: str
    rank: int
    cursor: Cursor
    blocks: int
    parked_events: int
    foreign_chain: bool
    epoch_ahead_s: int
    exact: bool
    degraded: tuple[str, ...]
    fields: dict[str, Any]
    address: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    since_us: int | None = None


@dataclass(frozen=True, slots=True)
class StatusReply:
    """How far a daemon has followed a namespace.

    :param block_size: tokens in a block.
    :param distinct_blocks: blocks that some holder can be asked for.
    :param batches_waiting: batches received but not applied yet, of all namespaces.
    :param unsized_holders: of how many holders it is not known whether their blocks have ``block_size`` tokens.
    :param behind_us: the age of the oldest event of the namespace that was known of and not applied, in microseconds.
    :param refused_holders: how many holders there was no room for.
    :param unheard_holders: whether there may be holders of which nothing has been heard or applied yet: 0 or 1, or up to the number of shards.
    """

    block_size: int
    distinct_blocks: int
    batches_waiting: int
    unsized_holders: int
    holders: tuple[HolderStatus, ...]
    gathered: Gathered | None
    behind_us: int
    fields: dict[str, Any]
    refused_holders: int = 0
    unheard_holders: int = 0

    def holder(self, worker: str, rank: int = 0) -> HolderStatus | None:
        """One holder, if the daemon knows it."""
        return next((found for found in self.holders if (found.worker, found.rank) == (worker, rank)), None)


_T = TypeVar("_T")
_Required: Final = object()


class _Map:
    """A map of a reply, read field by field."""

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, dict):
            raise UndecodableError(f"{what} is no map")
        self.fields: dict[str, Any] = value

    def take(self, key: str, kind: type[_T], default: object = _Required) -> _T:
        value = self.fields.get(key, default)
        if value is _Required:
            raise UndecodableError(f"{key} is missing")
        # `True` is an `int` for Python, and none for the contract.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UndecodableError(f"{key} is no {kind.__name__}")
        return value

    def several(self, key: str, read: Callable[[object], _T], default: object = _Required) -> tuple[_T, ...]:
        listed: list[object] = self.take(key, list, default)
        return tuple(read(item) for item in listed)

    def number(self, key: str) -> int | None:
        return None if self.fields.get(key) is None else self.take(key, int)

    def optional(self, key: str, read: Callable[[object], _T]) -> _T | None:
        value = self.fields.get(key)
        return None if value is None else read(value)


def _unpack(payload: bytes) -> _Map:
    try:
        value = msgpack.unpackb(payload)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise UndecodableError(f"it is not one MessagePack map: {error}") from None
    found = _Map(value, "the reply")
    if found.take("v", int, 1) != PROTOCOL_VERSION:
        raise UndecodableError("it speaks another version of the contract")
    return found


def _drop_out(value: object) -> DropOut:
    found = _Map(value, "dropped_out")
    try:
        lineage = LineageHash.from_bytes(found.take("lineage_hash", bytes))
    except InvalidValueError as error:
        raise UndecodableError(str(error)) from None
    return DropOut(found.take("position", int), lineage, found.take("other_holders", int))


def _text(value: object) -> str:
    return _Map({"text": value}, "a holder").take("text", str)


def _labels(found: _Map) -> dict[str, str]:
    labels: dict[object, object] = found.take("labels", dict, {})
    return {_text(key): _text(value) for key, value in labels.items()}


def _match(value: object) -> HolderMatch:
    found = _Map(value, "a holder")
    matched = found.take("matched_blocks", int)
    device, host = found.number("device_blocks"), found.number("host_blocks")
    device_usable, host_usable = found.number("device_usable_blocks"), found.number("host_usable_blocks")
    return HolderMatch(
        worker=found.take("worker", str),
        rank=found.take("rank", int),
        matched_blocks=matched,
        matched_blocks_max=found.take("matched_blocks_max", int, matched),
        usable_blocks=found.take("usable_blocks", int, matched),
        device_blocks=device,
        host_blocks=host,
        device_usable_blocks=device if device_usable is None else device_usable,
        host_usable_blocks=host if host_usable is None else host_usable,
        exact=found.take("exact", bool),
        degraded=found.several("degraded", str, []),
        dropped_out=found.optional("dropped_out", _drop_out),
        limited_by=found.optional("limited_by", _text),
        fields=found.fields,
        address=found.optional("address", _text),
        labels=_labels(found),
        kind=found.optional("kind", _text),
    )


def _gathered(value: object) -> Gathered:
    found = _Map(value, "gathered")
    missing: list[int] = found.take("missing", list, [])
    return Gathered(found.take("shards", int), tuple(missing))


def _query_reply(found: _Map) -> QueryReply:
    return QueryReply(
        query_blocks=found.take("query_blocks", int),
        holders=found.several("holders", _match),
        holders_total=found.take("holders_total", int),
        foreign_holders=found.take("foreign_holders", int, 0),
        doubtful_holders=found.take("doubtful_holders", int, 0),
        unseen_blocks_max=found.take("unseen_blocks_max", int, 0),
        gathered=found.optional("gathered", _gathered),
        behind_us=found.take("behind_us", int, 0),
        fields=found.fields,
        predicted=found.several("predicted", _predicted, []),
        block_size=found.take("block_size", int, 0),
    )


def _predicted(value: object) -> Predicted:
    found = _Map(value, "a prediction")
    return Predicted(
        found.take("worker", str),
        found.take("rank", int),
        found.take("blocks", int),
        found.optional("address", _text),
    )


def decode_query_reply(payload: bytes) -> QueryReply:
    """Reads the answer to one query.

    :raises UndecodableError: if it is none of this version.
    """
    return _query_reply(_unpack(payload))


def _result(value: object) -> QueryReply | RefusedError:
    found = _Map(value, "a result")
    if "error" in found.fields:
        error = _Map(found.fields["error"], "an error")
        return refusal(error.take("code", int), error.take("text", str))
    return _query_reply(_Map(found.fields.get("reply"), "a reply"))


def decode_batch_reply(payload: bytes) -> tuple[QueryReply | RefusedError, ...]:
    """Reads the answers to several queries, in their order.

    :raises UndecodableError: if they are none of this version.
    """
    return _with_profiles(_unpack(payload).several("results", _result))


def _with_profiles(
    results: tuple[QueryReply | RefusedError, ...],
) -> tuple[QueryReply | RefusedError, ...]:
    """The results with each holder's address and labels in every one: they travel in the first one only."""
    said: dict[tuple[str, int], HolderMatch] = {}

    def told(holder: HolderMatch) -> HolderMatch:
        key = (holder.worker, holder.rank)
        if holder.address is not None or holder.labels:
            said[key] = holder
            return holder
        known = said.get(key)
        return holder if known is None else replace(holder, address=known.address, labels=known.labels)

    return tuple(
        result
        if isinstance(result, RefusedError)
        else replace(result, holders=tuple(told(holder) for holder in result.holders))
        for result in results
    )


def _holder_status(value: object) -> HolderStatus:
    found = _Map(value, "a holder")
    return HolderStatus(
        worker=found.take("worker", str),
        rank=found.take("rank", int),
        cursor=Cursor(found.take("epoch", int), found.take("seq", int)),
        blocks=found.take("blocks", int),
        parked_events=found.take("parked_events", int),
        foreign_chain=found.take("foreign_chain", bool, False),
        epoch_ahead_s=found.take("epoch_ahead_s", int, 0),
        exact=found.take("exact", bool),
        degraded=found.several("degraded", str, []),
        fields=found.fields,
        address=found.optional("address", _text),
        labels=_labels(found),
        since_us=found.number("since_us"),
    )


def decode_status_reply(payload: bytes) -> StatusReply:
    """Reads the answer to a status request.

    :raises UndecodableError: if it is none of this version.
    """
    found = _unpack(payload)
    return StatusReply(
        block_size=found.take("block_size", int),
        distinct_blocks=found.take("distinct_blocks", int),
        batches_waiting=found.take("batches_waiting", int),
        unsized_holders=found.take("unsized_holders", int, 0),
        holders=found.several("holders", _holder_status),
        gathered=found.optional("gathered", _gathered),
        behind_us=found.take("behind_us", int, 0),
        fields=found.fields,
        refused_holders=found.take("refused_holders", int, 0),
        unheard_holders=found.take("unheard_holders", int, 0),
    )
