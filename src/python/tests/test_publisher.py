"""What a publisher tells a real daemon is what queries find there."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgpack
import pytest
from processes import Broker, Daemon, running
from world import NAMESPACE, eventually, hashes, options, world

import kvatlas
from kvatlas import (
    Acknowledged,
    Cleared,
    Cursor,
    Doubted,
    Goodbye,
    Publisher,
    Query,
    Removed,
    Stored,
    StoredByLineage,
    Tier,
)


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


async def test_answers_have_the_address_and_labels_told_last(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        profile = kvatlas.Profile("10.0.0.7:8000", {"zone": "a"})
        publisher = await here.publisher(profile=profile)
        await publisher.publish(Stored(hashes(10, 2)))
        await here.matching(hashes(10, 2), [("gpu-0", 0, 2, True)])

        async def told() -> tuple[str | None, dict[str, str]]:
            queries = [Query.by_sequence_hashes(hashes(10, 2))] * 2
            _, again = await here.queries.query_batch(NAMESPACE, queries)
            assert isinstance(again, kvatlas.QueryReply)
            [holder] = again.holders
            status = await here.holder("gpu-0")
            assert status is not None and (status.address, status.labels) == (holder.address, holder.labels)
            return holder.address, holder.labels

        assert await told() == ("10.0.0.7:8000", {"zone": "a"})
        await publisher.set_profile(kvatlas.Profile("10.0.0.8:8000"))
        await here.applied(await publisher.flush())
        assert await told() == ("10.0.0.8:8000", {})


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
                except (
                    kvatlas.NoDaemonError,
                    kvatlas.TimedOutError,
                    kvatlas.UnavailableError,
                    kvatlas.UnknownNamespaceError,
                ):
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


async def test_an_end_by_an_error_is_told(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    async with world(broker.url, has_daemon=False) as here:

        async def broken(*_arguments: object, **_rest: object) -> None:
            raise ZeroDivisionError

        here.way.publish = broken  # type: ignore[method-assign]
        publisher = await here.publisher()
        with pytest.raises(kvatlas.StoppedError):
            await publisher.publish(Stored([1]))
            await publisher.flush()
        assert "ZeroDivisionError" in caplog.text
        await publisher.aclose()


async def test_a_new_epoch_can_begin_in_doubt(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        publisher = await here.publisher()
        await publisher.publish(Stored(hashes(10, 3)))
        await publisher.begin_epoch_in_doubt(["upstream_gap"])
        after = await publisher.flush()
        found = await here.applied(after)
        assert (found.blocks, list(found.degraded)) == (0, ["upstream_gap"])


async def test_nothing_is_published_behind_a_goodbye(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        seen = await here.nats.subscribe(f"kvatlas.v1.events.{NAMESPACE}.gpu-0")
        publisher = await here.publisher(heartbeat_interval=60.0, queue_batches_max=2)
        leaving = asyncio.create_task(publisher.say_goodbye())
        waiting = [asyncio.create_task(publisher.publish(Stored([number]))) for number in range(1, 9)]
        with pytest.raises(kvatlas.StoppedError):
            while True:
                with contextlib.suppress(kvatlas.QueueFullError):
                    publisher.try_publish(Stored([9]))
                await asyncio.sleep(0)
        for late in (publisher.begin_epoch, publisher.flush):
            with pytest.raises(kvatlas.StoppedError):
                await late()
        await leaving
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(ends[-1], kvatlas.StoppedError)
        await here.nats.flush()
        batches = []
        while seen.pending_msgs:
            batches.append(msgpack.unpackb((await seen.next_msg(timeout=5)).data))
        assert batches[-1]["events"] == [{"type": "goodbye"}]
        assert len({batch["epoch"] for batch in batches}) == 1
