"""What comes back by itself when the broker has taken something away and given it back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import nats.errors
import pytest
from nats.aio.client import Client
from processes import Broker
from world import NAMESPACE, RESYNC, eventually, options, question

import kvatlas
from kvatlas import Publisher, Query, QueryClient, Stored, _connection
from kvatlas._connection import Refusal, refusals_of

_QUERY = Query.by_sequence_hashes([1])


def users(permissions: str = "", password: str = "e") -> str:
    """An engine with these permissions, and somebody who may do everything."""
    rights = f", permissions: {{ {permissions} }}" if permissions else ""
    return f"{{ users: [ {{ user: engine, password: {password}{rights} }}, {{ user: all, password: a }} ] }}"


@contextlib.asynccontextmanager
async def engine(directory: Path) -> AsyncIterator[tuple[Broker, Client]]:
    """A broker, and the connection of an engine."""
    with Broker(directory / "broker", authorization=users()) as broker:
        async with kvatlas.connect(broker.url, user="engine", password="e") as connection:
            yield broker, connection


@pytest.mark.parametrize("gathering", [False, True])
async def test_queries_are_answered_again_when_the_right_to_inboxes_is_back(tmp_path: Path, gathering: bool) -> None:
    async with engine(tmp_path) as (broker, connection):
        client = QueryClient(connection, gathering=gathering)

        async def is_answered() -> bool:
            try:
                await client.query(NAMESPACE, _QUERY)
            except kvatlas.NoDaemonError:
                return True
            except kvatlas.NotPermittedError:
                return False
            raise AssertionError("there is no daemon")

        assert await is_answered()
        broker.reload(authorization=users('subscribe: { deny: ["_INBOX.>"] }'))
        for _ in range(3):
            assert not await is_answered()
        broker.reload(authorization=users())
        await eventually("queries are answered", is_answered)


async def test_a_query_under_way_hears_that_the_right_to_its_answer_was_taken(tmp_path: Path) -> None:
    async with engine(tmp_path) as (broker, connection):
        silent = await connection.subscribe(f"kvatlas.v1.query.{NAMESPACE}")
        asking = asyncio.ensure_future(QueryClient(connection, patience=3600.0).query(NAMESPACE, _QUERY))
        await silent.next_msg(10)
        broker.reload(authorization=users('subscribe: { deny: ["_INBOX.>"] }'))
        with pytest.raises(kvatlas.NotPermittedError):
            await asking


async def test_questions_are_answered_again_when_the_right_to_them_is_back(tmp_path: Path) -> None:
    async with engine(tmp_path) as (broker, connection), kvatlas.connect(broker.url, user="all", password="a") as daemon:
        publisher = await Publisher.start(connection, NAMESPACE, "gpu-0", options=options())

        async def is_answered() -> bool:
            try:
                return not (await daemon.request(RESYNC, question(), timeout=5)).headers
            except nats.errors.NoRespondersError:
                return False

        await publisher.flush()
        assert await is_answered()
        broker.reload(authorization=users('subscribe: { deny: ["kvatlas.v1.resync.>"] }'))
        assert not await is_answered()
        broker.reload(authorization=users())
        await eventually("questions are answered", is_answered)
        await publisher.aclose()


async def test_a_right_that_stays_away_is_told_once_and_again_after_it_was_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_connection, "_AGAIN", 0.01)
    heard: list[Refusal] = []
    async with engine(tmp_path) as (broker, connection):
        publisher = await Publisher.start(connection, NAMESPACE, "gpu-0", options=options())
        refusals_of(connection).hear(heard.append)

        async def hears(count: int) -> None:
            async def look() -> bool:
                return len(heard) >= count

            await eventually(f"{count} refusals", look)

        for _ in range(2):
            broker.reload(authorization=users('subscribe: { deny: ["kvatlas.v1.resync.>"] }'))
            heard.clear()
            await hears(4)
            with pytest.raises(kvatlas.NotSentError, match="permissions violation for subscription"):
                await publisher.flush()
            await hears(len(heard) + 2)
            await publisher.flush()
            assert sum(refusal.is_news for refusal in heard) <= 1
            broker.reload(authorization=users())
            await eventually("the subscription stands", lambda: _is_quiet(connection))
        await publisher.aclose()


async def _is_quiet(connection: Client) -> bool:
    mending = refusals_of(connection)._mending
    return mending is not None and mending.done()


async def _lost(connection: Client) -> None:
    async def look() -> bool:
        return not connection.is_connected

    await eventually("the connection is lost", look)


async def _flushed(publisher: Publisher, event: Stored) -> None:
    """Waits until such an event reaches the broker."""

    async def look() -> bool:
        try:
            await publisher.publish(event)
            await publisher.flush()
        except kvatlas.NotSentError:
            return False
        return True

    await eventually("an event is sent", look)


async def test_a_connection_whose_password_was_wrong_for_a_while_comes_back(tmp_path: Path) -> None:
    async with engine(tmp_path) as (broker, connection):
        publisher = await Publisher.start(connection, NAMESPACE, "gpu-0", options=options())
        await publisher.flush()
        broker.reload(authorization=users(password="wrong"))
        await _lost(connection)
        broker.reload(authorization=users())
        await _flushed(publisher, Stored([1]))
        with pytest.raises(kvatlas.NoDaemonError):
            await QueryClient(connection).query(NAMESPACE, _QUERY)
        await publisher.aclose()


async def test_connections_of_which_there_were_too_many_come_back(tmp_path: Path) -> None:
    async with engine(tmp_path) as (broker, connection), kvatlas.connect(broker.url, user="all", password="a") as other:

        async def are_connected() -> bool:
            return connection.is_connected and other.is_connected

        async def is_one_lost() -> bool:
            return not await are_connected()

        broker.reload(authorization=users(), max_connections=1)
        await eventually("one is lost", is_one_lost)
        broker.reload(authorization=users())
        await eventually("both are connected", are_connected)
        for each in (connection, other):
            publisher = await Publisher.start(each, NAMESPACE, "gpu-0", options=options())
            await _flushed(publisher, Stored([1]))
            await publisher.aclose()


async def test_a_connection_whose_messages_were_too_large_for_a_while_sends_them_again(tmp_path: Path) -> None:
    large = Stored(list(range(1000)))
    async with engine(tmp_path) as (broker, connection):
        publisher = await Publisher.start(connection, NAMESPACE, "gpu-0", options=options())
        await _flushed(publisher, large)
        broker.reload(authorization=users(), max_payload=1024)

        async def is_told() -> bool:
            with contextlib.suppress(kvatlas.NotSentError):
                await publisher.publish(large)
                await publisher.flush()
            return connection.max_payload == 1024

        await eventually("the limit is told", is_told)
        await _flushed(publisher, Stored([1]))
        with pytest.raises(kvatlas.NotSentError):
            await publisher.publish(large)
            await publisher.flush()
        broker.reload(authorization=users())
        await _flushed(publisher, large)
        await publisher.aclose()


async def test_a_message_that_no_link_ever_took_makes_no_new_one(tmp_path: Path) -> None:
    async with engine(tmp_path) as (_, connection):
        for _ in range(2):
            with pytest.raises(nats.errors.MaxPayloadError):
                await connection.publish("large", bytes(connection.max_payload + 1))
        await connection.flush()
        assert connection.is_connected and connection.stats["reconnects"] == 0


async def test_a_password_that_cannot_be_had_for_a_while_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_connection, "_AGAIN", 0.01)
    asked = 0

    def password() -> str:
        nonlocal asked
        asked += 1
        if asked in (2, 3):
            raise ValueError("there is no password just now")
        return "e"

    with Broker(tmp_path / "broker", authorization=users()) as broker:
        async with kvatlas.connect(broker.url, user="engine", password=password) as connection:
            broker.kill()
            broker.start()

            async def is_back() -> bool:
                return connection.is_connected and bool(connection.stats["reconnects"])

            await eventually("the connection is back", is_back)
            assert asked == 4
