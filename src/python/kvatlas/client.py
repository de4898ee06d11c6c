"""Asking: for routers."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from ._checks import all_of, check_type
from ._connection import (
    LOOK_INTERVAL,
    NOBODY_INTERVAL,
    Again,
    Connection,
    error_of,
    forgive,
    refusals_of,
    unless_refused,
)
from .errors import (
    ConnectionFailedError,
    InvalidValueError,
    KvatlasError,
    NoDaemonError,
    NotPermittedError,
    RefusedError,
    RequestTooLargeError,
    TimedOutError,
    UnavailableError,
    UnknownNamespaceError,
)
from .events import Cursor
from .gather import Gatherer, merge_replies, merge_results, merge_statuses, refusal_of
from .models import DEFAULT_TENANT, namespace_of
from .queries import Query, encode_queries, encode_query
from .subjects import PREFIX, Subjects
from .wire import (
    OUTCOMES_MAX,
    Gathered,
    Hint,
    HolderStatus,
    Outcome,
    QueryReply,
    StatusReply,
    decode_batch_reply,
    decode_query_reply,
    decode_status_reply,
    encode_hint,
    encode_outcomes,
)

_T = TypeVar("_T")
_LOG: Final = logging.getLogger("kvatlas.connection")


DISCONNECT_PATIENCE: Final = 10.0
"""Seconds in which what is on its way must leave when a connection is closed."""
_RECONNECT_PAUSE: Final = 0.5
"""Seconds between two tries to reconnect. A publisher is back before daemons count on having heard of everybody."""
_CLOSE_PATIENCE: Final = 1.0
"""Seconds that the client may take to close a connection that has not been drained."""
_GATHERING_LEEWAY: Final = 1.0
"""Seconds beyond the patience in which what was gathered is still given back."""
_STATUS_INTERVAL: Final = 0.01
"""Pause between two looks at a status."""


class Connecting:
    """A connection that is about to be made. It is awaited, or used with ``async with``, which closes it at the end."""

    def __init__(self, making: Coroutine[Any, Any, Client]) -> None:
        self._making = making
        self._made: Client | None = None

    def __await__(self) -> Generator[Any, Any, Client]:
        return self._making.__await__()

    async def __aenter__(self) -> Client:
        self._made = await self._making
        return self._made

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._made is not None:
            await disconnect(self._made)


def connect(url: str = "nats://127.0.0.1:4222", *, patience: float = 5.0, **options: Any) -> Connecting:
    """A connection to NATS that reconnects for ever, also while the server refuses it; ``options`` are those of ``nats.connect``.

    :param url: several servers are joined by commas.
    :param patience: seconds in which the first connection must be made.
    :raises ConnectionFailedError: if no server can be reached, or the credentials cannot be used.
    :raises InvalidValueError: for a URL or an option that is none.
    """
    return Connecting(make_connection(url, patience=patience, **options))


async def make_connection(url: str, *, patience: float = 5.0, **options: Any) -> Client:
    """Makes the connection of :func:`connect`."""
    servers = _servers(url)
    unknown = sorted(set(options) - set(inspect.signature(Client.connect).parameters))
    if unknown:
        raise InvalidValueError(f"nats.connect has no option {', '.join(unknown)}")
    last: list[object] = ["no answer"]

    async def note(error: Exception) -> None:
        # The default prints a traceback each time that a reconnection fails.
        last[:] = [str(error) or type(error).__name__]
        _LOG.warning("NATS: %s", last[0])

    connection = Connection()
    given = options.get("error_cb", note)

    async def hear(error: Exception) -> None:
        if connection.refusals.note(error):
            await given(error)

    settings: dict[str, Any] = {
        "max_reconnect_attempts": -1,
        "name": "kvatlas",
        "reconnect_time_wait": _RECONNECT_PAUSE,
    }
    try:
        await asyncio.wait_for(
            connection.connect(servers, **(settings | options | {"error_cb": hear})), patience
        )
        return connection
    except asyncio.TimeoutError:
        raise ConnectionFailedError(f"NATS at {url}, within {patience} s: {last[0]}") from None
    except (nats.errors.Error, OSError) as error:
        raise ConnectionFailedError(f"NATS at {url}: {error}") from error
    except ImportError as error:
        # Only who signs with credentials or a seed needs this package.
        advice = "; install kvatlas[credentials], or nkeys" if error.name == "nkeys" else ""
        raise ConnectionFailedError(f"NATS at {url}: {error}{advice}") from error


_SCHEMES: Final = ("nats", "tls", "ws", "wss")


def _servers(url: str) -> list[str]:
    """The servers of a URL, or of several that are joined by commas."""
    check_type(url, str, "url")
    servers = url.split(",")
    for server in servers:
        scheme, found, _ = server.strip().partition("://")
        if found and scheme not in _SCHEMES:
            raise InvalidValueError(f"{server!r} is no URL of NATS; these begin with {', '.join(_SCHEMES)}")
    return servers


async def disconnect(connection: Client, patience: float = DISCONNECT_PATIENCE) -> None:
    """Sends what is on its way, and closes the connection, whatever state it is in.

    What NATS has not taken after ``patience`` seconds is dropped.
    """
    if connection.is_closed:
        return
    error = await error_of(connection.drain(), patience)
    if error is None:
        return
    if connection.pending_data_size:
        _LOG.warning("closed with %d bytes not sent: %s", connection.pending_data_size, error)
    await error_of(connection.close(), _CLOSE_PATIENCE)


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
        self._gatherer = Gatherer(connection)
        self.patience = patience

    async def query(
        self,
        namespace: str | None = None,
        query: Query | None = None,
        *,
        model: str | None = None,
        tenant: str = DEFAULT_TENANT,
        patience: float | None = None,
    ) -> QueryReply:
        """Which holders hold how long a prefix.

        :param model: instead of a namespace: the name under which the model is served, for ``tenant``.
        :param patience: seconds to wait for this answer, instead of the client's.
        :raises ClientError: why there is no answer.
        :raises InvalidValueError: without a query, or without one of namespace and model.
        """
        if query is None:
            raise InvalidValueError("there is no query")
        check_type(query, Query, "query")
        name, patience = namespace_of(namespace, model, tenant), self._patience_of(patience)
        payload = encode_query(query)
        if self._gathering:
            subject = self._subjects.shards_query(name)
            replies, gathered = await self._gather(subject, payload, decode_query_reply, patience)
            return merge_replies(replies, query, gathered)
        reply = await self._request(self._subjects.query(name), payload, patience)
        return decode_query_reply(reply.data)

    async def query_batch(
        self,
        namespace: str | None = None,
        queries: Iterable[Query] = (),
        *,
        model: str | None = None,
        tenant: str = DEFAULT_TENANT,
        patience: float | None = None,
    ) -> tuple[QueryReply | RefusedError, ...]:
        """Several queries in one request; the answers come in the same order. The parameters are those of :meth:`query`.

        :raises ClientError: why there is no answer at all. What a daemon refuses of the queries stands in its place.
        """
        name, patience = namespace_of(namespace, model, tenant), self._patience_of(patience)
        queries = all_of(queries, Query, "queries")
        payload = encode_queries(queries)
        if self._gathering:
            subject = self._subjects.shards_query(name)
            lists, gathered = await self._gather(subject, payload, decode_batch_reply, patience)
            return merge_results(lists, queries, gathered)
        reply = await self._request(self._subjects.query(name), payload, patience)
        return decode_batch_reply(reply.data)

    async def status(
        self,
        namespace: str | None = None,
        *,
        model: str | None = None,
        tenant: str = DEFAULT_TENANT,
        patience: float | None = None,
    ) -> StatusReply:
        """How far a daemon has followed the holders of a namespace. The parameters are those of :meth:`query`.

        :raises ClientError: why there is no answer.
        """
        name, patience = namespace_of(namespace, model, tenant), self._patience_of(patience)
        if self._gathering:
            subject = self._subjects.shards_status(name)
            return merge_statuses(*await self._gather(subject, b"", decode_status_reply, patience))
        reply = await self._request(self._subjects.status(name), b"", patience)
        return decode_status_reply(reply.data)

    async def tell(
        self,
        namespace: str | None = None,
        outcomes: Iterable[Outcome] = (),
        *,
        model: str | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        """Tells what requests found of what answers promised, so that daemons can compare. Nobody replies.

        :raises ConnectionFailedError: where the connection takes nothing.
        :raises NotPermittedError: where the server has refused an earlier call.
        """
        subject = self._subjects.outcome(namespace_of(namespace, model, tenant))
        told = all_of(outcomes, Outcome, "outcomes")
        parts = (told[begin : begin + OUTCOMES_MAX] for begin in range(0, len(told), OUTCOMES_MAX))
        await self._publish(subject, map(encode_outcomes, parts))

    async def hint(
        self,
        namespace: str | None = None,
        hints: Iterable[Hint] = (),
        *,
        model: str | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        """Tells where requests are sent, before events tell of their blocks; for daemons with ``hints.ttl_ms``. Nobody replies.

        :raises ConnectionFailedError: where the connection takes nothing.
        :raises NotPermittedError: where the server has refused an earlier call.
        """
        subject = self._subjects.hint(namespace_of(namespace, model, tenant))
        # Each may be as long as a query, and so may a message.
        await self._publish(subject, map(encode_hint, all_of(hints, Hint, "hints")))

    async def _publish(self, subject: str, payloads: Iterable[bytes]) -> None:
        """Publishes reports, which nobody replies to."""
        for payload in payloads:
            with self._errors(subject, payload, self.patience):
                error = await error_of(self._nats.publish(subject, payload), self.patience)
                if error is not None:
                    raise error
        refused = refusals_of(self._nats).take(subject)
        if refused is not None:
            raise NotPermittedError(subject, refused.words)

    def _patience_of(self, patience: float | None) -> float:
        return self.patience if patience is None else patience

    async def applied(
        self,
        namespace: str | None = None,
        worker: str = "",
        cursor: Cursor | None = None,
        rank: int = 0,
        *,
        model: str | None = None,
        tenant: str = DEFAULT_TENANT,
        patience: float | None = None,
    ) -> HolderStatus:
        """Waits until a daemon has applied a publisher's batch and all before. The parameters are those of :meth:`query`.

        :raises TimedOutError: if it has not within the patience.
        :raises ClientError: why there is no answer.
        :raises InvalidValueError: without a worker or a cursor, or without one of namespace and model.
        """
        if not worker or cursor is None:
            raise InvalidValueError("give a worker and a cursor")
        name, patience = namespace_of(namespace, model, tenant), self._patience_of(patience)
        deadline = time.monotonic() + patience
        while (left := deadline - time.monotonic()) > 0:
            # A namespace comes into being with its first batch, and a daemon that has just started does not know all of them.
            with contextlib.suppress(UnknownNamespaceError, UnavailableError, TimedOutError):
                found = (await self.status(name, patience=left)).holder(worker, rank)
                if found is not None and found.cursor >= cursor:
                    return found
            await asyncio.sleep(_STATUS_INTERVAL)
        raise TimedOutError(self._subjects.status(name), patience)

    async def _gather(
        self, subject: str, payload: bytes, decode: Callable[[bytes], _T], patience: float
    ) -> tuple[list[_T], Gathered]:
        with self._errors(subject, payload, patience):
            gathering = self._gatherer.gather(subject, payload, patience, decode)
            patience += _GATHERING_LEEWAY
            return await unless_refused(self._nats, subject, gathering, patience, is_shared=False)

    async def _request(self, subject: str, payload: bytes, patience: float) -> Msg:
        with self._errors(subject, payload, patience):
            asking = self._ask(subject, payload, patience)
            reply = await unless_refused(self._nats, subject, asking, patience)
        refused = refusal_of(reply)
        if refused is not None:
            raise refused
        return reply

    async def _ask(self, subject: str, payload: bytes, patience: float) -> Msg:
        """Asks, and again on each new link, and after half of the patience: a link that is lost takes questions and answers with it."""
        deadline, again = time.monotonic() + patience, Again(self._nats, patience)
        asking = [asyncio.create_task(self._ask_once(subject, payload, patience))]
        try:
            while (left := deadline - time.monotonic()) > 0:
                if again.is_due():
                    asking.append(asyncio.create_task(self._ask_once(subject, payload, left)))
                done, _ = await asyncio.wait(
                    asking, timeout=min(left, LOOK_INTERVAL), return_when=asyncio.FIRST_COMPLETED
                )
                for asked in done:
                    return asked.result()
            raise asyncio.TimeoutError
        finally:
            for asked in asking:
                asked.add_done_callback(forgive)
                asked.cancel()

    async def _ask_once(self, subject: str, payload: bytes, patience: float) -> Msg:
        """Asks, and again for a moment where nobody listens."""
        deadline, again = time.monotonic() + patience, Again(self._nats, patience)
        while True:
            try:
                return await self._nats.request(subject, payload, timeout=deadline - time.monotonic())
            except nats.errors.NoRespondersError:
                if not again.is_due_for_nobody():
                    raise
            await asyncio.sleep(NOBODY_INTERVAL)

    @contextlib.contextmanager
    def _errors(self, subject: str, payload: bytes, patience: float) -> Iterator[None]:
        """Says what an error of the connection means for a request."""
        try:
            yield
        except KvatlasError:
            raise
        except nats.errors.NoRespondersError:
            raise NoDaemonError(subject) from None
        except asyncio.TimeoutError:
            raise TimedOutError(subject, patience) from None
        except nats.errors.MaxPayloadError:
            raise RequestTooLargeError(subject, len(payload), self._nats.max_payload) from None
        except (nats.errors.Error, OSError) as error:
            raise ConnectionFailedError(f"NATS: {error}") from error
