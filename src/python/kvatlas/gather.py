"""Requests that every shard answers, and one answer out of theirs.

Every holder belongs to one shard, so lists of holders are joined, put into the order of the contract, and only then cut to the
limit: the best ``limit`` of all are among the best ``limit`` of each.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Final, TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg

from ._connection import LOOK_INTERVAL, NOBODY_INTERVAL, Again
from .errors import (
    NoDaemonError,
    RefusedError,
    TimedOutError,
    UndecodableError,
    UnknownNamespaceError,
    refusal,
)
from .queries import Query
from .wire import ERROR_CODE_HEADER, ERROR_HEADER, Gathered, QueryReply, StatusReply

SHARD_HEADER: Final = "Kvatlas-Shard"
"""Header of every reply of a sharded daemon: which shard it is, and of how many."""

SHARDS_MAX: Final = 256
_BUSY: Final = (429, 503)
"""Errors of a daemon that cannot answer just now, and may a moment later."""
PREDICTED_MAX: Final = 64
"""Predicted holders in a reply, at most."""
REPLIES_MAX: Final = 4 * SHARDS_MAX
"""Replies that wait for one request, and that are kept, at most."""
REPLY_BYTES_MAX: Final = 64 << 20
"""Bytes of the replies to one request that are kept, at most."""

_T = TypeVar("_T")
_SHARD: Final = re.compile(r"(\d{1,3})/(\d{1,3})")


def refusal_of(message: Msg) -> RefusedError | None:
    """The error that a reply's headers carry, if any."""
    headers = message.headers or {}
    code = headers.get(ERROR_CODE_HEADER)
    if code is None:
        return None
    return refusal(int(code) if code.isdecimal() else 0, headers.get(ERROR_HEADER, ""))


def _shard_of(message: Msg) -> tuple[int, int] | None:
    """Index and number of shards that a reply says it comes from."""
    found = _SHARD.fullmatch((message.headers or {}).get(SHARD_HEADER, ""))
    if found is None:
        return None
    index, count = int(found[1]), int(found[2])
    return (index, count) if index < count <= SHARDS_MAX else None


class _Division:
    """Replies of the shards of one division, by the shard's index, and how many of them are of which use."""

    def __init__(self) -> None:
        self.replies: dict[int, Msg] = {}
        self.answers = 0
        self.useful = 0
        """Replies that are no refusals: answers, and those of shards that do not know the namespace."""

    def add(self, index: int, reply: Msg) -> None:
        refused = refusal_of(reply)
        is_useful = refused is None or refused.code not in _BUSY
        self.replies[index] = reply
        self.useful += is_useful
        self.answers += is_useful and not isinstance(refused, UnknownNamespaceError)


class Collection:
    """Replies as they come in, by the division of the workers that they belong to.

    Whoever sees the request can reply for any number of shards, so what is kept is bounded.

    :param expected: the division that gave the last whole answer, by its number of shards; it counts as heard of.
    """

    def __init__(self, bytes_max: int = REPLY_BYTES_MAX, expected: int | None = None) -> None:
        self._divisions: dict[int, _Division] = {}
        self._expected = expected
        self._replies_left = REPLIES_MAX
        self._bytes_left = bytes_max

    def add(self, shard: tuple[int, int], reply: Msg) -> bool:
        """Adds a reply; says whether that was the last one.

        It is if its division is whole, if all shards of all divisions that were heard of have replied, or if there is no room
        for it. Of two replies of one shard the first is kept.
        """
        index, count = shard
        division = self._divisions.get(count, _Division())
        if index not in division.replies:
            if self._replies_left == 0 or self._bytes_left < len(reply.data):
                return True
            self._replies_left -= 1
            self._bytes_left -= len(reply.data)
            self._divisions.setdefault(count, division).add(index, reply)
        heard_of = {*self._divisions, self._expected} - {None}
        return self._is_whole(count) or all(map(self._has_replied, heard_of))

    def _has_replied(self, count: int | None) -> bool:
        """Whether all shards of a division have replied."""
        division = self._divisions.get(count or 0)
        return division is not None and len(division.replies) == count

    def _is_whole(self, count: int) -> bool:
        """Whether no shard of a division is missing or refuses, and one has an answer.

        The division that gave the last whole answer is believed that nobody knows the namespace.
        """
        division = self._divisions.get(count, _Division())
        return division.useful == count and (division.answers > 0 or self._expected == count)

    def expected_next(self) -> int | None:
        """The division that the next request is to expect: one that is whole, or the expected one if all its shards are there."""
        whole = next(filter(self._is_whole, self._divisions), None)
        return whole or (self._expected if self._has_replied(self._expected) else None)

    def best(self) -> tuple[int, dict[int, Msg]] | None:
        """The division with an answer of which the largest part does not refuse; of equals that of which the largest part has
        replied, and then that with more shards."""

        def worth(count: int) -> tuple[bool, float, float, int]:
            division = self._divisions[count]
            return division.answers > 0, division.useful / count, len(division.replies) / count, count

        best = max(self._divisions, key=worth, default=None)
        return None if best is None else (best, self._divisions[best].replies)


