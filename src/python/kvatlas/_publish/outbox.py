"""Numbers batches, keeps what daemons may ask for, and answers them. No I/O."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import msgpack

from ..errors import refusal
from ..events import (
    PROTOCOL_VERSION,
    Cleared,
    Cursor,
    Doubted,
    Event,
    Goodbye,
    Tier,
    encode_batch,
    event_bytes,
    events_bytes,
)
from ..hashing import U64_MAX
from ..profile import Profile
from .options import PublisherOptions
from .ring import Ring
from .table import BlockTable

RISE: Final = 60.0
"""For so many seconds a publisher is new, and so long it waits before it puts its epoch above another one again."""

SKEW_US: Final = 5_000_000
"""Clocks of several machines may differ by so many microseconds. A publisher that is not new any more takes no heed of less."""

_AHEAD_US: Final = 86_400_000_000
"""By so many microseconds an epoch may lie ahead of the clock: a day. By default, daemons drop batches of epochs further ahead."""

_SET_US: Final = 1_767_225_600_000_000
"""The year 2026 in microseconds. A clock before that has not been set, so nothing is known to lie ahead of it."""

CHUNK_BATCHES_MAX: Final = 1024
"""Most batches in one chunk of an answer."""


_OVERHEAD: Final = 16 << 10
"""What a chunk or batch may take beside what is counted."""


def room_of(message_bytes_max: int) -> int:
    """How many bytes of batches fit into a message of a server that takes so many bytes."""
    return max(message_bytes_max - min(_OVERHEAD, message_bytes_max // 2), 1)


class Clocks(NamedTuple):
    """The time: seconds on a clock that does not run backwards, and microseconds since the Unix epoch."""

    monotonic: float
    unix_us: int


def present_clocks() -> Clocks:
    """The present time."""
    return Clocks(time.monotonic(), time.time_ns() // 1000)


def is_far_ahead(known: int, unix_us: int) -> bool:
    """Whether daemons would drop the batches of an epoch above this one, because it lies too far ahead of the clock."""
    return unix_us >= _SET_US and known > unix_us + _AHEAD_US


@dataclass(frozen=True, slots=True)
class SealedBatch:
    """A batch that can be sent."""

    cursor: Cursor
    payload: bytes
    is_heartbeat: bool


@dataclass(frozen=True, slots=True)
class ResyncRequest:
    """A daemon's question: what has come after ``cursor``?"""

    rank: int
    cursor: Cursor
    full: bool

    @classmethod
    def decode(cls, payload: bytes) -> ResyncRequest:
        """Reads a request.

        :raises RefusedError: with the number that the contract has for what is wrong.
        """
        try:
            fields = msgpack.unpackb(payload, max_map_len=64)
        except (ValueError, TypeError, msgpack.UnpackException):
            raise refusal(400, "the request is not one MessagePack map") from None
        if not isinstance(fields, dict):
            raise refusal(400, "the request is no map")
        if fields.get("v", 1) != PROTOCOL_VERSION:
            raise refusal(505, "another version of the contract is not spoken here; send v = 1")
        rank, full = fields.get("rank", 0), fields.get("full", False)
        numbers = (rank, fields.get("epoch"), fields.get("seq"))
        if not all(type(number) is int and number >= 0 for number in numbers) or type(full) is not bool:
            raise refusal(
                400, "the request needs numbers for rank, epoch and seq, and true or false for full"
            )
        return cls(rank, Cursor(fields["epoch"], fields["seq"]), full)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, as the payloads of its chunks."""

    kind: Literal["missing", "full"]
    chunks: list[bytes]


@dataclass(slots=True)
class _OpenBatch:
    """Events that wait for others to share a batch with."""

    tier: int
    events: list[Event]
    size: int


class Outbox:
    """What a publisher knows of one holder."""

    def __init__(self, options: PublisherOptions, rank: int, clocks: Clocks) -> None:
        self.options = options
        self.rank = rank
        self._room: float = float("inf")
        if options.after is not None:
            self.cursor = options.after
        else:
            self.cursor = Cursor(clocks.unix_us if options.epoch is None else options.epoch, 0)
        knows_blocks = options.after is None or options.after.seq == 0
        self.table = self._empty_table() if knows_blocks else None
        self._ring = self._ring_after(self.cursor.seq)
        self._made_us = -1
        self._open: _OpenBatch | None = None
        self._numbered = float("-inf")
        self._new_until = clocks.monotonic + RISE
        self._risen = float("-inf")
        self._doubts: Sequence[str] = ()
        self._profile = options.profile
        self._owes_profile = True
        self._has_told_profile = False
        self._has_left = False

    def _empty_table(self) -> BlockTable | None:
        return BlockTable(self.options.block_size, self.options.hashing) if self.options.answers_resyncs else None

    def _ring_after(self, seq: int) -> Ring:
        batches_max = self.options.ring_batches_max if self.options.answers_resyncs else 0
        return Ring(seq, batches_max, self.options.ring_bytes_max)

    def note_server_limit(self, message_bytes_max: int) -> None:
        """The server takes messages of so many bytes now. Answers keep to it, and calls share a batch within it."""
        self._room = room_of(message_bytes_max)

    @property
    def _chunk_bytes_max(self) -> float:
        return min(self.options.chunk_bytes_max, self._room)

    @property
    def _batch_bytes_max(self) -> float:
        return min(self.options.batch_bytes_max, self._room)

    def add(self, tier: int, events: Sequence[Event], clocks: Clocks) -> list[SealedBatch]:
        """Takes the events of one call. Returns the batches that are full, or must not wait."""
        size = events_bytes(events)
        sealed: list[SealedBatch] = []
        held = self._open
        if held is not None and (
            held.tier != tier
            or len(held.events) + len(events) > self.options.batch_events_max
            or held.size + size > self._batch_bytes_max
        ):
            sealed += self.seal(clocks)
        if self._open is None:
            self._open = _OpenBatch(tier, [], 0)
        self._open.events += events
        self._open.size += size
        # What is last is not kept waiting, and nothing may come behind it in its batch.
        is_urgent = not events or any(isinstance(event, Goodbye | Doubted) for event in events)
        if is_urgent or self.options.batch_delay == 0:
            sealed += self.seal(clocks)
        return sealed

    def due(self) -> float | None:
        """When the open batch has to go: a delay after the batch before it, which after a pause is at once."""
        return None if self._open is None else self._numbered + self.options.batch_delay

    def seal(self, clocks: Clocks) -> list[SealedBatch]:
        """Closes the open batch, if there is one. It becomes several where the server takes less than when its calls came."""
        if self._open is None:
            return []
        held, self._open = self._open, None
        if held.size <= self._batch_bytes_max:
            return [self._number(held.tier, held.events, clocks)]
        # Daemons apply each part on its own, and none is more certain than all together.
        doubt = [event for event in held.events[-1:] if isinstance(event, Doubted) and event.reasons]
        bytes_max = self._batch_bytes_max - sum(map(event_bytes, doubt))
        *parts, (_, rest) = self._shared([(held.tier, event) for event in held.events], bytes_max)
        sealed = [self._number(tier, [*events, *doubt], clocks) for tier, events in parts]
        return [*sealed, self._number(held.tier, rest, clocks)]

    def set_profile(self, profile: Profile, clocks: Clocks) -> list[SealedBatch]:
        """Tells another profile from now on, at once: behind the open batch, which has no room for it."""
        rest = self.seal(clocks)
        is_new, self._profile = profile != self._profile, profile
        self._owes_profile |= is_new
        return [*rest, *(self.heartbeat(clocks) if is_new else [])]

    @property
    def _tells_profile(self) -> bool:
        """Whether there is a profile to tell. One without anything takes back what was told before."""
        return self._has_told_profile or not self._profile.is_empty

    def _take_profile(self, repeats: bool) -> Profile | None:
        """What the next batch tells of the profile.

        Heartbeats, and batches that clear, repeat it, for daemons that have missed it and are not answered.
        """
        is_told = self._tells_profile and (repeats or self._owes_profile)
        self._owes_profile = False
        self._has_told_profile |= is_told
        return self._profile if is_told else None

    def heartbeat(self, clocks: Clocks) -> list[SealedBatch]:
        """A batch that only says that the holder lives and has missed nothing; none after a goodbye."""
        return [] if self._has_left else [self._number(Tier.DEVICE, [], clocks)]

    def _with_left_out(self, doubted: Doubted) -> Doubted:
        """What is doubted, and that blocks were left out of a full state that a daemon may have, if they were."""
        if self.table is None or not self.table.has_given_less:
            return doubted
        return Doubted([*doubted.reasons, "upstream_gap"])

    def _number(self, tier: int, events: list[Event], clocks: Clocks) -> SealedBatch:
        if self._has_left:
            self._come_back(clocks)
        self.cursor = Cursor(self.cursor.epoch, self.cursor.seq + 1)
        told, is_cleared = list[Event](), False
        for event in events:
            if isinstance(event, Doubted):
                self._doubts = event.reasons
                # What is doubted now replaces what a full state has said: that it is not all stays.
                told.append(event if is_cleared else self._with_left_out(event))
                continue
            if isinstance(event, Cleared | Goodbye):
                self._doubts, is_cleared = (), True
            told.append(event)
        events = told
        # Times grow, also where the clock is set back.
        self._made_us = max(clocks.unix_us, self._made_us + 1)
        self._numbered = clocks.monotonic
        profile = self._take_profile(not events or any(isinstance(event, Cleared) for event in events))
        payload = self._encode(self.cursor, events, tier, self._made_us, profile)
        self._ring.push(payload)
        self._has_left = any(isinstance(event, Goodbye) for event in events)
        if self.table is not None:
            for event in events:
                self.table.apply(event, tier, clocks.monotonic)
        return SealedBatch(self.cursor, payload, not events)

    def _encode(
        self,
        cursor: Cursor,
        events: Sequence[Event],
        tier: int = Tier.DEVICE,
        time_us: int | None = None,
        profile: Profile | None = None,
    ) -> bytes:
        size = self.options.block_size
        return encode_batch(
            cursor, self.rank, events, tier=tier, block_size=size, time_us=time_us, profile=profile
        )

    def rise_above(self, known: int, clocks: Clocks) -> bool:
        """Begins an epoch above the one that a daemon knows, with all that the holder has. Says whether it did.

        The clock of an earlier process was ahead, and daemons take this one for its predecessor. The epoch's first number is
        skipped: daemons that are not answered now learn from the gap that there is more to ask for.

        Nothing is done where the blocks of earlier batches are not known, where the other epoch has begun by the clock, so that
        a younger process may have replaced this one, where it lies so far ahead that daemons would drop all batches, or where
        the last time was less than a minute ago: two that live would outdo each other without end.
        """
        is_older = self.table is None or self._has_left
        tolerated = SKEW_US if clocks.monotonic > self._new_until else 0
        has_begun = known <= clocks.unix_us + tolerated
        is_too_soon = clocks.monotonic - self._risen < RISE
        is_above = self.cursor.epoch < known < U64_MAX
        if not is_above or is_older or has_begun or is_too_soon or is_far_ahead(known, clocks.unix_us):
            return False
        self._risen = clocks.monotonic
        self.cursor = Cursor(max(clocks.unix_us, known + 1), 1)
        self._made_us = max(clocks.unix_us, self._made_us)
        self._ring = self._ring_after(1)
        self._owes_profile = True
        return True

    def begin_epoch(self, clocks: Clocks, doubts: Sequence[str] = ()) -> list[SealedBatch]:
        """Begins a new epoch, in which the holder has nothing, and says so, and what is doubted of that.

        What waits in the open batch belongs to the old one.
        """
        rest = self.seal(clocks)
        self._come_back(clocks)
        doubted: list[Event] = [Doubted(doubts)] if doubts else []
        return [*rest, self._number(Tier.DEVICE, doubted, clocks)]

    def _come_back(self, clocks: Clocks) -> None:
        """Daemons have forgotten the holder, its numbers included, or are to forget it: it begins anew."""
        self.cursor = Cursor(max(clocks.unix_us, min(self.cursor.epoch + 1, U64_MAX)), 0)
        self._ring = self._ring_after(0)
        # Whatever was not known of earlier batches, there is nothing now.
        self.table = self._empty_table()
        self._doubts = ()
        self._owes_profile, self._has_told_profile = True, False
        self._has_left = False

    def answer(self, request: ResyncRequest, clocks: Clocks) -> Answer:
        """Answers a daemon: from the ring where that is enough and the server takes it, else with the full state.

        :raises RefusedError: where the publisher cannot help just now.
        """
        return self.missing(request) or self.full(clocks)

    def missing(self, request: ResyncRequest) -> Answer | None:
        """The batches that a daemon misses; none where it needs the full state.

        :raises RefusedError: where another rank is asked.
        """
        if request.rank != self.rank:
            raise refusal(400, f"this publisher is for rank {self.rank}")
        if not request.full and request.cursor.epoch == self.cursor.epoch:
            batches = self._ring.after(request.cursor.seq)
            if batches is not None and all(len(batch) <= self._room for batch in batches):
                return self._answer("missing", batches)
        return None

    def full(self, clocks: Clocks) -> Answer:
        """The full state, which answers all who ask now.

        :raises RefusedError: where the publisher cannot help just now.
        """
        return self._answer("full", self._full_state(clocks))

    def _full_state(self, clocks: Clocks) -> list[bytes]:
        if self.table is None:
            raise refusal(
                503, "this publisher took up an epoch of another one and does not know the full state"
            )
        self.table.expire(clocks.monotonic)
        state = self.table.state(clocks.monotonic, self._chunk_bytes_max)
        if state is None:
            raise refusal(503, "stored blocks wait for their parent; ask again when they have it")
        # A state from before the first batch is empty, but a number of 0 is none.
        cursor = Cursor(self.cursor.epoch, max(self.cursor.seq, 1))
        batches = [self._encode(cursor, events, tier) for tier, events in self._shared(state, self._chunk_bytes_max)]
        if self._tells_profile:
            batches.append(self._encode(cursor, [], profile=self._profile))
        doubts = [*self._doubts, "upstream_gap"] if self.table.is_short else self._doubts
        if doubts:
            batches.append(self._encode(cursor, [Doubted(doubts)]))
        return batches

    def _shared(self, told: Iterable[tuple[int, Event]], bytes_max: float) -> Iterator[tuple[int, list[Event]]]:
        """Events by the batches that they share. A doubt stays with the event before it."""
        events_max = self.options.batch_events_max
        tier, events, size = int(Tier.DEVICE), list[Event](), 0
        for event_tier, event in told:
            more = event_bytes(event)
            is_full = len(events) >= events_max or size + more > bytes_max
            if events and (tier != event_tier or (is_full and not isinstance(event, Doubted))):
                yield tier, events
                events, size = [], 0
            tier = event_tier
            events.append(event)
            size += more
        if events:
            yield tier, events

    def _answer(self, kind: Literal["missing", "full"], batches: Iterable[bytes]) -> Answer:
        groups = self._groups(batches)
        entries: dict[str, Any] = {
            "v": PROTOCOL_VERSION,
            "rank": self.rank,
            "epoch": self.cursor.epoch,
            "seq": self.cursor.seq,
            "kind": kind,
        }
        if self._made_us >= 0:
            entries["time_us"] = self._made_us
        if kind == "full" and self.options.hashing == "recompute":
            entries["recomputed_block_size"] = self.options.block_size
        last = len(groups) - 1
        chunks = [
            msgpack.packb(entries | {"chunk": number, "last": number == last, "batches": group})
            for number, group in enumerate(groups)
        ]
        return Answer(kind, chunks)

    def _groups(self, batches: Iterable[bytes]) -> list[list[bytes]]:
        """Spreads batches over chunks; there is always one chunk at least, which has the cursor."""
        groups: list[list[bytes]] = [[]]
        size = 0
        for batch in batches:
            group = groups[-1]
            is_full = size + len(batch) > self._chunk_bytes_max or len(group) >= CHUNK_BATCHES_MAX
            if group and is_full:
                groups.append([])
                size = 0
            size += len(batch)
            groups[-1].append(batch)
        return groups
