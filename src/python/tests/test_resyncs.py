"""What is lost on the way to a real daemon is asked for, and given: the scenarios of the Rust publisher."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from processes import Broker, Daemon, running
from world import NAMESPACE, RESYNC, eventually, hashes, question, world

import kvatlas
from kvatlas import Cleared, PublisherCounters, PublisherOptions, Removed, Stored, Tier
from kvatlas._publish import parking
from kvatlas._publish.answering import Answering
from kvatlas._publish.outbox import Answer, Clocks, Outbox, present_clocks


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


async def test_what_a_server_takes_no_more_is_given_as_the_full_state(tmp_path: Path) -> None:
    with Broker(tmp_path / "broker") as broker, running(broker.url, resync_timeout_ms=500):
        async with world(broker.url) as here:
            publisher = await here.publisher()
            await publisher.publish(Stored(hashes(10, 3)))
            await here.applied(await publisher.flush())
            here.way.lose()
            await publisher.publish(Stored(hashes(1000, 3000)))
            lost = await publisher.flush()
            broker.reload(max_payload=4096)
            here.way.heal()

            async def is_exact() -> bool:
                found = await here.holder()
                return found is not None and found.cursor >= lost and found.exact and found.blocks == 3003

            await eventually("the holder is exact again", is_exact)
            assert publisher.counters.answers_full >= 1


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


async def test_answers_come_in_chunks_of_bounded_size(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher(epoch=5, chunk_bytes_max=4000, heartbeat_interval=60.0)
        for number in range(100):
            await publisher.publish(Stored(hashes(1000 * number, 50)))
        await publisher.flush()
        for request, kind in [({}, "full"), ({"epoch": 5, "seq": 1, "full": False}, "missing")]:
            answer = await here.chunks(**request)
            assert len(answer) > 5
            assert [chunk["chunk"] for chunk in answer] == list(range(len(answer)))
            assert {(chunk["epoch"], chunk["seq"], chunk["kind"]) for chunk in answer} == {(5, 100, kind)}
            assert all(chunk["size"] < 5000 for chunk in answer)
        nothing = await here.chunks(epoch=5, seq=100, full=False)
        assert [(chunk["kind"], chunk["batches"]) for chunk in nothing] == [("missing", [])]


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
        first = asyncio.create_task(here.nats.request(RESYNC, question(), timeout=10))
        await eventually("the first is answered", lambda: _value(publisher.counters.answers_full))
        second = await here.nats.request(RESYNC, question(), timeout=5)
        assert second.headers is not None
        assert second.headers["Nats-Service-Error-Code"] == "503"
        gate.set()
        assert msgpack.unpackb((await first).data)["last"] is True


async def _value(value: int) -> int:
    return value


async def test_a_state_with_unknown_parents_is_not_given(
    broker: Broker, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "STATE_WAIT_MAX", parking.WAIT_MAX)
    async with world(broker.url) as here:
        publisher = await here.publisher(heartbeat_interval=60.0)
        await publisher.publish(Stored([12, 13], parent=11))
        await publisher.flush()
        reply = await here.nats.request(RESYNC, question(), timeout=5)
        assert reply.headers is not None
        assert reply.headers["Nats-Service-Error-Code"] == "503"
        await publisher.publish(Stored([10, 11]))
        await here.matching(hashes(10, 5), [("gpu-0", 0, 4, True)])
        reply = await here.nats.request(RESYNC, question(), timeout=5)
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


async def test_a_publisher_whose_epoch_rises_tells_all_daemons_at_once(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        seen = await here.nats.subscribe(f"kvatlas.v1.events.{NAMESPACE}.gpu-0")
        await here.publisher(heartbeat_interval=3600.0)
        known = time.time_ns() // 1000 + 3_600_000_000
        await here.nats.publish(RESYNC, question(epoch=known), reply=here.nats.new_inbox())
        batch = msgpack.unpackb((await seen.next_msg(timeout=10)).data)
        assert (batch["epoch"], batch["seq"], batch["events"]) == (known + 1, 2, [])


async def test_a_publisher_that_has_ended_by_an_error_answers_nobody(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher()

        def failing(*_arguments: object) -> list[object]:
            raise TypeError("of a test")

        publisher._outbox.add = failing  # type: ignore[assignment,method-assign]
        await publisher.publish(Stored([1]))
        with pytest.raises(kvatlas.StoppedError):
            await publisher.flush()
        reply = await here.nats.request(RESYNC, question(), timeout=10)
        assert reply.headers["Nats-Service-Error-Code"] == "503"


async def test_one_full_state_answers_all_who_wait_and_leaves_before_the_next() -> None:
    sent: list[str] = []
    asked: list[asyncio.Task[None]] = []

    class Connection:
        max_payload = 1 << 20

        async def publish(self, subject: str, *_payload: bytes) -> None:
            sent.append(subject)

    connection: Any = Connection()
    outbox = Outbox(PublisherOptions(), 0, present_clocks())
    answering = Answering(connection, "events", outbox, PublisherCounters(), lambda: None)
    full = outbox.full

    def ask(reply: str) -> None:
        message: Any = SimpleNamespace(data=question(), reply=reply)
        asked.append(asyncio.create_task(answering.take(message)))

    def slow(clocks: Clocks) -> Answer:
        sent.append("state")
        if sent.count("state") == 1:
            # It comes while the state is made.
            ask("late")
            asyncio.get_running_loop().call_soon(sent.append, "heartbeat")
        return full(clocks)

    outbox.full = slow  # type: ignore[method-assign]
    for reply in ("one", "two", "three"):
        ask(reply)
    while "late" not in sent:
        await asyncio.sleep(0)
    assert sent[0] == "state" and sorted(sent[1:5]) == ["heartbeat", "one", "three", "two"]
    assert sent[5:] == ["state", "late"]
    await asyncio.gather(*asked)
    answering.end()


@pytest.mark.parametrize("is_over", [True, False])
async def test_who_waits_for_a_full_state_that_cannot_be_made_is_refused(is_over: bool) -> None:
    refused: list[tuple[str, str]] = []

    class Connection:
        max_payload = 1 << 20

        async def publish(self, subject: str, *_payload: bytes, headers: dict[str, str]) -> None:
            refused.append((subject, headers["Nats-Service-Error-Code"]))

    connection: Any = Connection()
    outbox = Outbox(PublisherOptions(), 0, present_clocks())
    answering = Answering(connection, "events", outbox, PublisherCounters(), lambda: None)

    def failing(_clocks: Clocks) -> Answer:
        raise TypeError("of a test")

    if not is_over:
        outbox.full = failing  # type: ignore[method-assign]
    for reply in ("one", "two"):
        message: Any = SimpleNamespace(data=question(), reply=reply)
        await answering.take(message)
    if is_over:
        answering.refuse_all()
    while len(refused) < 2:
        await asyncio.sleep(0)
    assert refused == [("one", "503"), ("two", "503")]
    answering.end()
