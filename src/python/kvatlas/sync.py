"""The clients without ``await``, for programs that have no event loop.

All connections of a process share one thread with an event loop. The objects may be used from any thread, but not after a fork: a child
process makes its own.

.. code-block:: python

    with kvatlas.sync.connect("nats://127.0.0.1:4222") as connection:
        publisher = connection.publisher("llama", "gpu-0")
        publisher.publish(kvatlas.Stored(chain))
        client = connection.queries()
        client.applied("llama", "gpu-0", publisher.flush())
        reply = client.query("llama", kvatlas.Query.by_sequence_hashes(chain))
        publisher.say_goodbye()
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from nats.aio.client import Client

from . import client as _client
from ._publish.counters import PublisherCounters
from ._publish.options import PublisherOptions
from .errors import RefusedError
from .events import Cursor, Tier
from .models import DEFAULT_TENANT
from .profile import Profile
from .publisher import PATIENCE, Events
from .publisher import Publisher as _AsyncPublisher
from .queries import Query
from .subjects import PREFIX
from .wire import Hint, HolderStatus, Outcome, QueryReply, StatusReply

_T = TypeVar("_T")


class _Thread:
    """The thread with the event loop, which begins with the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """The one loop of all threads that use this module."""
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                # A daemon thread: a program that forgets to close its connection can end all the same.
                threading.Thread(target=loop.run_forever, name="kvatlas", daemon=True).start()
                # Only now, as nobody would ever run the loop of a thread that could not begin.
                self._loop = loop
            return self._loop

    def forget(self) -> None:
        """For a child process: neither the thread nor what holds the lock lives on there."""
        self._lock, self._loop = threading.Lock(), None


_thread = _Thread()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_thread.forget)


def _run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run_coroutine_threadsafe(coroutine, _thread.loop()).result()


class _Owned:
    """An object of the process that made it: its connection does not live on in a child process."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def _is_own(self) -> bool:
        return self._process == os.getpid()

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        if not self._is_own():
            coroutine.close()
            raise RuntimeError("this object was made before a fork; connect in the child process, too")
        return _run(coroutine)


def connect(
    url: str = "nats://127.0.0.1:4222", *, prefix: str = PREFIX, patience: float = 5.0, **options: Any
) -> Connection:
    """A connection to NATS that reconnects for ever; ``options`` are those of ``nats.connect``.

    :param prefix: what every subject begins with.
    :param patience: seconds that a request waits for its answer.
    :raises ConnectionFailedError: if no server can be reached.
    """
    return Connection(_run(_client.make_connection(url, **options)), prefix, patience)


class Connection(_Owned):
    """A connection to NATS, made by :func:`connect`. Closed when its ``with`` block is left."""

    def __init__(self, connection: Client, prefix: str, patience: float) -> None:
        super().__init__()
        self._nats = connection
        self._prefix = prefix
        self._patience = patience

    def queries(self, *, gathering: bool = False) -> QueryClient:
        """A client that asks; with ``gathering``, all shards."""
        return QueryClient(
            _client.QueryClient(self._nats, prefix=self._prefix, patience=self._patience, gathering=gathering)
        )

    def publisher(
        self,
        namespace: str | None = None,
        worker: str = "",
        rank: int = 0,
        options: PublisherOptions | None = None,
        *,
        model: str | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> Publisher:
        """A publisher for one holder. Close it, or say goodbye, before the connection is closed."""
        started = _AsyncPublisher.start(
            self._nats, namespace, worker, rank, options, model=model, tenant=tenant, prefix=self._prefix
        )
        return Publisher(self._run(started))

    def close(self) -> None:
        """Sends what is on its way, and closes the connection."""
        self._run(_client.disconnect(self._nats))

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._is_own():
            self.close()


class QueryClient(_Owned):
    """As :class:`kvatlas.QueryClient`."""

    def __init__(self, client: _client.QueryClient) -> None:
        super().__init__()
        self._client = client

    def query(
        self,
        namespace: str | None = None,
        query: Query | None = None,
        *,
        model: str | None = None,
        tenant: str = DEFAULT_TENANT,
        patience: float | None = None,
    ) -> QueryReply:
        """Which holders hold how long a prefix."""
        return self._run(self._client.query(namespace, query, model=model, tenant=tenant, patience=patience))

    def query_batch(
        self,
        namespace: str | None = None,
        queries: Iterable[Query] = (),
        *,
        model: str | None = None,
        tenant: str = DEFAULT_TENANT,
        patience: float | None = None,
    ) -> tuple[QueryReply | RefusedError, ...]:
        """Several queries in one request; the answers come in the same order."""
        return self._run(self._client.query_batch(namespace, queries, model=model, tenant=tenant, patience=patience))

    def status(
        self,
        namespace: str | None = None,
        *,
        model: str | None = None,
        tenant: str = DEFAULT_TENANT,
        patience: float | None = None,
    ) -> StatusReply:
        """How far a daemon has followed the holders of a namespace."""
        return self._run(self._client.status(namespace, model=model, tenant=tenant, patience=patience))

    def tell(
        self,
        namespace: str | None = None,
        outcomes: Iterable[Outcome] = (),
        *,
        model: str | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        """Tells what requests found of what answers promised. Nobody replies."""
        self._run(self._client.tell(namespace, outcomes, model=model, tenant=tenant))

    def hint(
        self,
        namespace: str | None = None,
        hints: Iterable[Hint] = (),
        *,
        model: str | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        """Tells where requests are sent, before events tell of their blocks. Nobody replies."""
        self._run(self._client.hint(namespace, hints, model=model, tenant=tenant))

    def applied(
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
        """Waits until a daemon has applied a publisher's batch and all before."""
        return self._run(
            self._client.applied(
                namespace, worker, cursor, rank, model=model, tenant=tenant, patience=patience
            )
        )