class Gatherer:
    """Asks all shards; knows which division of the workers gave the last whole answer."""

    def __init__(self, connection: Client) -> None:
        self._connection = connection
        self._answered_last: int | None = None

    async def gather(
        self, subject: str, payload: bytes, patience: float, decode: Callable[[bytes], _T]
    ) -> tuple[list[_T], Gathered]:
        """What the shards answer, and which did.

        :raises NoDaemonError: if no shard listens.
        :raises TimedOutError: if none answered in time.
        :raises RefusedError: if the shards refused, or those that did not answer may know better.
        """
        collection = Collection(expected=self._answered_last)
        await _collect(self._connection, subject, payload, patience, collection)
        self._answered_last = collection.expected_next()
        best = collection.best()
        if best is None:
            raise TimedOutError(subject, patience)
        return _sort_out(*best, decode)


async def _collect(
    connection: Client, subject: str, payload: bytes, patience: float, collection: Collection
) -> None:
    """Asks, and collects replies until the last one, or until the patience ends.

    Where nobody listens it asks again for a moment, on each link. It asks again on each new link, and after half of the patience: a link
    that is lost takes questions and answers with it.

    :raises NoDaemonError: if no shard listens, and none has replied.
    """
    deadline, again = time.monotonic() + patience, Again(connection, patience)
    inbox = connection.new_inbox()
    replies = await connection.subscribe(inbox, pending_msgs_limit=REPLIES_MAX)
    try:
        await connection.publish(subject, payload, reply=inbox)
        while (left := deadline - time.monotonic()) > 0:
            if again.is_due():
                await connection.publish(subject, payload, reply=inbox)
            try:
                reply = await replies.next_msg(min(left, LOOK_INTERVAL))
            except asyncio.TimeoutError:
                continue
            if (reply.headers or {}).get("Status") == "503":
                if not again.is_due_for_nobody():
                    if collection.best() is not None:
                        break
                    raise NoDaemonError(subject)
                await asyncio.sleep(NOBODY_INTERVAL)
                await connection.publish(subject, payload, reply=inbox)
                continue
            shard = _shard_of(reply)
            if shard is not None and collection.add(shard, reply):
                break
    finally:
        await replies.unsubscribe()


def _sort_out(
    shards: int, replies: dict[int, Msg], decode: Callable[[bytes], _T]
) -> tuple[list[_T], Gathered]:
    """The answers of those that know the namespace. A shard whose reply is of no use counts as missing."""
    known: list[_T] = []
    missing = set(range(shards))
    unknown: RefusedError | None = None
    for index, message in replies.items():
        refused = refusal_of(message)
        if refused is not None and refused.code in _BUSY:
            continue
        if refused is None:
            try:
                known.append(decode(message.data))
            except UndecodableError:
                continue
        elif isinstance(refused, UnknownNamespaceError):
            unknown = refused
        else:
            raise refused
        missing.discard(index)
    gathered = Gathered(shards, tuple(sorted(missing)))
    if known:
        return known, gathered
    if missing or unknown is None:
        raise refusal(
            503,
            f"no shard that answered has heard of the namespace, and {_in_words(gathered)} did not answer; ask again",
        )
    raise unknown


