"""What tests do with a daemon: connect, lose batches, wait, ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgpack
from nats.aio.client import Client
from processes import PATIENCE

import kvatlas
from kvatlas import Cursor, HolderStatus, Publisher, PublisherOptions, Query, QueryClient, QueryReply

NAMESPACE = "llama"
# Where daemons ask the publisher of gpu-0.
RESYNC = f"kvatlas.v1.resync.{NAMESPACE}.gpu-0.0"
# What a daemon that was killed leaves: nobody, or a request that had gone to it.
_ABSENT = (kvatlas.NoDaemonError, kvatlas.TimedOutError)
_T = TypeVar("_T")


async def eventually(what: str, look: Callable[[], Awaitable[_T | None]]) -> _T:
    """Waits until `look` has an answer that counts."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    interval = 0.002
    while True:
        found = await look()
        if found:
            return found
        assert asyncio.get_running_loop().time() < deadline, f"not within {PATIENCE} s: {what}"
        await asyncio.sleep(interval)
        interval = min(1.5 * interval, 0.05)


class Way:
    """A connection on which the batches of gpu-0 can meet a fate; everything else passes."""

    def __init__(self, connection: Client) -> None:
        self._nats = connection
        # What becomes of a batch: the payloads that are really sent.
        self.fate: Callable[[bytes], Sequence[bytes]] = lambda payload: [payload]
        # What becomes of an answer to a daemon, in the same way.
        self.answer_fate: Callable[[bytes], Sequence[bytes]] = lambda payload: [payload]
        self.answers_faulted = 0
        # Answers that wait to be released; none where they are sent at once.
        self.held: list[tuple[str, bytes, dict[str, Any]]] | None = None
        # A prefix under which they all arrive as well.
        self.mirror: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nats, name)

    async def publish(self, subject: str, payload: bytes = b"", **rest: Any) -> None:
        is_batch = subject.endswith(f".events.{NAMESPACE}.gpu-0")
        if not subject.startswith("kvatlas"):
            return await self._answer(subject, payload, rest)
        for sent in self.fate(payload) if is_batch else [payload]:
            await self._nats.publish(subject, sent, **rest)
        if is_batch and self.mirror is not None:
            await self._nats.publish(self.mirror + subject.removeprefix("kvatlas"), payload)

    async def _answer(self, subject: str, payload: bytes, rest: dict[str, Any]) -> None:
        if self.held is not None:
            self.held.append((subject, payload, rest))
            return
        sent = list(self.answer_fate(payload))
        self.answers_faulted += sent != [payload]
        for one in sent:
            await self._nats.publish(subject, one, **rest)

    async def release(self) -> None:
        """Sends the answers that were held, and holds none any more."""
        held, self.held = self.held or [], None
        for subject, payload, rest in held:
            await self._nats.publish(subject, payload, **rest)

    def lose(self) -> None:
        """From now on every batch is lost."""
        self.fate = lambda _payload: []

    def heal(self) -> None:
        """From now on nothing is lost."""
        self.fate = lambda payload: [payload]


def options(**given: Any) -> PublisherOptions:
    """Every call is a batch, and silence is short."""
    return PublisherOptions(**({"batch_delay": 0.0, "heartbeat_interval": 0.05} | given))


