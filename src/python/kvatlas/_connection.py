"""What NATS' client does not tell of a connection: what the server has taken, and what it refuses.

The client hands refusals to the connection's error callback, and nowhere else: a message that is refused has been published without
an error, and a request waits for an answer that cannot come. A subscription that the server has removed stays missing when the right to
it is back.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.protocol.parser import PERMISSIONS_ERR, STALE_CONNECTION

from .errors import NotPermittedError, NotSentError

_T = TypeVar("_T")

LOOK_INTERVAL: Final = 0.05
"""Seconds between two looks at whether the connection stands."""
NOBODY_INTERVAL: Final = 0.02
"""Pause before a request that nobody listens to is sent again."""
_NOBODY_PARTS: Final = 20
"""The share of the patience for which it is, on each link: one part in so many."""
_AGAIN_MAX: Final = 5
"""Times that a request is sent again, at most: it may be what ends each link."""
_PINGS: Final = 2
"""Pings behind what was published. The client writes a ping at once, and messages a moment later: the first may overtake them."""
_PING_PATIENCE: Final = 3600.0
"""Seconds that a ping waits, which are never over: a pong that comes later than that ends the client's reading."""
_UNTOLD_MAX: Final = 64
"""Subjects of which it is kept, at most, that a message was refused."""
_AGAIN: Final = 1.0
"""Pause before a subscription that the server has refused, or removed, is made again."""
_TAKEN_PATIENCE: Final = 2.0
"""Seconds in which the server must have said whether it refuses that again."""
_LIMIT_PAUSE: Final = 2.0
"""Least pause between two links that are made to learn the limit on a message."""
_REFUSAL: Final = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')


@dataclass(frozen=True, slots=True)
class Refusal:
    """A message or a subscription that the server refused. The client has the server's words in lower case only.

    :param is_news: whether it is another than the refusal of a subscription that is made again and again.
    """

    is_message: bool
    subject: str
    words: str
    is_news: bool = True

    @classmethod
    def parse(cls, words: str) -> Refusal | None:
        """The refusal in an error of the server; none where it is another error."""
        found = _REFUSAL.search(words.lower())
        return None if found is None else cls(found[1] == "publish", found[2], words.removeprefix("nats: "))

    def is_of_message(self, subject: str) -> bool:
        return self.is_message and self.subject == subject.lower()

    def is_of_subscription(self, subject: str) -> bool:
        return not self.is_message and self.subject == subject.lower()


class Refusals:
    """What the server refuses on one connection."""

    def __init__(self, connection: Client) -> None:
        self._nats = connection
        self._hearers: set[Callable[[Refusal], None]] = set()
        self._untold: dict[str, Refusal] = {}
        # The answers to all requests of the client come by one subscription.
        self._answers: tuple[int, Refusal] | None = None
        # The ids of subscriptions that the server does not have, and of those of which that was told.
        self._missing: set[int] = set()
        self._told: set[int] = set()
        self._mending: asyncio.Task[None] | None = None

    def note(self, error: Exception) -> bool:
        """Notes an error of the connection, if it is a refusal. Says whether it is news."""
        refusal = Refusal.parse(str(error))
        if refusal is None:
            return True
        if refusal.is_message:
            self._untold[refusal.subject] = refusal
            if len(self._untold) > _UNTOLD_MAX:
                del self._untold[next(iter(self._untold))]
        else:
            refusal = replace(refusal, is_news=self._miss(refusal))
            if self.is_of_inbox(refusal, is_shared=True):
                self._answers = (link_of(self._nats), refusal)
        for hear in tuple(self._hearers):
            hear(refusal)
        return refusal.is_news

    def _miss(self, refusal: Refusal) -> bool:
        """Has a subscription made again until the server takes it. Says whether its refusal is news."""
        found = {number for number, kept in self._nats._subs.items() if refusal.is_of_subscription(kept.subject)}
        is_news = not found or not found <= self._told
        self._missing |= found
        self._told |= found
        if found and (self._mending is None or self._mending.done()):
            self._mending = asyncio.create_task(self._mend(), name="kvatlas subscriptions")
        return is_news

    async def _mend(self) -> None:
        """Makes subscriptions again, which the client does on a new link only."""
        while self._missing and not self._nats.is_closed:
            await asyncio.sleep(_AGAIN)
            if not self._nats.is_connected or self._nats.is_draining:
                continue
            made, self._missing = self._missing & self._nats._subs.keys(), set()
            # A request from now on hears of a refusal that comes behind it.
            self._answers = None
            try:
                for kept in [self._nats._subs[number] for number in made]:
                    await self._nats._send_subscribe(kept)
                await confirm(self._nats, _TAKEN_PATIENCE)
            except (nats.errors.Error, OSError, NotSentError):
                self._missing |= made
            self._told &= self._missing

    def end(self) -> None:
        """Makes no subscription again any more."""
        if self._mending is not None:
            self._mending.cancel()

    def hear(self, hearer: Callable[[Refusal], None]) -> None:
        """Has refusals told from now on."""
        self._hearers.add(hearer)

    def unhear(self, hearer: Callable[[Refusal], None]) -> None:
        """Has them told no more."""
        self._hearers.discard(hearer)

    def is_of_inbox(self, refusal: Refusal, is_shared: bool) -> bool:
        """Whether that was a subscription to answers: the one that the client's requests share, or one of its own."""
        if refusal.is_message or refusal.subject.endswith(".*") != is_shared:
            return False
        inboxes = self._nats.new_inbox().rpartition(".")[0]
        return refusal.subject.startswith(f"{inboxes}.".lower())

    def of_answers(self) -> Refusal | None:
        """The refusal of the subscription to the answers to requests, while it lasts."""
        if self._answers is None or self._answers[0] != link_of(self._nats):
            return None
        return self._answers[1]

    def take(self, subject: str) -> Refusal | None:
        """The last refusal of a message on a subject, once."""
        return self._untold.pop(subject.lower(), None)


