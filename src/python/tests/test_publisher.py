"""The scenarios of the Rust publisher, against a real daemon: what is lost on the way is asked for, and given."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgpack
import pytest
from processes import Broker, Daemon, running
from world import NAMESPACE, World, eventually, hashes, options, world

import kvatlas
from kvatlas import (
    Acknowledged,
    Cleared,
    Cursor,
    Doubted,
    Goodbye,
    Publisher,
    PublisherOptions,
    Query,
    Removed,
    Stored,
    StoredByLineage,
    Tier,
)
from kvatlas._publish.outbox import Clocks, Outbox, ResyncRequest
from kvatlas.hashing import POSITION_MAX


async def test_events_in_matches_out_for_several_ranks(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        first, second = await here.publisher("gpu-0"), await here.publisher("gpu-1")
        ranked = await here.publisher("gpu-1", 1)
        await first.publish(Stored(hashes(10, 8)))
        await second.publish([Stored(hashes(10, 4)), Stored(hashes(90, 2), parent=13)])
        await ranked.publish([Stored(hashes(10, 8)), Removed([14])])
        expected = [("gpu-0", 0, 8, True), ("gpu-1", 0, 4, True), ("gpu-1", 1, 4, True)]
        await here.matching(hashes(10, 10), expected)
        # The hole is filled: what lay behind it counts again.
        await ranked.publish(Stored([14], parent=13))
        expected = [("gpu-0", 0, 8, True), ("gpu-1", 1, 8, True), ("gpu-1", 0, 4, True)]
        await here.matching(hashes(10, 10), expected)


async def test_a_lost_batch_is_given_from_the_ring(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        publisher = await here.publisher()
        await publisher.publish(Stored(hashes(10, 3)))
        await here.applied(await publisher.flush())
        here.way.lose()
        await publisher.publish(Stored(hashes(13, 3), parent=12))
        await publisher.flush()
        here.way.heal()
        await here.matching(hashes(10, 9), [("gpu-0", 0, 6, True)])
        assert publisher.counters.answers_missing >= 1
        assert publisher.counters.answers_full == 0


async def test_what_the_ring_has_forgotten_is_given_as_the_full_state(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        # Small chunks, so that the state takes several.
        publisher = await here.publisher(ring_batches_max=4, chunk_bytes_max=700)
        await publisher.publish(Stored(hashes(10, 3)))
        await here.applied(await publisher.flush())
        here.way.lose()
        for number in range(20):
            await publisher.publish(Stored(hashes(1000 + 1000 * number, 40)))
        await publisher.publish(Removed(hashes(11, 2)))
        await publisher.flush()
        here.way.heal()
        await here.matching(hashes(10, 3), [("gpu-0", 0, 1, True)])
        for number in range(20):
            await here.matching(hashes(1000 + 1000 * number, 41), [("gpu-0", 0, 40, True)])
        assert publisher.counters.answers_full >= 1


@pytest.mark.parametrize(
    "events",
    [
        [Cleared()],
        [Cleared(), Stored(hashes(10, 2))],
        [Stored(hashes(2000, 3)), Cleared(), Stored(hashes(10, 2))],
    ],
    ids=["cleared", "cleared and stored", "stored, cleared and stored"],
)
async def test_a_worker_is_cleared_while_its_resync_runs(
    broker: Broker, daemon: Daemon, events: list[kvatlas.Event]
) -> None:
    async with world(broker.url) as here:
        publisher = await here.publisher()
        await publisher.publish(Stored(hashes(10, 3)))
        await here.applied(await publisher.flush())
        here.way.held = []
        here.way.lose()
        await publisher.publish(Stored(hashes(1000, 4)))
        await publisher.flush()
        here.way.heal()

        async def is_held() -> bool:
            return bool(here.way.held)

        await eventually("an answer is on its way", is_held)
        # The answer was made before this, and comes after it.
        await publisher.publish(events)
        await publisher.flush()
        for chain in (hashes(10, 3), hashes(1000, 4), hashes(2000, 3)):
            assert not any(is_exact for *_, is_exact in await here.matches(chain)), "the resync is not over"
        await here.way.release()
        left = [("gpu-0", 0, 2, True)] if len(events) > 1 else []
        await here.matching(hashes(10, 3), left)
        for chain in (hashes(1000, 4), hashes(2000, 3)):
            await here.matching(chain, [])
        status = await here.applied(await publisher.flush())
        assert status.exact


def _changed(**fields: object) -> Callable[[bytes], list[bytes]]:
    """A chunk with other fields."""
    return lambda payload: [msgpack.packb(msgpack.unpackb(payload) | fields)]


LIES: dict[str, Callable[[bytes], list[bytes]]] = {
    "another rank": _changed(rank=7),
    "an epoch that was replaced": _changed(epoch=1),
    "a cursor that is behind": _changed(seq=1),
    "no end": _changed(last=False),
    "another place in the order": _changed(chunk=5),
    "an unknown kind": _changed(kind="guess"),
    "damaged batches": _changed(batches=[b"garbage"]),
    "garbage": lambda _payload: [b"garbage"],
    "the beginning of a chunk": lambda payload: [payload[: len(payload) // 2]],
    "silence": lambda _payload: [],
}


@pytest.mark.parametrize("name", LIES)
async def test_answers_that_lie_are_not_believed(broker: Broker, name: str) -> None:
    with running(broker.url, resync_timeout_ms=200):
        async with world(broker.url) as here:
            publisher = await here.publisher()
            await publisher.publish(Stored(hashes(10, 3)))
            await here.applied(await publisher.flush())
            here.way.answer_fate = LIES[name]
            here.way.lose()
            await publisher.publish(Removed(hashes(11, 2)))
            await publisher.flush()
            here.way.heal()

            async def has_lied() -> bool:
                return here.way.answers_faulted > 1

            await eventually("the daemon has been lied to, and has asked again", has_lied)
            for *_, matched, is_exact in await here.matches(hashes(10, 3)):
                assert not is_exact, f"{name} was believed: {matched} blocks"
            here.way.answer_fate = lambda payload: [payload]
            await here.matching(hashes(10, 3), [("gpu-0", 0, 1, True)])


async def test_a_restarted_daemon_learns_everything(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        publishers = [await here.publisher(f"gpu-{number}") for number in range(5)]
        for number, publisher in enumerate(publishers):
            await publisher.publish(Stored(hashes(10, 3 + number)))
            await publisher.publish(Stored(hashes(10, 2)), tier=Tier.HOST)
        expected = [(f"gpu-{number}", 0, 3 + number, True) for number in reversed(range(5))]
        await here.matching(hashes(10, 9), expected)
        daemon.kill()
        daemon.start()
        await here.matching(hashes(10, 9), expected)
        for publisher in publishers:
            await publisher.publish(Removed(hashes(10, 9)))
        # The other tier was given too.
        await here.matching(hashes(10, 9), [(f"gpu-{number}", 0, 2, True) for number in range(5)])


@pytest.mark.parametrize("epoch", [6, 5], ids=["a higher epoch", "the same epoch, counted from the start"])
@pytest.mark.parametrize("lost", [0, 3], ids=["nothing lost", "the first batches lost"])
async def test_a_restarted_publisher_replaces_what_it_had(
    broker: Broker, daemon: Daemon, epoch: int, lost: int
) -> None:
    async with world(broker.url) as here:
        before = await here.publisher(epoch=5)
        for number in range(20):
            await before.publish(Stored(hashes(1000 * number, 5)))
        await here.applied(await before.flush())
        await here.die(before)
        after = await here.publisher(epoch=epoch)
        if lost:
            here.way.lose()
        for number in range(3):
            await after.publish(Stored(hashes(1000 * number, 2)))
        await after.flush()
        here.way.heal()
        await after.publish(Stored(hashes(7000, 1)))
        await here.matching(hashes(7000, 9), [("gpu-0", 0, 1, True)])
        await here.matching(hashes(2000, 9), [("gpu-0", 0, 2, True)])
        await here.matching(hashes(19_000, 9), [])


async def test_the_higher_of_two_epochs_is_believed(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        replaced, current = await here.publisher(epoch=5), await here.publisher(epoch=6)
        for number in range(10):
            await replaced.publish(Stored(hashes(900, 3)))
            await current.publish(Stored(hashes(1000 * number, 4)))
        await here.matching(hashes(9000, 9), [("gpu-0", 0, 4, True)])
        await here.matching(hashes(900, 9), [])


async def test_what_is_cleared_is_gone_from_every_tier(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        publisher = await here.publisher()
        await publisher.publish(Stored(hashes(10, 3)))
        await publisher.publish(Stored(hashes(10, 3)), tier=Tier.DISK)
        await publisher.publish([Cleared(), Stored(hashes(50, 2))])
        await here.matching(hashes(50, 3), [("gpu-0", 0, 2, True)])
        assert await here.matches(hashes(10, 3)) == []
        # A daemon that knows nothing is given nothing else.
        daemon.kill()
        daemon.start()
        await here.matching(hashes(50, 3), [("gpu-0", 0, 2, True)])
        assert await here.matches(hashes(10, 3)) == []


async def test_a_clear_makes_lost_batches_good(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        publisher = await here.publisher(answers_resyncs=False)
        await publisher.publish(Stored(hashes(10, 3)))
        await here.applied(await publisher.flush())
        here.way.lose()
        await publisher.publish(Removed(hashes(10, 3)))
        await publisher.flush()
        here.way.heal()
        await publisher.publish()
        await here.applied(await publisher.flush())
        [(_, _, _, is_exact)] = await here.matches(hashes(10, 3))
        assert not is_exact, "a publisher that answers nothing leaves its holder degraded"
        await publisher.publish([Cleared(), Stored(hashes(20, 1))])
        await here.matching(hashes(20, 1), [("gpu-0", 0, 1, True)])


async def test_a_goodbye_is_forgotten_at_once(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        staying, leaving = await here.publisher("gpu-0"), await here.publisher("gpu-1")
        for publisher in (staying, leaving):
            await publisher.publish(Stored(hashes(10, 3)))
        await here.matching(hashes(10, 3), [("gpu-0", 0, 3, True), ("gpu-1", 0, 3, True)])
        await leaving.say_goodbye()
        await here.matching(hashes(10, 3), [("gpu-0", 0, 3, True)])
        assert await here.holder("gpu-1") is None
        with pytest.raises(kvatlas.StoppedError):
            await leaving.publish(Stored([1]))
        with pytest.raises(kvatlas.StoppedError):
            await leaving.flush()


async def test_who_comes_back_after_a_goodbye_begins_anew(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        publisher = await here.publisher()
        await publisher.publish([Stored(hashes(10, 3)), Goodbye()])
        before = await publisher.flush()
        sent = publisher.counters.heartbeats_sent
        await publisher.publish(Stored(hashes(20, 2)))
        after = await publisher.flush()
        assert after.epoch > before.epoch
        assert publisher.counters.heartbeats_sent == sent
        await here.matching(hashes(20, 3), [("gpu-0", 0, 2, True)])
        assert await here.matches(hashes(10, 3)) == []


async def test_a_new_epoch_has_nothing_of_the_old_one(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        publisher = await here.publisher()
        await publisher.publish(Stored(hashes(10, 3)))
        before = await publisher.flush()
        await here.applied(before)
        await publisher.begin_epoch()
        after = await publisher.flush()
        assert after.epoch > before.epoch
        await here.matching(hashes(10, 3), [])
        await publisher.publish(Stored(hashes(10, 2)))
        await here.matching(hashes(10, 3), [("gpu-0", 0, 2, True)])
        daemon.kill()
        daemon.start()
        await here.matching(hashes(10, 3), [("gpu-0", 0, 2, True)])


async def test_what_a_relay_doubts_is_told_until_it_takes_it_back(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        publisher = await here.publisher()

        async def has(*reasons: str) -> None:
            async def look() -> bool:
                found = await here.holder()
                return found is not None and tuple(
                    reason for reason in found.degraded if reason.startswith("upstream")
                ) == (reasons)

            await eventually(f"the daemon says {reasons}", look)

        await publisher.publish([Stored(hashes(10, 3)), Doubted(["upstream_lost", "upstream_gap"])])
        await has("upstream_gap", "upstream_lost")
        [(_, _, matched, is_exact)] = await here.matches(hashes(10, 3))
        assert (matched, is_exact) == (3, False)
        # A doubt is part of the full state.
        daemon.kill()
        daemon.start()
        await has("upstream_gap", "upstream_lost")
        await publisher.publish(Doubted(["upstream_gap"]))
        await has("upstream_gap")
        await publisher.publish([Cleared(), Stored(hashes(10, 2))])
        await here.matching(hashes(10, 3), [("gpu-0", 0, 2, True)])


async def test_a_relay_can_be_silent(broker: Broker) -> None:
    with running(broker.url, namespace_defaults_stale_after_ms=300):
        async with world(broker.url) as here:
            publisher = await here.publisher()
            await publisher.publish(Stored(hashes(10, 3)))
            await here.applied(await publisher.flush())
            await publisher.set_heartbeats(False)

            async def is_stale() -> bool:
                found = await here.holder()
                return found is not None and "stale" in found.degraded

            await eventually("the holder is stale", is_stale)
            await publisher.set_heartbeats(True)
            await here.matching(hashes(10, 3), [("gpu-0", 0, 3, True)])


async def test_damaged_requests_are_refused(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(rank=3)
        asked = f"kvatlas.v1.resync.{NAMESPACE}.gpu-0.3"
        sound = {"v": 1, "rank": 3, "epoch": 0, "seq": 0, "full": False}
        cases = [
            (b"", "400"),
            (b"\xc1", "400"),
            (b"\xdf\xff\xff\xff\xff", "400"),
            (b"\x91" * 1000, "400"),
            (msgpack.packb([1]), "400"),
            (msgpack.packb({**sound, "epoch": "x"}), "400"),
            (msgpack.packb({**sound, "seq": -1}), "400"),
            (msgpack.packb({"v": 1}), "400"),
            (msgpack.packb({**sound, "rank": 4}), "400"),
            (msgpack.packb({**sound, "v": 2}), "505"),
            (msgpack.packb(sound) + b"\x00", "400"),
        ]
        for payload, code in cases:
            reply = await here.nats.request(asked, payload, timeout=5)
            assert reply.headers is not None, payload
            assert reply.headers["Nats-Service-Error-Code"] == code, payload
        assert publisher.counters.answers_refused == len(cases)
        sound_reply = await here.nats.request(asked, msgpack.packb({**sound, "new": [1]}), timeout=5)
        assert msgpack.unpackb(sound_reply.data)["last"] is True


async def chunks(here: World, **request: object) -> list[dict[str, object]]:
    """The chunks of an answer."""
    inbox = here.nats.new_inbox()
    subscription = await here.nats.subscribe(inbox)
    question = {"v": 1, "rank": 0, "epoch": 0, "seq": 0, "full": True} | request
    await here.nats.publish(f"kvatlas.v1.resync.{NAMESPACE}.gpu-0.0", msgpack.packb(question), reply=inbox)
    found = []
    while not found or not found[-1]["last"]:
        message = await subscription.next_msg(timeout=5)
        assert not message.headers, message.headers
        found.append(msgpack.unpackb(message.data) | {"size": len(message.data)})
    await subscription.unsubscribe()
    return found


async def test_answers_come_in_chunks_of_bounded_size(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(epoch=5, chunk_bytes_max=4000, heartbeat_interval=60.0)
        for number in range(100):
            await publisher.publish(Stored(hashes(1000 * number, 50)))
        await publisher.flush()
        for request, kind in [({}, "full"), ({"epoch": 5, "seq": 1, "full": False}, "missing")]:
            answer = await chunks(here, **request)
            assert len(answer) > 5
            assert [chunk["chunk"] for chunk in answer] == list(range(len(answer)))
            assert {(chunk["epoch"], chunk["seq"], chunk["kind"]) for chunk in answer} == {(5, 100, kind)}
            assert all(chunk["size"] < 5000 for chunk in answer)
        nothing = await chunks(here, epoch=5, seq=100, full=False)
        assert [(chunk["kind"], chunk["batches"]) for chunk in nothing] == [("missing", [])]


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
            for chunk in await chunks(here):
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

        async def is_down() -> bool:
            return not here.nats.is_connected

        await eventually("the connection is down", is_down)
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


async def test_closing_does_not_wait_for_ever(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(queue_batches_max=4, batch_bytes_max=1_000_000)
        broker.kill()

        async def is_down() -> bool:
            return not here.nats.is_connected

        await eventually("the connection is down", is_down)
        with pytest.raises(kvatlas.QueueFullError):
            while True:
                publisher.try_publish(Stored(hashes(1000, 50_000)))
                await asyncio.sleep(0)
        await publisher.aclose(0.1)
        assert publisher.counters.calls_dropped == 4


async def test_no_more_answers_at_once_than_allowed(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(answers_max=1, heartbeat_interval=60.0)
        # Sending takes until somebody lets it.
        gate = asyncio.Event()
        real = here.way.publish

        async def slow(subject: str, payload: bytes = b"", **rest: object) -> None:
            if subject.startswith("_INBOX") and not rest:
                await gate.wait()
            await real(subject, payload, **rest)

        here.way.publish = slow  # type: ignore[method-assign]
        asked = f"kvatlas.v1.resync.{NAMESPACE}.gpu-0.0"
        question = msgpack.packb({"v": 1, "rank": 0, "epoch": 0, "seq": 0, "full": True})
        first = asyncio.create_task(here.nats.request(asked, question, timeout=10))
        await eventually("the first is answered", lambda: _value(publisher.counters.answers_full))
        second = await here.nats.request(asked, question, timeout=5)
        assert second.headers is not None
        assert second.headers["Nats-Service-Error-Code"] == "503"
        gate.set()
        assert msgpack.unpackb((await first).data)["last"] is True


async def _value(value: int) -> int:
    return value


async def test_a_state_with_unknown_parents_is_not_given(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        publisher = await here.publisher(heartbeat_interval=60.0)
        await publisher.publish(Stored([12, 13], parent=11))
        await publisher.flush()
        asked = f"kvatlas.v1.resync.{NAMESPACE}.gpu-0.0"
        question = msgpack.packb({"v": 1, "rank": 0, "epoch": 0, "seq": 0, "full": True})
        reply = await here.nats.request(asked, question, timeout=5)
        assert reply.headers is not None
        assert reply.headers["Nats-Service-Error-Code"] == "503"
        await publisher.publish(Stored([10, 11]))
        await here.matching(hashes(10, 5), [("gpu-0", 0, 4, True)])
        reply = await here.nats.request(asked, question, timeout=5)
        assert not reply.headers


async def test_what_is_removed_while_it_waits_stays_away(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        publisher = await here.publisher(ring_batches_max=0)
        await publisher.publish(Stored([12, 13], parent=11))
        await publisher.publish(Removed([13]))
        await publisher.publish(Stored([10, 11]))
        await here.matching(hashes(10, 5), [("gpu-0", 0, 3, True)])
        # The table has decided alike.
        daemon.kill()
        daemon.start()
        await here.matching(hashes(10, 5), [("gpu-0", 0, 3, True)])
        assert publisher.counters.answers_full >= 1


async def test_who_takes_up_an_epoch_gives_what_it_has_published(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        before = await here.publisher(epoch=5, heartbeat_interval=60.0)
        await before.publish(Stored(hashes(10, 3)))
        cursor = await before.flush()
        await here.applied(cursor)
        await here.die(before)
        after = await here.publisher(after=cursor)
        here.way.lose()
        await after.publish(Stored(hashes(13, 2), parent=12))
        await after.flush()
        here.way.heal()
        await here.matching(hashes(10, 9), [("gpu-0", 0, 5, True)])
        assert after.counters.answers_missing >= 1
        daemon.kill()
        daemon.start()
        await eventually("the full state is refused", lambda: _value(after.counters.answers_refused))
        status = await here.holder()
        assert status is None or not status.exact


async def test_opaque_engine_hashes_are_recomputed(broker: Broker) -> None:
    with running(broker.url, namespace_defaults_hashing="recompute") as daemon:
        async with world(broker.url) as here:
            publisher = await here.publisher(hashing="recompute")
            tokens = list(range(1, 81))
            named = {"lora_name": "my-lora", "cache_salt": "tenant-a"}
            await publisher.publish(Stored(hashes(7000, 4), tokens=tokens[:64], **named))
            blocks = kvatlas.block_hashes(tokens, **named)
            await publisher.publish(Stored([7004], parent=7003, block_hashes=blocks[4:]))
            queries = [
                Query.by_tokens(tokens, **named),
                Query.by_block_hashes(blocks),
                Query.by_sequence_hashes(kvatlas.sequence_hashes(blocks)),
            ]

            async def matched(expected: int) -> bool:
                try:
                    replies = await here.looks.query_batch(NAMESPACE, queries)
                except (kvatlas.NoDaemonError, kvatlas.TimedOutError, kvatlas.UnknownNamespaceError):
                    return False
                return all(
                    isinstance(reply, kvatlas.QueryReply)
                    and [(found.matched_blocks, found.exact) for found in reply.holders] == [(expected, True)]
                    for reply in replies
                )

            await eventually("the tokens are found", lambda: matched(5))
            daemon.kill()
            daemon.start()
            await eventually("the chain that the publisher computed is found", lambda: matched(5))
            await publisher.publish(Removed(hashes(7002, 3)))
            await eventually("the engine's names are still known", lambda: matched(2))


async def test_blocks_stored_by_lineage_hash(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        publisher = await here.publisher()
        chain = kvatlas.sequence_hashes(kvatlas.block_hashes(range(96)))
        lineage = list(kvatlas.lineage_hashes(chain))
        await publisher.publish(StoredByLineage(lineage[:5], engine_hashes=hashes(500, 5)))
        await here.matching(chain, [("gpu-0", 0, 5, True)])
        daemon.kill()
        daemon.start()
        await here.matching(chain, [("gpu-0", 0, 5, True)])
        await publisher.publish(Removed([504], [lineage[3]]))
        await here.matching(chain, [("gpu-0", 0, 3, True)])


async def test_batches_are_acknowledged_by_a_stream(tmp_path: Path) -> None:
    settings = {"events_transport": "jetstream"}
    store = {"jetstream": f'{{ store_dir = "{tmp_path / "store"}" }}'}
    with Broker(tmp_path / "broker", **store) as broker, running(broker.url, **settings) as daemon:
        async with world(broker.url) as here:
            publisher = await here.publisher(transport=Acknowledged(timeout=1.0, attempts=40))
            await publisher.publish(Stored(hashes(10, 3)))
            await publisher.flush()
            await here.matching(hashes(10, 3), [("gpu-0", 0, 3, True)])
            assert publisher.counters.batches_failed == 0
            daemon.kill()
            await publisher.publish(Removed([12]))
            await publisher.flush()
            daemon.start()
            await here.matching(hashes(10, 3), [("gpu-0", 0, 2, True)])


async def test_a_batch_that_no_stream_takes_is_counted(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(
            transport=Acknowledged(timeout=0.2, attempts=2), heartbeat_interval=60.0
        )
        await publisher.publish(Stored([1]))
        with pytest.raises(kvatlas.NotSentError):
            await publisher.flush()
        assert publisher.counters.batches_failed == 1
        assert (await publisher.flush()).seq == 1, "told once"


async def test_leaving_the_block_says_goodbye_and_an_exception_is_silence(
    broker: Broker, daemon: Daemon
) -> None:
    async with world(broker.url) as here:
        async with await Publisher.start(here.nats, NAMESPACE, "gpu-0", options=options()) as publisher:
            await publisher.publish(Stored(hashes(10, 3)))
            await here.matching(hashes(10, 3), [("gpu-0", 0, 3, True)])
        await here.matching(hashes(10, 3), [])
        with pytest.raises(KeyError):
            async with await Publisher.start(here.nats, NAMESPACE, "gpu-0", options=options()) as publisher:
                await publisher.publish(Stored(hashes(10, 3)))
                raise KeyError
        assert publisher.cursor.seq >= 1
        found = await here.applied(Cursor(publisher.cursor.epoch, 1))
        assert found.blocks == 3


def full_state(outbox: Outbox, now: float) -> list[dict[str, object]]:
    """The events of a full answer."""
    answer = outbox.answer(ResyncRequest(0, Cursor(0, 0), True), Clocks(now, 0))
    batches = [batch for chunk in answer.chunks for batch in msgpack.unpackb(chunk)["batches"]]
    return [event for batch in batches for event in msgpack.unpackb(batch)["events"]]


def doubts(outbox: Outbox, now: float) -> list[object]:
    """What a full answer doubts."""
    return [event["reasons"] for event in full_state(outbox, now) if event["type"] == "doubted"]


def test_a_full_answer_tells_that_blocks_were_left_out() -> None:
    outbox = Outbox(PublisherOptions(batch_delay=0, epoch=1), 0, Clocks(0.0, 0))
    outbox.add(0, [Stored([1])], Clocks(0.0, 0))
    assert doubts(outbox, 0.0) == []
    # The parent never comes.
    outbox.add(0, [Stored([8], parent=7)], Clocks(0.0, 0))
    assert doubts(outbox, 60.0) == [["upstream_gap"]]
    # What the publisher doubts itself does not end it.
    [sealed] = outbox.add(0, [Doubted([])], Clocks(60.0, 0))
    assert msgpack.unpackb(sealed.payload)["events"][0]["reasons"] == ["upstream_gap"]
    assert doubts(outbox, 60.0) == [["upstream_gap"]]
    outbox.add(0, [Cleared()], Clocks(60.0, 0))
    assert doubts(outbox, 60.0) == []


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param([Stored([1], parent=7, position=POSITION_MAX), Stored([2], parent=1)], id="position"),
        pytest.param([Stored(list(range(1, 70_000)), parent=70_000)], id="room"),
        pytest.param([Stored([1], engine_hashes=[name]) for name in range(17)], id="names"),
    ],
)
def test_a_full_answer_tells_what_there_was_no_place_for(stored: list[Stored]) -> None:
    outbox = Outbox(PublisherOptions(batch_delay=0, epoch=1), 0, Clocks(0.0, 0))
    outbox.add(0, stored, Clocks(0.0, 0))
    assert doubts(outbox, 0.0) == [["upstream_gap"]]
    outbox.begin_epoch(Clocks(0.0, 0))
    assert doubts(outbox, 0.0) == []


def test_a_full_answer_tells_of_blocks_whose_content_is_missing() -> None:
    outbox = Outbox(PublisherOptions(batch_delay=0, epoch=1, hashing="recompute"), 0, Clocks(0.0, 0))
    outbox.add(0, [Stored([1])], Clocks(0.0, 0))
    assert doubts(outbox, 0.0) == [["upstream_gap"]]


def test_an_epoch_that_begins_in_doubt_says_so_in_its_first_batch() -> None:
    outbox = Outbox(PublisherOptions(batch_delay=0, epoch=1), 0, Clocks(0.0, 0))
    outbox.add(0, [Stored([1])], Clocks(0.0, 0))
    [first] = outbox.begin_epoch(Clocks(1.0, 1), ["upstream_gap"])
    assert first.cursor.epoch > 1 and first.cursor.seq == 1 and not first.is_heartbeat
    assert msgpack.unpackb(first.payload)["events"] == [{"type": "doubted", "reasons": ["upstream_gap"]}]
    assert doubts(outbox, 1.0) == [["upstream_gap"]]
    [plain] = outbox.begin_epoch(Clocks(2.0, 2))
    assert plain.is_heartbeat
    assert doubts(outbox, 2.0) == []


async def test_a_new_epoch_can_begin_in_doubt(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        publisher = await here.publisher()
        await publisher.publish(Stored(hashes(10, 3)))
        await publisher.begin_epoch_in_doubt(["upstream_gap"])
        after = await publisher.flush()
        found = await here.applied(after)
        assert (found.blocks, list(found.degraded)) == (0, ["upstream_gap"])


def test_only_what_follows_a_batch_closely_waits() -> None:
    outbox = Outbox(PublisherOptions(batch_delay=0.5, epoch=1), 0, Clocks(0.0, 0))
    assert outbox.due() is None
    outbox.add(0, [Stored([1])], Clocks(10.0, 10))
    due = outbox.due()
    assert due is not None and due <= 10.0, "nothing was sent before it"
    assert len(outbox.seal(Clocks(10.0, 10))) == 1
    outbox.add(0, [Stored([2])], Clocks(10.1, 11))
    assert outbox.due() == 10.5
