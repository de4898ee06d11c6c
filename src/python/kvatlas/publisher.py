"""The publisher: what an engine, or a sidecar beside it, needs to keep daemons exact about one holder.

A :class:`Publisher` numbers batches without a gap within an epoch, and keeps what it takes to make good what is lost on the way:
a *ring* of the last batches, and a *block table* of all that the holder has. When a daemon misses something it asks, and is given
the missing batches from the ring or the full state from the table. Heartbeats show daemons that nothing was lost, and that the
holder lives.

.. code-block:: text

    publish ──▶ bounded queue ──▶ open batch ──▶ ring, table ──▶ NATS
      waits, or is refused         (count, bytes,
      where there is no room         delay)
                                 daemon ──▶ resync subject ──▶ ring or table ──▶ chunks

The full state is made at once, so that it is one state: about two seconds for a million blocks, in which the event loop does
nothing else. One is made for all daemons that wait for it. Where an engine holds that many, give the publisher a process or a thread with a loop of its own.

An event that the queue has taken is published in order, exactly once, unless the process dies: then the next incarnation begins a
new epoch, and replaces all that the last one said.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, TypeAlias

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from ._checks import all_of, check_type, unsigned, whole
from ._connection import Refusal, confirm, error_of, link_of, refusals_of, unless_refused
from ._publish.answering import Answering
from ._publish.calls import BeginEpoch, CallQueue, Command, Flush, Flushed, Heartbeats, Leave, Publish, SetProfile
from ._publish.counters import PublisherCounters
from ._publish.options import Acknowledged, PublisherOptions
from ._publish.outbox import Outbox, SealedBatch, present_clocks, room_of
from .errors import (
    BatchTooLargeError,
    ConnectionFailedError,
    InvalidValueError,
    NotPermittedError,
    NotSentError,
    QueueFullError,
    StoppedError,
    TooManyEventsError,
)
from .events import (
    Cleared,
    Cursor,
    Doubted,
    Event,
    Goodbye,
    Removed,
    Resumable,
    Stored,
    StoredByLineage,
    Tier,
    events_bytes,
)
from .models import DEFAULT_TENANT, namespace_of
from .profile import Profile
from .subjects import PREFIX, Subjects

_LOG: Final = logging.getLogger("kvatlas.publisher")

_PAUSE: Final = 0.05
"""Pause while the connection takes nothing, and before a batch that was not acknowledged is sent again."""

PATIENCE: Final = 10.0
"""Seconds that a call waits for NATS which is given no other patience."""

_UNSUBSCRIBE_PATIENCE: Final = 1.0
"""Seconds that the end of the subscription to questions may take."""

_QUESTIONS_MAX: Final = 64
"""Questions that wait in the subscription, at most. Daemons ask again."""

Events: TypeAlias = Event | Iterable[Event]


class Publisher:
    """Publishes for one holder, and answers daemons that miss something.

    Leaving the ``async with`` block says goodbye; leaving it by an exception, and :meth:`aclose`, end in silence, as if the engine
    had died: daemons keep the blocks until the holder counts as gone.
    """

    def __init__(self, connection: Client, subject: str, rank: int, options: PublisherOptions) -> None:
        """For :meth:`start`, which also subscribes to questions."""
        self._nats = connection
        self._subject = subject
        self._options = options
        self._outbox = Outbox(options, rank, present_clocks())
        self._queue = CallQueue(options.queue_batches_max, options.queue_bytes_max)
        self._heartbeat_at = time.monotonic() + options.heartbeat_interval
        self._beats = True
        self._sent = self._outbox.cursor
        self._failure: str | None = None
        # The link to which the first events were handed that no flush has confirmed.
        self._link: int | None = None
        self._refusal: Refusal | None = None
        self._asked = ""
        self._stopped = False
        self._fault: Exception | None = None
        self._has_end = False
        self._is_over = False
        self._questions: Subscription | None = None
        self._task: asyncio.Task[None] | None = None
        self._endings: set[asyncio.Task[None]] = set()
        self.counters = PublisherCounters()
        self._answering = Answering(connection, subject, self._outbox, self.counters, self._beat)
        refusals_of(connection).hear(self._hear)

    @classmethod
    async def start(
        cls,
        connection: Client,
        namespace: str | None = None,
        worker: str = "",
        rank: int = 0,
        options: PublisherOptions | None = None,
        *,
        model: str | None = None,
        tenant: str = DEFAULT_TENANT,
        prefix: str = PREFIX,
    ) -> Publisher:
        """Starts to publish on ``connection``, which stays the caller's.

        :param model: instead of a namespace: the name under which the model is served, for ``tenant``.
        :raises InvalidValueError: for a name that is none.
        :raises ConnectionFailedError: if the connection is closed, so that no questions can be received.
        """
        rank = unsigned(rank, "rank", 32)
        subjects, namespace = Subjects(prefix), namespace_of(namespace, model, tenant)
        given = PublisherOptions() if options is None else options
        check_type(given, PublisherOptions, "options")
        room = room_of(connection.max_payload)
        given = replace(given, batch_bytes_max=min(given.batch_bytes_max, room))
        publisher = cls(connection, subjects.events(namespace, worker), rank, given)
        if given.answers_resyncs:
            try:
                await publisher._listen(subjects.resync(namespace, worker, rank))
            except BaseException:
                refusals_of(connection).unhear(publisher._hear)
                raise
        publisher._task = asyncio.create_task(publisher._run(), name=f"kvatlas publisher {worker}/{rank}")
        return publisher

    async def _listen(self, subject: str) -> None:
        self._asked = subject
        try:
            self._questions = await self._nats.subscribe(
                subject, cb=self._answering.take, pending_msgs_limit=_QUESTIONS_MAX
            )
        except nats.errors.Error as error:
            raise ConnectionFailedError(f"NATS: {error}") from error

    async def __aenter__(self) -> Publisher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is None and not self._stopped:
            await self.say_goodbye()
        else:
            await self.aclose()

    @property
    def cursor(self) -> Cursor:
        """The last batch sent."""
        return self._sent

    # What the engine calls.

    async def publish(self, events: Events = (), *, tier: int = Tier.DEVICE) -> None:
        """Publishes events, in order; without any, a heartbeat. Waits while the queue is full.

        :raises PublisherError: :class:`BatchTooLargeError`, :class:`TooManyEventsError` or :class:`StoppedError`;
            :class:`NotSentError` once the connection is closed.
        """
        call = self._checked(events, tier)
        if self._queue.full():
            self.counters.queue_waits += 1
        await self._put(call)

    def try_publish(self, events: Events = (), *, tier: int = Tier.DEVICE) -> None:
        """As :meth:`publish`, but fails while the queue is full: for an engine that must not wait.

        The engine has to take note of what it could not say, and to say it later.

        :raises QueueFullError: and those of :meth:`publish`.
        """
        call = self._checked(events, tier)
        try:
            self._queue.put_nowait(call)
        except asyncio.QueueFull:
            self.counters.queue_refusals += 1
            raise QueueFullError(self._options.queue_batches_max, self._options.queue_bytes_max) from None

    async def begin_epoch(self) -> None:
        """Publishes what is queued, and begins a new epoch: daemons forget all that the holder had.

        For a relay whose engine has restarted.

        :raises StoppedError: if the publisher has stopped.
        """
        await self.begin_epoch_in_doubt(())

    async def begin_epoch_in_doubt(self, doubts: Sequence[str]) -> None:
        """As :meth:`begin_epoch`, and doubts from the first batch on what it tells: no daemon finds the holder exact in between.

        :param doubts: out of :data:`DOUBTS`, as in :class:`Doubted`.
        :raises InvalidValueError: if one is none.
        :raises StoppedError: if the publisher has stopped.
        """
        await self._put(BeginEpoch(Doubted(doubts).reasons))

    async def set_profile(self, profile: Profile) -> None:
        """Publishes what is queued, and tells daemons another address and other labels of the holder.

        :raises InvalidValueError: if it is no profile.
        :raises StoppedError: if the publisher has stopped.
        """
        check_type(profile, Profile, "profile")
        await self._put(SetProfile(profile))

    async def set_heartbeats(self, are_sent: bool) -> None:
        """Says whether heartbeats are sent while there is nothing to publish. They are at first.

        For a relay that hears nothing of its engine: without them, daemons find the holder stale.

        :raises StoppedError: if the publisher has stopped.
        """
        await self._put(Heartbeats(are_sent))

    async def flush(self, patience: float = PATIENCE) -> Cursor:
        """Waits until the server has taken everything, and returns the last batch then.

        :raises NotSentError: if a batch could not be sent since the last call, if the server refused one or the subscription to
            questions, if it has not taken everything within ``patience`` seconds, or if the connection was lost and made anew since
            the last call: what was published before that may not have arrived. Daemons ask for it while the publisher goes on.
        :raises StoppedError: if the publisher has stopped.
        """
        return await self._confirmed(Flush, patience)

    async def _confirmed(self, kind: type[Flush], patience: float) -> Cursor:
        deadline = time.monotonic() + patience
        try:
            flushed = await asyncio.wait_for(self._handed_over(kind), patience)
        except asyncio.TimeoutError:
            raise NotSentError(f"NATS: what is queued has not left within {patience} s") from None
        try:
            await confirm(self._nats, deadline - time.monotonic())
        except BaseException:
            self._keep(flushed)
            raise
        refusal, self._refusal = self._refusal, None
        failure = flushed.failure
        if failure is None and refusal is not None:
            failure = f"{refusal.words}; give the user the right to it"
        if failure is None and flushed.link not in (None, link_of(self._nats)):
            failure = "the connection was lost after events were handed to it; they may not have arrived"
        if failure is not None:
            raise NotSentError(f"NATS: {failure}")
        return flushed.cursor

    async def _handed_over(self, kind: type[Flush]) -> Flushed:
        """Waits until NATS has been handed all calls before."""
        if self._task is None:
            raise StoppedError(self._fault)
        done: asyncio.Future[Flushed] = asyncio.get_running_loop().create_future()
        try:
            await self._put(kind(done))
            either: tuple[asyncio.Future[Any], ...] = (done, self._task)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise StoppedError(self._fault)
            return done.result()
        except asyncio.CancelledError:
            if done.done() and not done.cancelled() and done.exception() is None:
                self._keep(done.result())
            raise
        finally:
            # What nobody waits for takes no failure away.
            done.cancel()

    def _keep(self, flushed: Flushed) -> None:
        """Keeps for the next flush what the caller of this one does not hear of."""
        self._failure = self._failure or flushed.failure
        self._link = self._link if flushed.link is None else flushed.link

    async def say_goodbye(self, patience: float = PATIENCE) -> None:
        """Publishes what is queued and a goodbye, so that daemons forget the holder at once, and ends.

        Calls beside it fail from the moment on at which the goodbye is queued.

        :raises PublisherError: as :meth:`flush`. A connection that was lost before the goodbye makes no difference.
        """
        deadline = time.monotonic() + patience
        try:
            await self._confirmed(Leave, patience)
        finally:
            await self.aclose(max(deadline - time.monotonic(), _PAUSE))

    async def aclose(self, patience: float = PATIENCE) -> None:
        """Publishes what is queued, and ends in silence. What NATS has not taken after ``patience`` seconds is dropped.

        A call that is cancelled drops it at once.
        """
        is_first, self._stopped = not self._endings, True
        ending = asyncio.create_task(self._end(patience if is_first else 0))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            # The rest of the end needs nobody to wait for it.
            self._give_up()
            raise

    async def _end(self, patience: float) -> None:
        if patience:
            try:
                await asyncio.wait_for(self._drain(), patience)
            except asyncio.TimeoutError:
                pass
        self._give_up()
        while self._task is not None and not self._task.done():
            # The client of NATS swallows it now and then.
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_PAUSE)
        if self.counters.calls_dropped:
            _LOG.warning("closed with %d calls not published", self.counters.calls_dropped)
        refusals_of(self._nats).unhear(self._hear)
        if self._questions is not None:
            questions, self._questions = self._questions, None
            if not self._nats.is_closed:
                await error_of(questions.unsubscribe(), _UNSUBSCRIBE_PATIENCE)
        self._answering.end()

    def _give_up(self) -> None:
        """Has nothing sent any more."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()

    async def _drain(self) -> None:
        if self._task is not None and not self._task.done():
            if not self._has_end:
                await self._queue.put(None)
                self._has_end = True
            await asyncio.wait([self._task])

    def _checked(self, events: Events, tier: int) -> Publish:
        if self._stopped:
            raise StoppedError(self._fault)
        if self._nats.is_closed:
            raise NotSentError("NATS: the connection is closed; connect anew, and start another publisher")
        listed = [events] if isinstance(events, _EVENT_TYPES) else all_of(events, _EVENT_TYPES, "events")
        tier = whole(tier, "tier")
        if not 0 <= tier < len(Tier):
            raise InvalidValueError(f"there is no tier {tier}; tiers are numbered from 0 to {len(Tier) - 1}")
        size, size_max = events_bytes(listed), self._options.batch_bytes_max
        if size > size_max:
            raise BatchTooLargeError(size, size_max)
        if len(listed) > self._options.batch_events_max:
            raise TooManyEventsError(len(listed), self._options.batch_events_max)
        return Publish(tier, listed, size)

    async def _put(self, command: Command) -> None:
        if self._stopped:
            raise StoppedError(self._fault)
        await self._queue.put(command)
        if self._task is not None and self._task.done():
            # Nobody reads it any more. Others may wait for the room that it takes.
            self._refuse_queued()
            raise StoppedError(self._fault)
        if self._has_end:
            # It stands behind the end, where nobody reads.
            raise StoppedError(self._fault)
        if isinstance(command, Leave):
            self._stopped = self._has_end = True

    # The task: the only one who sends batches.

    async def _run(self) -> None:
        try:
            while (command := await self._next()) is not None:
                await self._obey(command)
                if isinstance(command, Leave):
                    break
            await self._send_all(self._outbox.seal(present_clocks()))
        except Exception as error:
            self._fault = error
            self._answering.refuse_all()
            _LOG.exception("the publisher of %s has ended by an error", self._subject)
        finally:
            self._stopped = True
            self.counters.calls_dropped += self._refuse_queued()

    async def _obey(self, command: Command) -> None:
        # After a reconnect, the server may take smaller messages.
        self._outbox.note_server_limit(self._nats.max_payload)
        match command:
            case Leave():
                # Daemons that have the goodbye need nothing of before.
                self._link = None
                await self._send_all(self._outbox.add(Tier.DEVICE, [Goodbye()], present_clocks()))
                self._report(command)
            case Flush():
                await self._send_all(self._outbox.seal(present_clocks()))
                self._report(command)
            case BeginEpoch(doubts):
                await self._send_all(self._outbox.begin_epoch(present_clocks(), doubts))
            case SetProfile(profile):
                await self._send_all(self._outbox.set_profile(profile, present_clocks()))
            case Heartbeats(are_sent):
                self._beats = are_sent
            case Publish(tier, events):
                await self._send_all(self._outbox.add(tier, events, present_clocks()))

    async def _next(self) -> Command | None:
        """The next call; sends what falls due meanwhile."""
        while True:
            try:
                # What waits already shares a batch, as long as it has room.
                return self._queue.get_nowait()
            except asyncio.QueueEmpty:
                pass
            due = self._outbox.due()
            wake_at = self._heartbeat_at if due is None else min(due, self._heartbeat_at)
            wait = wake_at - time.monotonic()
            if wait > 0:
                try:
                    return await asyncio.wait_for(self._queue.get(), wait)
                except asyncio.TimeoutError:
                    continue
            clocks = present_clocks()
            self._outbox.note_server_limit(self._nats.max_payload)
            self._heartbeat_at = clocks.monotonic + self._options.heartbeat_interval
            sealed = self._outbox.seal(clocks)
            if not sealed and self._beats and not self._nats.is_closed:
                sealed = self._outbox.heartbeat(clocks)
            await self._send_all(sealed)

    def _report(self, flush: Flush) -> None:
        if not flush.done.done():
            flush.done.set_result(Flushed(self._outbox.cursor, self._failure, self._link))
            self._failure = self._link = None

    def _beat(self) -> None:
        """Has the next batch sent at once. Where there is no room in the queue, it comes without that."""
        if self._beats and not self._stopped and not self._queue.full():
            self._queue.put_nowait(Publish(Tier.DEVICE, [], 0))

    def _hear(self, refusal: Refusal) -> None:
        if refusal.is_of_message(self._subject):
            self.counters.batches_refused += 1
        elif not refusal.is_news or not refusal.is_of_subscription(self._asked):
            return
        self._refusal = refusal

    def _refuse_queued(self) -> int:
        """Empties the queue. Returns how many calls nobody has read; not those behind the end, which fail."""
        left: list[Command | None] = []
        while not self._queue.empty():
            command = self._queue.get_nowait()
            left.append(command)
            if isinstance(command, Flush) and not command.done.done():
                command.done.set_exception(StoppedError(self._fault))
        ends = [place for place, command in enumerate(left) if command is None or isinstance(command, Leave)]
        if ends:
            return ends[0] + (left[ends[0]] is not None)
        return 0 if self._has_end else len(left)

    async def _send_all(self, sealed: Iterable[SealedBatch]) -> None:
        for batch in sealed:
            try:
                await self._send(batch)
            except (nats.errors.Error, OSError, NotSentError) as error:
                self.counters.batches_failed += 1
                failed = self.counters.batches_failed
                # Each may fail from now on: the log must not fill up.
                if failed & (failed - 1) == 0:
                    _LOG.warning("batch %d of %s not sent, %d so far: %s", batch.cursor.seq, self._subject, failed, error)
                if self._failure is None:
                    self._failure = str(error)
            else:
                if batch.is_heartbeat:
                    self.counters.heartbeats_sent += 1
                else:
                    self.counters.batches_sent += 1
            self._sent = batch.cursor
            if self._is_over:
                raise asyncio.CancelledError
            self._heartbeat_at = time.monotonic() + self._options.heartbeat_interval

    async def _send(self, batch: SealedBatch) -> None:
        transport = self._options.transport
        if transport is None:
            while True:
                if self._link is None and not batch.is_heartbeat and self._nats.is_connected:
                    # Without a link, the client keeps it for the next one.
                    self._link = link_of(self._nats)
                try:
                    return await self._nats.publish(self._subject, batch.payload)
                except nats.errors.OutboundBufferLimitError:
                    # The connection is down and its buffer full: wait, so that the queue fills and pushes back.
                    await asyncio.sleep(_PAUSE)
        failure = "no attempt is allowed"
        for attempt in range(transport.attempts):
            if attempt:
                await asyncio.sleep(_PAUSE)
            try:
                return await self._send_acknowledged(batch, transport)
            except NotPermittedError as refused:
                raise NotSentError(str(refused)) from None
            except asyncio.TimeoutError:
                failure = f"nothing acknowledges within {transport.timeout} s"
            except (nats.errors.Error, NotSentError) as error:
                failure = str(error)
        raise NotSentError(failure)

    async def _send_acknowledged(self, batch: SealedBatch, transport: Acknowledged) -> None:
        # The id is the same for every attempt, so that the stream keeps one of them.
        identity = f"{self._subject}/{self._outbox.rank}/{batch.cursor.epoch}/{batch.cursor.seq}"
        asking = self._nats.request(
            self._subject, batch.payload, timeout=transport.timeout, headers={"Nats-Msg-Id": identity}
        )
        reply = await unless_refused(self._nats, self._subject, asking, transport.timeout)
        try:
            acknowledgement = json.loads(reply.data)
            error = acknowledgement.get("error")
        except (ValueError, AttributeError) as unreadable:
            raise NotSentError(f"the acknowledgement cannot be read: {unreadable}") from None
        if error is not None:
            raise NotSentError(f"the stream refused: {error}")


_EVENT_TYPES: Final = (Stored, StoredByLineage, Removed, Resumable, Cleared, Doubted, Goodbye)
