"""Asking: for routers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from .errors import (
    ConnectionFailedError,
    KvatlasError,
    NoDaemonError,
    RefusedError,
    RequestTooLargeError,
    TimedOutError,
    UnavailableError,
    UnknownNamespaceError,
)
from .events import Cursor
from .gather import gather, merge_replies, merge_results, merge_statuses, refusal_of
from .subjects import PREFIX, Subjects
from .wire import (
    Gathered,
    HolderStatus,
    Query,
    QueryReply,
    StatusReply,
    decode_batch_reply,
    decode_query_reply,
    decode_status_reply,
    encode_queries,
    encode_query,
)

_T = TypeVar("_T")
_LOG: Final = logging.getLogger("kvatlas.connection")


_STATUS_INTERVAL: Final = 0.01
"""Pause between two looks at a status."""
_NOBODY_PARTS: Final = 20
"""The share of the patience for which a request that nobody listens to is sent again: one part in so many."""
_NOBODY_INTERVAL: Final = 0.02
"""Pause before it is sent again."""


async def connect(url: str = "nats://127.0.0.1:4222", *, patience: float = 5.0, **options: Any) -> Client:
    """A connection to NATS that reconnects for ever; ``options`` are those of ``nats.connect``.

    :param url: several servers are joined by commas.
    :param patience: seconds in which the first connection must be made.
    :raises ConnectionFailedError: if no server can be reached.
    """
    last: list[object] = ["no answer"]

    async def note(error: Exception) -> None:
        # The default prints a traceback each time that a reconnection fails.
        last[:] = [str(error) or type(error).__name__]
        _LOG.warning("NATS: %s", last[0])

    settings: dict[str, Any] = {"max_reconnect_attempts": -1, "error_cb": note, "name": "kvatlas"}
    connecting = nats.connect(url.split(","), **(settings | options))
    try:
        return await asyncio.wait_for(connecting, patience)
    except asyncio.TimeoutError:
        raise ConnectionFailedError(f"NATS at {url}, within {patience} s: {last[0]}") from None
    except (nats.errors.Error, OSError) as error:
        raise ConnectionFailedError(f"NATS at {url}: {error}") from error


async def disconnect(connection: Client) -> None:
    """Sends what is on its way, and closes the connection, whatever state it is in."""
    try:
        await connection.drain()
    except (nats.errors.Error, OSError) as error:
        _LOG.debug("the connection was not drained: %s", error)
        with contextlib.suppress(OSError):
            await connection.close()


class QueryClient:
    """Asks the daemons of one prefix. Requests may run side by side.

    :param connection: stays the caller's.
    :param patience: seconds that a request waits for its answer.
    :param gathering: asks all shards instead of one daemon or gateway, and makes one answer of theirs. An answer that lacks
        shards when the patience is at its end names them in ``gathered``: give a patience that a router can afford.
    """

    def __init__(
        self, connection: Client, *, prefix: str = PREFIX, patience: float = 5.0, gathering: bool = False
    ) -> None:
        self._nats = connection
        self._subjects = Subjects(prefix)
        self._gathering = gathering
        self.patience = patience

    async def query(self, namespace: str, query: Query) -> QueryReply:
        """Which holders hold how long a prefix.

        :raises ClientError: why there is no answer.
        """
        payload = encode_query(query)
        if self._gathering:
            subject = self._subjects.shards_query(namespace)
            replies, gathered = await self._gather(subject, payload, decode_query_reply)
            return merge_replies(replies, query, gathered)
        reply = await self._request(self._subjects.query(namespace), payload)
        return decode_query_reply(reply.data)

    async def query_batch(
        self, namespace: str, queries: Sequence[Query]
    ) -> tuple[QueryReply | RefusedError, ...]:
        """Several queries in one request; the answers come in the same order.

        :raises ClientError: why there is no answer at all. What a daemon refuses of the queries stands in its place.
        """
        payload = encode_queries(queries)
        if self._gathering:
            subject = self._subjects.shards_query(namespace)
            lists, gathered = await self._gather(subject, payload, decode_batch_reply)
            return merge_results(lists, queries, gathered)
        reply = await self._request(self._subjects.query(namespace), payload)
        return decode_batch_reply(reply.data)

    async def status(self, namespace: str) -> StatusReply:
        """How far a daemon has followed the holders of a namespace.

        :raises ClientError: why there is no answer.
        """
        if self._gathering:
            subject = self._subjects.shards_status(namespace)
            return merge_statuses(*await self._gather(subject, b"", decode_status_reply))
        reply = await self._request(self._subjects.status(namespace), b"")
        return decode_status_reply(reply.data)

    async def applied(self, namespace: str, worker: str, cursor: Cursor, rank: int = 0) -> HolderStatus:
        """Waits until a daemon has applied a publisher's batch and all before; at most for the client's patience.

        :raises TimedOutError: if it has not by then.
        :raises ClientError: why there is no answer.
        """
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            # A namespace comes into being with its first batch, and a daemon that has just started does not know all of them.
            with contextlib.suppress(UnknownNamespaceError, UnavailableError):
                found = (await self.status(namespace)).holder(worker, rank)
                if found is not None and found.cursor >= cursor:
                    return found
            await asyncio.sleep(_STATUS_INTERVAL)
        raise TimedOutError(self._subjects.status(namespace), self.patience)

    async def _gather(
        self, subject: str, payload: bytes, decode: Callable[[bytes], _T]
    ) -> tuple[list[_T], Gathered]:
        with self._errors(subject, payload):
            return await gather(self._nats, subject, payload, self.patience, decode)

    async def _request(self, subject: str, payload: bytes) -> Msg:
        with self._errors(subject, payload):
            reply = await self._ask(subject, payload)
        refused = refusal_of(reply)
        if refused is not None:
            raise refused
        return reply

    async def _ask(self, subject: str, payload: bytes) -> Msg:
        """Asks, and again for a moment where nobody listens: daemons whose server has gone are with another one soon."""
        asked = time.monotonic()
        while True:
            waited = time.monotonic() - asked
            try:
                return await self._nats.request(subject, payload, timeout=self.patience - waited)
            except nats.errors.NoRespondersError:
                if time.monotonic() - asked >= self.patience / _NOBODY_PARTS:
                    raise
            await asyncio.sleep(_NOBODY_INTERVAL)

    @contextlib.contextmanager
    def _errors(self, subject: str, payload: bytes) -> Iterator[None]:
        """Says what an error of the connection means for a request."""
        try:
            yield
        except nats.errors.NoRespondersError:
            raise NoDaemonError(subject) from None
        except nats.errors.TimeoutError:
            raise TimedOutError(subject, self.patience) from None
        except nats.errors.MaxPayloadError:
            raise RequestTooLargeError(subject, len(payload), self._nats.max_payload) from None
        except (nats.errors.Error, OSError) as error:
            if isinstance(error, KvatlasError):
                raise
            raise ConnectionFailedError(f"NATS: {error}") from error
