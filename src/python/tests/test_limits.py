"""The limits of a publisher: on batches, chunks of answers, and its queue."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgpack
import pytest
from processes import Broker, Daemon, running
from world import NAMESPACE, eventually, hashes, world

import kvatlas
from kvatlas import Cleared, Stored, Tier
from kvatlas._connection import refusals_of
from kvatlas._publish.calls import Flush


async def test_what_is_too_large_is_refused_and_nothing_is_sent(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(batch_bytes_max=1000, batch_events_max=3, heartbeat_interval=60.0)
        with pytest.raises(kvatlas.BatchTooLargeError):
            await publisher.publish(Stored(hashes(1, 200)))
        with pytest.raises(kvatlas.TooManyEventsError):
            await publisher.publish([Cleared()] * 4)
        with pytest.raises(kvatlas.InvalidValueError):
            await publisher.publish(Stored([1]), tier=8)
        assert (await publisher.flush()).seq == 0


async def test_the_limit_of_the_server_bounds_batches_and_chunks(tmp_path: Path) -> None:
    with Broker(tmp_path / "small", max_payload=65_536) as broker, running(broker.url):
        async with world(broker.url) as here:
            publisher = await here.publisher(batch_delay=0.01)
            with pytest.raises(kvatlas.BatchTooLargeError):
                await publisher.publish(Stored(hashes(1, 7000)))
            for number in range(60):
                await publisher.publish(Stored(hashes(10_000 * number, 1500)))
            await publisher.flush()
            assert publisher.counters.batches_failed == 0
            for chunk in await here.chunks():
                assert chunk["size"] < 65_536
            await here.matching(hashes(590_000, 1501), [("gpu-0", 0, 1500, True)])


async def test_calls_share_a_batch_until_it_is_full_or_due(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        seen = await here.nats.subscribe(f"kvatlas.v1.events.{NAMESPACE}.gpu-0")
        publisher = await here.publisher(batch_delay=0.02, batch_events_max=3, heartbeat_interval=60.0)
        for first in (10, 20, 30, 40):
            await publisher.publish(Stored([first]))
        await publisher.publish(Stored([50]), tier=Tier.HOST)
        batches = [msgpack.unpackb((await seen.next_msg(timeout=5)).data) for _ in range(3)]
        found = [(batch["seq"], batch.get("tier", 0), len(batch["events"])) for batch in batches]
        assert found == [(1, 0, 3), (2, 0, 1), (3, 1, 1)]


async def test_a_full_queue_waits_or_refuses_and_is_counted(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        publisher = await here.publisher(queue_batches_max=4, batch_bytes_max=100_000)
        await publisher.publish(Stored(hashes(10, 3)))
        await here.applied(await publisher.flush())
        broker.kill()
        await here.disconnected()
        # First the client's own buffer fills, then the queue.
        accepted = 0
        with pytest.raises(kvatlas.QueueFullError):
            while True:
                publisher.try_publish(Stored(hashes(1000 + 10_000 * accepted, 10_000)))
                accepted += 1
                await asyncio.sleep(0)
        assert publisher.counters.queue_refusals == 1
        waiting = asyncio.create_task(publisher.publish(Stored([5])))
        await asyncio.sleep(0)
        broker.start()
        await waiting
        assert publisher.counters.queue_waits == 1
        cursor = await publisher.flush()
        assert cursor.seq >= accepted + 2
        # Whatever was lost in between is asked for.
        await here.matching([5], [("gpu-0", 0, 1, True)])
        last = 1000 + 10_000 * (accepted - 1)
        await here.matching(hashes(last, 10_000), [("gpu-0", 0, 10_000, True)])


async def test_a_queue_is_full_of_bytes_as_of_calls(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(queue_bytes_max=100_000, heartbeat_interval=60.0)
        # The publisher has no turn in between.
        for number in range(2):
            publisher.try_publish(Stored(hashes(10_000 * number, 7000)))
        with pytest.raises(kvatlas.QueueFullError, match="100000 bytes"):
            publisher.try_publish(Stored([1]))
        await asyncio.gather(*[publisher.publish(Stored([number])) for number in range(100)])
        await publisher.flush()
        assert (publisher.counters.batches_sent, publisher.counters.batches_failed) == (102, 0)


async def test_closing_does_not_wait_for_ever(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(queue_batches_max=4, batch_bytes_max=1_000_000)
        broker.kill()
        await here.disconnected()
        with pytest.raises(kvatlas.QueueFullError):
            while True:
                publisher.try_publish(Stored(hashes(1000, 50_000)))
                await asyncio.sleep(0)
        waiting = [asyncio.create_task(publisher.publish(Stored([number]))) for number in range(12)]
        await asyncio.sleep(0)
        await publisher.aclose(0.1)
        assert publisher.counters.calls_dropped == 4
        # Nobody reads the queue any more: whoever waits for room in it hears of that.
        ends = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
        assert [type(end) for end in ends] == [kvatlas.StoppedError] * 12


async def test_a_flush_that_is_cancelled_takes_no_failure_away(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:

        async def failing(*_arguments: object, **_rest: object) -> None:
            raise OSError("lost")

        here.way.publish = failing  # type: ignore[method-assign]
        publisher = await here.publisher(heartbeat_interval=60.0)
        report = publisher._report

        def cancelling(flush: Flush) -> None:
            # The answer is there, and the call has not had a turn yet.
            report(flush)
            flushing.cancel()

        publisher._report = cancelling  # type: ignore[method-assign]
        await publisher.publish(Stored([0]))
        flushing = asyncio.create_task(publisher.flush())
        with pytest.raises(asyncio.CancelledError):
            await flushing
        publisher._report = report  # type: ignore[method-assign]
        with pytest.raises(kvatlas.NotSentError, match="lost"):
            await publisher.flush()
        assert (await publisher.flush()).seq == 1, "told once"


async def test_a_call_that_comes_behind_the_end_fails(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        going, publish = asyncio.Event(), here.way.publish
        sent: list[int] = []

        async def held(subject: str, payload: bytes = b"", **rest: object) -> None:
            await going.wait()
            # Others have their turn meanwhile.
            await asyncio.sleep(0)
            sent.append(len(msgpack.unpackb(payload)["events"]))
            await publish(subject, payload, **rest)

        here.way.publish = held  # type: ignore[method-assign]
        publisher = await here.publisher(queue_batches_max=2, heartbeat_interval=60.0)
        await publisher.publish(Stored([0]))
        # It has left the queue, and waits in the connection.
        await asyncio.sleep(0)
        for number in (1, 2):
            publisher.try_publish(Stored([number]))
        waiting = asyncio.create_task(publisher.publish(Stored([3])))
        await asyncio.sleep(0)

        async def close() -> None:
            # Room comes, and the end takes it before the call that waits for it.
            publisher._queue.get_nowait()
            publisher._stopped = True
            await publisher._drain()

        closing = asyncio.create_task(close())
        await asyncio.sleep(0)
        going.set()
        await closing
        with pytest.raises(kvatlas.StoppedError):
            await waiting
        assert (sent, publisher.counters.calls_dropped) == ([1, 1], 0)


async def test_a_publisher_whose_end_is_cancelled_is_silent(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        going, publish = asyncio.Event(), here.way.publish
        sent = 0

        async def held(subject: str, payload: bytes = b"", **rest: object) -> None:
            nonlocal sent
            await going.wait()
            sent += 1
            await publish(subject, payload, **rest)

        here.way.publish = held  # type: ignore[method-assign]
        publisher = await here.publisher(queue_batches_max=1)
        publisher.try_publish(Stored([0]))
        # It has left the queue, and waits in the connection.
        await asyncio.sleep(0)
        publisher.try_publish(Stored([1]))
        closing = asyncio.create_task(publisher.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        going.set()
        assert publisher._task is not None
        await asyncio.wait([publisher._task])
        assert (sent, publisher.counters.calls_dropped) == (0, 1)

        async def is_gone() -> bool:
            return publisher._questions is None

        await eventually("no more questions are taken", is_gone)
        assert publisher._hear not in refusals_of(here.nats)._hearers