class Connection(Client):
    """A connection that keeps what the server refuses, and makes subscriptions again which it has removed.

    It stays until it is closed. The client's own closes for good at each error of the server but two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refusals = Refusals(self)
        # The largest limit on a message that any link has had, and when one was made for want of that.
        self._payload_most = 0
        self._limit_looked_at = -_LIMIT_PAUSE

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        try:
            await super().publish(subject, payload, reply, headers)
        except nats.errors.MaxPayloadError as error:
            if len(payload) <= self._payload_most:
                await self._look_at_limit(error)
            raise

    async def _look_at_limit(self, error: Exception) -> None:
        """Makes a new link: a limit that has become lower may be as it was again, and the server tells it to new links only."""
        now = time.monotonic()
        if now - self._limit_looked_at >= _LIMIT_PAUSE and not self.is_draining:
            self._limit_looked_at = now
            await self._process_op_err(error)

    async def _process_connect_init(self) -> None:
        await super()._process_connect_init()
        self._payload_most = max(self._payload_most, self.max_payload)

    async def _process_err(self, err_msg: str) -> None:
        if STALE_CONNECTION in err_msg or PERMISSIONS_ERR in err_msg:
            await super()._process_err(err_msg)
            return
        # The server closes the link where that is needed, and another one is made.
        words = err_msg.strip("'")
        self._err = nats.errors.Error(f"nats: {words}")
        await self._error_cb(self._err)

    async def _attempt_reconnect(self) -> None:
        while True:
            try:
                await super()._attempt_reconnect()
                return
            except Exception as error:  # Of a callable that gives a password, for one: the client would try no more.
                self._err = error
                await self._error_cb(error)
            if self.is_closed:
                return
            self._status = Client.RECONNECTING
            await asyncio.sleep(_AGAIN)

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        if status == Client.CLOSED:
            self.refusals.end()
        await super()._close(status, do_cbs)


def refusals_of(connection: Client) -> Refusals:
    """The refusals of a connection. One that :func:`kvatlas.connect` did not make tells none."""
    kept = getattr(connection, "refusals", None)
    return kept if isinstance(kept, Refusals) else Refusals(connection)


async def unless_refused(
    connection: Client,
    subject: str,
    asking: Coroutine[Any, Any, _T],
    patience: float,
    *,
    is_shared: bool = True,
) -> _T:
    """What a request comes to, unless the server refuses its message or the subscription to its answer.

    :param is_shared: whether the answer comes by the subscription that the client's requests share.
    :raises NotPermittedError: as soon as the server refuses.
    :raises asyncio.TimeoutError: if it comes to nothing within ``patience`` seconds.
    """
    refusals = refusals_of(connection)
    refused: asyncio.Future[Refusal] = asyncio.get_running_loop().create_future()

    def hear(refusal: Refusal) -> None:
        if not refused.done() and (refusal.is_of_message(subject) or refusals.is_of_inbox(refusal, is_shared)):
            refused.set_result(refusal)

    if is_shared and (known := refusals.of_answers()) is not None:
        refused.set_result(known)
    refusals.hear(hear)
    asked = asyncio.ensure_future(asking)
    asked.add_done_callback(forgive)
    try:
        either: tuple[asyncio.Future[Any], ...] = (asked, refused)
        await asyncio.wait(either, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        if refused.done():
            raise NotPermittedError(subject, refused.result().words)
        raise asyncio.TimeoutError
    finally:
        refusals.unhear(hear)
        asked.cancel()


async def confirm(connection: Client, patience: float) -> None:
    """Waits until the server has taken everything that was published. It has told then what it refuses of that.

    :raises NotSentError: if it has not within ``patience`` seconds, or the connection is lost meanwhile.
    """
    deadline = time.monotonic() + patience
    while not connection.is_connected:
        if connection.is_closed:
            raise NotSentError("NATS: the connection is closed")
        if time.monotonic() >= deadline:
            raise NotSentError(f"NATS: there is no connection")
        await asyncio.sleep(LOOK_INTERVAL)
    link = link_of(connection)
    for _ in range(_PINGS):
        if not await _is_answered(connection, link, deadline):
            raise NotSentError(f"NATS: the server does not answer")


async def _is_answered(connection: Client, link: int, deadline: float) -> bool:
    """Whether the server answers a ping in time."""
    # Unlike `flush`, `rtt` always waits for the pong; earlier clients have only a `flush` that does.
    ping: Callable[..., Coroutine[Any, Any, Any]] = getattr(connection, "rtt", connection.flush)
    answer = asyncio.ensure_future(ping(timeout=_PING_PATIENCE))
    answer.add_done_callback(forgive)
    while (left := deadline - time.monotonic()) > 0:
        await asyncio.wait([answer], timeout=min(left, LOOK_INTERVAL))
        if answer.done():
            try:
                answer.result()
            except (nats.errors.Error, OSError) as error:
                raise NotSentError(f"NATS: {error}") from error
            return True
        if not connection.is_connected or link_of(connection) != link:
            # The pong of that link does not come any more.
            answer.cancel()
            raise NotSentError("NATS: the connection was lost before the server had taken everything")
    # The ping is left alone: the client's reading would end with the pong of one that was cancelled.
    return False


async def error_of(doing: Coroutine[Any, Any, None], patience: float) -> Exception | None:
    """Why something was not done in time; none where it was. The client may swallow that it is cancelled, so its end is not waited for."""
    done = asyncio.ensure_future(doing)
    done.add_done_callback(forgive)
    await asyncio.wait([done], timeout=patience)
    if not done.done():
        done.cancel()
        return NotSentError(f"NATS: the server takes nothing within {patience} s")
    try:
        done.result()
    except Exception as error:  # From Python 3.12 on, a client that closes a lost connection fails with a TypeError.
        return error
    return None


def forgive(answer: asyncio.Future[Any]) -> None:
    """Takes note of an error that nobody may be there for any more to hear of."""
    if not answer.cancelled():
        answer.exception()


def link_of(connection: Client) -> int:
    """The number of the connection's present link to a server."""
    return int(connection.stats["reconnects"])


class Again:
    """When a request is to be sent again: on each new link, once after half of the patience, and where nobody listens."""

    def __init__(self, connection: Client, patience: float) -> None:
        self._nats = connection
        self._link = link_of(connection)
        self._late_at = time.monotonic() + patience / 2
        self._left = _AGAIN_MAX
        self._nobody_lasts = patience / _NOBODY_PARTS
        # The link on which nobody listened last, and since when.
        self._nobody: tuple[int, float] | None = None

    def is_due(self) -> bool:
        """Whether it is, which is told once."""
        link, is_late = link_of(self._nats), time.monotonic() >= self._late_at
        if self._left == 0 or (link == self._link and not is_late):
            return False
        self._link, self._left = link, self._left - 1
        if is_late:
            self._late_at = float("inf")
        return True

    def is_due_for_nobody(self) -> bool:
        """Whether it is although nobody listens, as the server has just said: for a moment after the first such word on each link.

        Daemons whose server has gone are with another one soon.
        """
        link, now = link_of(self._nats), time.monotonic()
        if self._nobody is None or self._nobody[0] != link:
            self._nobody = (link, now)
        return now - self._nobody[1] < self._nobody_lasts
