"""Answers to daemons that miss something.

The missing batches are given at once. Full states take long, so one is made for all who wait for it, and what is published has its turn
before the next one is made. The chunks are sent beside what is published next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from ..errors import RefusedError, refusal
from ..wire import ERROR_CODE_HEADER, ERROR_HEADER
from .counters import PublisherCounters
from .outbox import RISE, Answer, Clocks, Outbox, ResyncRequest, is_far_ahead, present_clocks

_LOG: Final = logging.getLogger("kvatlas.publisher")

_PAUSE: Final = 0.05
"""Pause between two full states, in which heartbeats and chunks leave."""

_ENDED: Final = "this publisher has ended"


class Answering:
    """What daemons have asked one publisher, and what it sends them.

    :param beat: has the next batch sent at once.
    """

    def __init__(
        self, connection: Client, subject: str, outbox: Outbox, counters: PublisherCounters, beat: Callable[[], None]
    ) -> None:
        self._nats = connection
        self._subject = subject
        self._outbox = outbox
        self._counters = counters
        self._beat = beat
        self._warned = float("-inf")
        # The reply subjects of those who wait for a full state.
        self._waiting: list[str] = []
        self._making: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._is_over = False

    async def take(self, question: Msg) -> None:
        """Answers a question, or has it wait for the full state."""
        if not question.reply:
            return
        try:
            if self._is_over:
                raise refusal(503, _ENDED)
            if len(self._waiting) + len(self._sending) >= self._outbox.options.answers_max:
                raise refusal(503, "this publisher answers others; ask again")
            request = ResyncRequest.decode(question.data)
            self._rise_above(request.cursor.epoch, present_clocks())
            self._outbox.note_server_limit(self._nats.max_payload)
            answer = self._outbox.missing(request)
        except RefusedError as refused:
            await self._refuse(question.reply, refused)
            return
        if answer is not None:
            self._counters.answers_missing += 1
            self._start(self._send(question.reply, answer.chunks))
            return
        self._waiting.append(question.reply)
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make())

    def refuse_all(self) -> None:
        """Answers nobody any more: what daemons ask for is not known."""
        self._is_over = True

    def end(self) -> None:
        """Sends nothing any more."""
        self._waiting.clear()
        if self._making is not None:
            self._making.cancel()
        for sending in self._sending:
            sending.cancel()

    def _rise_above(self, known: int, clocks: Clocks) -> None:
        epoch = self._outbox.cursor.epoch
        if self._outbox.rise_above(known, clocks):
            epoch = self._outbox.cursor.epoch
            _LOG.warning("a daemon knew epoch %d of %s, so epoch %d begins", known, self._subject, epoch)
            self._beat()
        elif known > epoch and is_far_ahead(known, clocks.unix_us) and clocks.monotonic - self._warned >= RISE:
            self._warned = clocks.monotonic
            _LOG.warning("epoch %d of %s is more than a day ahead of this clock, and not believed", known, self._subject)

    async def _make(self) -> None:
        """Makes full states until nobody waits for one."""
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            try:
                answer = self._full()
            except RefusedError as refused:
                for reply_to in waiting:
                    await self._refuse(reply_to, refused)
            else:
                self._counters.answers_full += len(waiting)
                for reply_to in waiting:
                    self._start(self._send(reply_to, answer.chunks))
            await asyncio.sleep(_PAUSE)

    def _full(self) -> Answer:
        """The full state.

        :raises RefusedError: where there is none, or not just now.
        """
        if self._is_over:
            raise refusal(503, _ENDED)
        try:
            return self._outbox.full(present_clocks())
        except RefusedError:
            raise
        except Exception as error:
            _LOG.exception("the full state of %s cannot be made", self._subject)
            raise refusal(503, "the full state cannot be made; the publisher's log has the error") from error

    def _start(self, doing: Coroutine[Any, Any, None]) -> None:
        sending = asyncio.create_task(doing)
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _send(self, reply_to: str, chunks: list[bytes]) -> None:
        try:
            for chunk in chunks:
                await self._nats.publish(reply_to, chunk)
        except (nats.errors.Error, OSError) as error:
            # The daemon asks again.
            _LOG.debug("a resync answer was cut short: %s", error)

    async def _refuse(self, reply_to: str, refused: RefusedError) -> None:
        self._counters.answers_refused += 1
        headers = {ERROR_HEADER: refused.text, ERROR_CODE_HEADER: str(refused.code)}
        try:
            await self._nats.publish(reply_to, headers=headers)
        except (nats.errors.Error, OSError) as error:
            _LOG.debug("a resync was not answered: %s", error)
