"""What a publisher says of its batches while the broker is away, silent, or refuses them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from processes import PATIENCE, Broker
from world import NAMESPACE, World, eventually, options, world

import kvatlas
import kvatlas.sync
from kvatlas import Acknowledged, Publisher, Query, QueryClient, Stored
from kvatlas.client import disconnect

LONG = 3600.0
"""More than a test may take."""
_USERS = """{ users: [
  { user: engine, password: e, permissions: {
    publish: { allow: ["kvatlas.v1.events.*.gpu-0"] }
    subscribe: { allow: ["kvatlas.v1.resync.*.gpu-0.*", "_INBOX.>"] } } }
  { user: deaf, password: d, permissions: {
    publish: { allow: ["kvatlas.v1.>"] }, subscribe: { allow: ["kvatlas.v1.resync.*.*.1"] } } }
] }"""


@contextlib.asynccontextmanager
async def connected(directory: Path, user: str) -> AsyncIterator[Client]:
    """A connection of an engine that may speak for gpu-0, or of somebody who may hear nothing."""
    with Broker(directory / "broker", authorization=_USERS) as broker:
        async with kvatlas.connect(broker.url, user=user, password=user[0]) as connection:
            yield connection


def test_nothing_is_flushed_without_await_while_the_broker_is_away(broker: Broker) -> None:
    with kvatlas.sync.connect(broker.url) as connection:
        publisher = connection.publisher(NAMESPACE, "gpu-0", options=options())
        broker.kill()
        publisher.publish(Stored([1]))
        with pytest.raises(kvatlas.NotSentError):
            publisher.flush(0.2)
        with pytest.raises(kvatlas.NotSentError):
            publisher.say_goodbye(0.2)


async def test_nothing_is_flushed_while_the_broker_is_away(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(heartbeat_interval=60.0)
        broker.kill()
        await here.disconnected()
        await publisher.publish(Stored([1]))
        with pytest.raises(kvatlas.NotSentError):
            await publisher.flush(0.1)
        waiting = asyncio.create_task(publisher.flush(LONG))
        broker.start()
        assert (await waiting).seq == 1
        assert here.nats.is_connected and here.nats.pending_data_size == 0


async def test_nothing_is_taken_for_a_closed_connection(broker: Broker) -> None:
    connection = await kvatlas.connect(broker.url)
    publisher = await Publisher.start(connection, NAMESPACE, "gpu-0", options=options())
    await disconnect(connection)
    with pytest.raises(kvatlas.NotSentError, match="connect anew"):
        await publisher.publish(Stored([1]))
    with pytest.raises(kvatlas.NotSentError, match="connect anew"):
        publisher.try_publish(Stored([1]))
    with pytest.raises(kvatlas.NotSentError):
        await publisher.say_goodbye()


async def test_a_goodbye_that_nobody_heard_is_none(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher()
        broker.kill()
        await here.disconnected()
        with pytest.raises(kvatlas.NotSentError):
            await publisher.say_goodbye(0.1)
        with pytest.raises(kvatlas.StoppedError):
            await publisher.publish(Stored([1]))


async def test_a_flush_and_a_goodbye_do_not_wait_for_ever_for_room(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(queue_batches_max=1, batch_bytes_max=1_000_000)
        broker.kill()
        await here.disconnected()
        with pytest.raises(kvatlas.QueueFullError):
            while True:
                publisher.try_publish(Stored(list(range(1000, 51_000))))
                await asyncio.sleep(0)
        with pytest.raises(kvatlas.NotSentError):
            await publisher.flush(0.1)
        with pytest.raises(kvatlas.NotSentError):
            await publisher.say_goodbye(0.1)


async def test_a_broker_that_was_silent_is_flushed_to_again(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(heartbeat_interval=60.0)
        broker.pause()
        await publisher.publish(Stored([1]))
        with pytest.raises(kvatlas.NotSentError):
            await publisher.flush(0.1)
        broker.resume()
        await publisher.publish(Stored([2]))
        assert (await publisher.flush()).seq == 2
        assert here.nats.stats["reconnects"] == 0


async def test_a_link_that_is_lost_meanwhile_flushes_nothing(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(heartbeat_interval=60.0)
        broker.pause()
        await publisher.publish(Stored([1]))
        waiting = asyncio.create_task(publisher.flush(PATIENCE))
        while not publisher.counters.batches_sent:
            await asyncio.sleep(0.005)
        broker.kill()
        with pytest.raises(kvatlas.NotSentError):
            await waiting


async def test_another_link_does_not_take_what_the_lost_one_had(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(heartbeat_interval=60.0)
        broker.pause()
        await publisher.publish(Stored([1]))
        waiting = asyncio.create_task(publisher.flush(PATIENCE))
        while not publisher.counters.batches_sent:
            await asyncio.sleep(0.005)
        broker.kill()
        # The client is connected again before anything else is done.
        broker.start()
        with pytest.raises(kvatlas.NotSentError):
            await waiting


async def _relinked(here: World, publisher: Publisher, broker: Broker) -> None:
    """Publishes to a broker that takes nothing, and has the connection made anew."""
    broker.pause()
    sent = publisher.counters.batches_sent
    await publisher.publish(Stored([1]))
    while publisher.counters.batches_sent == sent:
        await asyncio.sleep(0.005)
    broker.kill()
    await here.disconnected()
    broker.start()

    async def is_connected() -> bool:
        return here.nats.is_connected

    await eventually("there is another link", is_connected)


async def test_what_was_lost_with_a_link_before_a_flush_is_told_once(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(heartbeat_interval=60.0)
        await _relinked(here, publisher, broker)
        with pytest.raises(kvatlas.NotSentError, match="may not have arrived"):
            await publisher.flush()
        assert (await publisher.flush()).seq == 1


async def test_a_link_that_is_lost_after_a_flush_takes_nothing_back(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(heartbeat_interval=60.0)
        await publisher.publish(Stored([1]))
        await publisher.flush()
        broker.kill()
        await here.disconnected()
        broker.start()
        await publisher.publish(Stored([2]))
        assert (await publisher.flush()).seq == 2


async def test_a_goodbye_needs_nothing_of_before(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(heartbeat_interval=60.0)
        await _relinked(here, publisher, broker)
        await publisher.say_goodbye()


async def test_failures_are_logged_more_and_more_rarely(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    async with world(broker.url, has_daemon=False) as here:

        async def failing(*_arguments: object, **_rest: object) -> None:
            raise OSError("lost")

        here.way.publish = failing  # type: ignore[method-assign]
        publisher = await here.publisher(heartbeat_interval=60.0)
        for number in range(9):
            await publisher.publish(Stored([number]))
        with pytest.raises(kvatlas.NotSentError):
            await publisher.flush()
        assert publisher.counters.batches_failed == 9
        assert sum("not sent" in record.message for record in caplog.records) == 4


async def test_batches_that_the_broker_refuses_are_counted_and_told_once(tmp_path: Path) -> None:
    async with connected(tmp_path, "engine") as connection:
        publisher = await Publisher.start(connection, NAMESPACE, "gpu-1", options=options(heartbeat_interval=60.0))
        await publisher.publish(Stored([1]))
        with pytest.raises(kvatlas.NotSentError, match="permissions violation for publish"):
            await publisher.flush()
        assert publisher.counters.batches_refused == 1
        assert (await publisher.flush()).seq == 1
        with pytest.raises(kvatlas.NotSentError, match="give the user the right"):
            await publisher.say_goodbye()
        async with await Publisher.start(connection, NAMESPACE, "gpu-0", options=options()) as permitted:
            await permitted.publish(Stored([1]))
            await permitted.flush()
        assert permitted.counters.batches_refused == 0


async def test_questions_that_the_broker_refuses_are_told(tmp_path: Path) -> None:
    async with connected(tmp_path, "deaf") as connection:
        publisher = await Publisher.start(connection, NAMESPACE, "gpu-0", options=options())
        with pytest.raises(kvatlas.NotSentError, match="permissions violation for subscription"):
            await publisher.flush()
        assert publisher.counters.batches_refused == 0
        await publisher.say_goodbye()


async def test_a_batch_that_the_broker_refuses_has_one_attempt(tmp_path: Path) -> None:
    async with connected(tmp_path, "engine") as connection:
        transport = Acknowledged(timeout=LONG, attempts=6)
        given = options(transport=transport, heartbeat_interval=60.0)
        publisher = await Publisher.start(connection, NAMESPACE, "gpu-1", options=given)
        await publisher.publish(Stored([1]))
        with pytest.raises(kvatlas.NotSentError, match="permissions violation for publish"):
            await publisher.flush(LONG)
        assert (publisher.counters.batches_failed, publisher.counters.batches_refused) == (1, 1)
        await publisher.aclose()


async def test_reports_that_the_broker_refuses_are_told_with_the_next(tmp_path: Path) -> None:
    async with connected(tmp_path, "engine") as connection:
        client = QueryClient(connection)
        hint = kvatlas.Hint("gpu-0", Query.by_sequence_hashes([1]))
        await client.hint(NAMESPACE, [hint])
        await connection.flush()
        await connection.flush()
        with pytest.raises(kvatlas.NotPermittedError):
            await client.hint(NAMESPACE, [hint])
        await client.tell(NAMESPACE, [])


async def test_nothing_waits_for_ever_on_a_silent_broker(broker: Broker) -> None:
    large = Query.by_sequence_hashes(range(90_000))
    async with kvatlas.connect(broker.url) as connection:
        client = QueryClient(connection, patience=0.2)
        given = options(queue_batches_max=1, batch_bytes_max=1_000_000)
        publisher = await Publisher.start(connection, NAMESPACE, "gpu-0", options=given)
        broker.pause()
        # Some versions of Python take as much as there is memory.
        with contextlib.suppress(kvatlas.ConnectionFailedError):
            for _ in range(40):
                await client.hint(NAMESPACE, [kvatlas.Hint("gpu-0", large)])
        with contextlib.suppress(kvatlas.QueueFullError):
            for _ in range(40):
                publisher.try_publish(Stored([1]))
                await asyncio.sleep(0)
        with pytest.raises(kvatlas.TimedOutError):
            await client.query(NAMESPACE, large)
        with pytest.raises(kvatlas.NotSentError):
            await publisher.say_goodbye(0.2)
        await disconnect(connection, 0.2)
        # What the client's socket still holds has nowhere to go then, and it closes.
        broker.kill()
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.mark.parametrize("gathering", [False, True])
async def test_a_request_is_sent_again_on_another_link(broker: Broker, gathering: bool) -> None:
    async with kvatlas.connect(broker.url) as connection, kvatlas.connect(broker.url) as daemon:
        silent = await daemon.subscribe(f"kvatlas.v1.{'shards.' * gathering}query.{NAMESPACE}")
        await daemon.flush()
        client = QueryClient(connection, patience=LONG, gathering=gathering)
        asking = asyncio.create_task(client.query(NAMESPACE, Query.by_sequence_hashes([1])))
        await silent.next_msg(PATIENCE)
        broker.kill()
        broker.start()
        await silent.next_msg(PATIENCE)
        asking.cancel()


@pytest.mark.parametrize("gathering", [False, True])
async def test_a_request_is_sent_again_after_half_of_the_patience(broker: Broker, gathering: bool) -> None:
    async with kvatlas.connect(broker.url) as connection:
        silent = await connection.subscribe(f"kvatlas.v1.{'shards.' * gathering}query.{NAMESPACE}")
        client = QueryClient(connection, patience=0.4, gathering=gathering)
        with pytest.raises(kvatlas.TimedOutError):
            await client.query(NAMESPACE, Query.by_sequence_hashes([1]))
        assert silent.pending_msgs == 2
        # A connection waits at its end until all is read.
        await silent.unsubscribe()


@pytest.mark.parametrize("gathering", [False, True])
@pytest.mark.parametrize("user", ["engine", "deaf"])
async def test_a_request_that_the_broker_refuses_does_not_wait(tmp_path: Path, user: str, gathering: bool) -> None:
    async with connected(tmp_path, user) as connection:
        client = QueryClient(connection, patience=LONG, gathering=gathering)
        query = Query.by_sequence_hashes([1])
        # The subscription to answers is refused once, and missing for good.
        for _ in range(2):
            with pytest.raises(kvatlas.NotPermittedError, match="permissions violation"):
                await client.query(NAMESPACE, query)
            with pytest.raises(PermissionError):
                await client.applied(NAMESPACE, "gpu-0", kvatlas.Cursor(1, 1))