def _in_words(gathered: Gathered) -> str:
    """The shards that are missing: ``shard 2 of 3``, or ``shards 0 and 2 of 3``."""
    if not gathered.missing:
        return f"no shard of {gathered.shards}"
    *others, last = map(str, gathered.missing)
    if not others:
        return f"shard {last} of {gathered.shards}"
    return f"shards {', '.join(others)} and {last} of {gathered.shards}"


def _agreed(what: str, one: object, other: object) -> None:
    if one != other:
        text = f"the shards disagree on {what}; configure the namespace alike on all of them"
        raise refusal(503, text)


def merge_replies(replies: Sequence[QueryReply], query: Query, gathered: Gathered) -> QueryReply:
    """One answer to one query."""

    def join(merged: QueryReply, more: QueryReply) -> QueryReply:
        # An older shard does not tell the block size.
        size = merged.block_size or more.block_size
        _agreed(
            "how many tokens a block has",
            (merged.query_blocks, size),
            (more.query_blocks, more.block_size or size),
        )
        return replace(
            merged,
            block_size=size,
            holders=merged.holders + more.holders,
            holders_total=merged.holders_total + more.holders_total,
            foreign_holders=merged.foreign_holders + more.foreign_holders,
            doubtful_holders=merged.doubtful_holders + more.doubtful_holders,
            behind_us=max(merged.behind_us, more.behind_us),
            predicted=merged.predicted + more.predicted,
        )

    merged = reduce(join, replies)
    ordered = sorted(
        merged.holders,
        key=lambda found: (
            -found.usable_blocks,
            -found.matched_blocks,
            -found.matched_blocks_max,
            found.worker,
            found.rank,
        ),
    )
    listed = ordered[: query.limit]
    predicted = sorted(merged.predicted, key=lambda found: (-found.blocks, found.worker, found.rank))
    cut = sum(not found.exact for found in ordered[len(listed) :])
    return replace(
        merged,
        holders=tuple(listed),
        doubtful_holders=merged.doubtful_holders + cut,
        gathered=gathered,
        predicted=tuple(predicted[:PREDICTED_MAX]),
    )


def merge_results(
    lists: Sequence[tuple[QueryReply | RefusedError, ...]], queries: Sequence[Query], gathered: Gathered
) -> tuple[QueryReply | RefusedError, ...]:
    """One answer to several queries, each merged by itself."""
    for results in lists:
        _agreed("how many queries were asked", len(results), len(queries))
    return tuple(
        _merge_result([results[number] for results in lists], query, gathered)
        for number, query in enumerate(queries)
    )


def _merge_result(
    results: Sequence[QueryReply | RefusedError], query: Query, gathered: Gathered
) -> QueryReply | RefusedError:
    replies = []
    for result in results:
        if isinstance(result, RefusedError):
            return result
        replies.append(result)
    try:
        return merge_replies(replies, query, gathered)
    except RefusedError as disagreement:
        return disagreement


def merge_statuses(statuses: Sequence[StatusReply], gathered: Gathered) -> StatusReply:
    """One status. A block that several shards know is counted by each."""

    def join(merged: StatusReply, more: StatusReply) -> StatusReply:
        _agreed("how many tokens a block has", merged.block_size, more.block_size)
        return replace(
            merged,
            holders=merged.holders + more.holders,
            distinct_blocks=merged.distinct_blocks + more.distinct_blocks,
            batches_waiting=merged.batches_waiting + more.batches_waiting,
            unsized_holders=merged.unsized_holders + more.unsized_holders,
            refused_holders=merged.refused_holders + more.refused_holders,
            unheard_holders=merged.unheard_holders + more.unheard_holders,
            behind_us=max(merged.behind_us, more.behind_us),
        )

    merged = reduce(join, statuses)
    ordered = sorted(merged.holders, key=lambda found: (found.worker, found.rank))
    return replace(merged, holders=tuple(ordered), gathered=gathered)