class Publisher(_Owned):
    """As :class:`kvatlas.Publisher`."""

    def __init__(self, publisher: _AsyncPublisher) -> None:
        super().__init__()
        self._publisher = publisher

    @property
    def cursor(self) -> Cursor:
        """The last batch sent."""
        return self._publisher.cursor

    @property
    def counters(self) -> PublisherCounters:
        """What has been done so far."""
        return self._publisher.counters

    def publish(self, events: Events = (), *, tier: int = Tier.DEVICE) -> None:
        """Publishes events, in order. Waits while the queue is full."""
        self._run(self._publisher.publish(events, tier=tier))

    def try_publish(self, events: Events = (), *, tier: int = Tier.DEVICE) -> None:
        """As :meth:`publish`, but fails while the queue is full."""

        async def attempt() -> None:
            self._publisher.try_publish(events, tier=tier)

        self._run(attempt())

    def begin_epoch(self) -> None:
        """Publishes what is queued, and begins a new epoch: daemons forget all that the holder had."""
        self._run(self._publisher.begin_epoch())

    def begin_epoch_in_doubt(self, doubts: Sequence[str]) -> None:
        """As :meth:`begin_epoch`, and doubts from the first batch on what it tells."""
        self._run(self._publisher.begin_epoch_in_doubt(doubts))

    def set_profile(self, profile: Profile) -> None:
        """As :meth:`kvatlas.Publisher.set_profile`."""
        self._run(self._publisher.set_profile(profile))

    def set_heartbeats(self, are_sent: bool) -> None:
        """Says whether heartbeats are sent while there is nothing to publish."""
        self._run(self._publisher.set_heartbeats(are_sent))

    def flush(self, patience: float = PATIENCE) -> Cursor:
        """Waits until the server has taken everything, and returns the last batch then."""
        return self._run(self._publisher.flush(patience))

    def say_goodbye(self, patience: float = PATIENCE) -> None:
        """Publishes what is queued and a goodbye, and ends."""
        self._run(self._publisher.say_goodbye(patience))

    def close(self) -> None:
        """Publishes what is queued, and ends in silence."""
        self._run(self._publisher.aclose())

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_own():
            self._run(self._publisher.__aexit__(kind, error, trace))