def hashes(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def question(**given: Any) -> bytes:
    """A daemon's question for the full state."""
    return msgpack.packb({"v": 1, "rank": 0, "epoch": 0, "seq": 0, "full": True} | given)


class World:
    """A router's and an engine's side of one broker."""

    def __init__(self, connection: Client, prefix: str = "kvatlas") -> None:
        self.nats = connection
        self.way = Way(connection)
        self.queries = QueryClient(connection, prefix=prefix, patience=PATIENCE)
        # For looks that are repeated: a request that has gone to a daemon that was killed has no answer.
        self.looks = QueryClient(connection, prefix=prefix, patience=1.0)
        self._publishers: list[Publisher] = []

    async def publisher(self, worker: str = "gpu-0", rank: int = 0, **given: Any) -> Publisher:
        way: Any = self.way
        started = await Publisher.start(way, NAMESPACE, worker, rank, options(**given))
        self._publishers.append(started)
        return started

    async def die(self, publisher: Publisher) -> None:
        """The engine is gone, without a word."""
        self._publishers.remove(publisher)
        await publisher.aclose()

    async def disconnected(self) -> None:
        """Waits until the connection has noticed that the broker is gone."""

        async def look() -> bool:
            return not self.nats.is_connected

        await eventually("the connection is down", look)

    async def chunks(self, **given: Any) -> list[dict[str, Any]]:
        """The chunks of gpu-0's answer to such a question, each with its size."""
        inbox = self.nats.new_inbox()
        subscription = await self.nats.subscribe(inbox)
        await self.nats.publish(RESYNC, question(**given), reply=inbox)
        found: list[dict[str, Any]] = []
        while not found or not found[-1]["last"]:
            message = await subscription.next_msg(timeout=5)
            assert not message.headers, message.headers
            found.append(msgpack.unpackb(message.data) | {"size": len(message.data)})
        await subscription.unsubscribe()
        return found

    async def answers(self) -> bool:
        """Whether a daemon takes queries."""
        try:
            await self.looks.status(NAMESPACE)
        except _ABSENT:
            return False
        except (kvatlas.UnknownNamespaceError, kvatlas.UnavailableError):
            pass
        return True

    async def unknown(self, namespace: str) -> kvatlas.UnknownNamespaceError:
        """Waits until the daemons say that nobody publishes for the namespace: a daemon that has just started cannot."""
        while True:
            try:
                await self.queries.status(namespace)
            except kvatlas.UnknownNamespaceError as unknown:
                return unknown
            except kvatlas.UnavailableError:
                await asyncio.sleep(0.05)

    async def ask(self, chain: Sequence[int], **narrowed: Any) -> QueryReply:
        query = Query.by_sequence_hashes(chain).narrowed(**narrowed)
        return await self.queries.query(NAMESPACE, query)

    async def matches(self, chain: Sequence[int]) -> list[tuple[str, int, int, bool]]:
        """(worker, rank, matched blocks, exact) of every holder."""
        try:
            reply = await self.looks.query(NAMESPACE, Query.by_sequence_hashes(chain))
        except (kvatlas.UnknownNamespaceError, kvatlas.UnavailableError, *_ABSENT):
            return []
        return [(found.worker, found.rank, found.matched_blocks, found.exact) for found in reply.holders]

    async def holder(self, worker: str = "gpu-0", rank: int = 0) -> HolderStatus | None:
        try:
            return (await self.looks.status(NAMESPACE)).holder(worker, rank)
        except (kvatlas.UnknownNamespaceError, kvatlas.UnavailableError, *_ABSENT):
            return None

    async def applied(self, cursor: Cursor, worker: str = "gpu-0", rank: int = 0) -> HolderStatus:
        """Waits until a daemon has applied this batch, and is not asking just now."""

        async def look() -> HolderStatus | None:
            found = await self.holder(worker, rank)
            is_there = found is not None and found.cursor >= cursor and "resyncing" not in found.degraded
            return found if is_there else None

        return await eventually(f"{worker}/{rank} reaches {cursor}", look)

    async def matching(self, chain: Sequence[int], expected: list[tuple[str, int, int, bool]]) -> None:
        """Waits until the answer is this one."""
        last: list[object] = []

        async def look() -> bool:
            last[:] = [await self.matches(chain)]
            return last[0] == expected

        try:
            await eventually("the expected answer", look)
        except AssertionError:
            raise AssertionError(f"expected {expected}, found {last[0]}") from None


@contextlib.asynccontextmanager
async def world(url: str, *, has_daemon: bool = True) -> AsyncIterator[World]:
    """Connects; waits until a daemon takes queries, and so has the subscription to events."""
    connection = await kvatlas.connect(url)
    made = World(connection)
    try:
        if has_daemon:
            await eventually("a daemon answers", made.answers)
        yield made
    finally:
        for publisher in made._publishers:
            await publisher.aclose(1.0)
        with contextlib.suppress(OSError, TypeError):
            await connection.close()
