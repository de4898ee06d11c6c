"""What a publisher keeps and says, without a broker."""

from __future__ import annotations

import msgpack
import pytest

from kvatlas import Cleared, Cursor, Doubted, PublisherOptions, Stored
from kvatlas._publish.outbox import Clocks, Outbox, ResyncRequest
from kvatlas.hashing import POSITION_MAX


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


def test_an_epoch_is_put_above_the_one_that_a_daemon_knows() -> None:
    outbox = Outbox(PublisherOptions(batch_delay=0, epoch=5), 0, Clocks(0.0, 10))
    outbox.add(0, [Stored([1])], Clocks(0.0, 10))
    assert not outbox.rise_above(5, Clocks(1.0, 20))
    assert not outbox.rise_above((1 << 64) - 1, Clocks(1.0, 20)), "nothing is above that"
    assert not outbox.rise_above(15, Clocks(1.0, 20)), "a younger process has begun"
    assert outbox.rise_above(500, Clocks(1.0, 20))
    assert outbox.cursor == Cursor(501, 1)
    stored = [event for event in full_state(outbox, 1.0) if event["type"] == "stored"]
    assert len(stored) == 1, "the blocks are the same"
    [heartbeat] = outbox.heartbeat(Clocks(2.0, 30))
    assert heartbeat.cursor == Cursor(501, 2), "number 1 was never sent"
    assert outbox.answer(ResyncRequest(0, Cursor(501, 0), False), Clocks(2.0, 30)).kind == "full"
    assert not outbox.rise_above(600, Clocks(3.0, 40)), "the other one lives"
    # A younger process has replaced one that is not new any more.
    old = Outbox(PublisherOptions(epoch=5), 0, Clocks(0.0, 10))
    assert not old.rise_above(100, Clocks(61.0, 200))
    assert not old.rise_above(300, Clocks(61.0, 200)), "clocks may differ"
    assert old.rise_above(6_000_000, Clocks(61.0, 200)), "by the clock it has not begun"


def test_every_batch_says_how_many_tokens_a_block_has() -> None:
    outbox = Outbox(PublisherOptions(batch_delay=0, epoch=1, block_size=64), 0, Clocks(0.0, 0))
    [sealed] = outbox.add(0, [Stored([1])], Clocks(0.0, 0))
    [heartbeat] = outbox.heartbeat(Clocks(1.0, 0))
    answer = outbox.answer(ResyncRequest(0, Cursor(0, 0), True), Clocks(1.0, 0))
    batches = [batch for chunk in answer.chunks for batch in msgpack.unpackb(chunk)["batches"]]
    payloads = [sealed.payload, heartbeat.payload, *batches]
    assert [msgpack.unpackb(payload)["block_size"] for payload in payloads] == [64, 64, 64]


def test_only_what_follows_a_batch_closely_waits() -> None:
    outbox = Outbox(PublisherOptions(batch_delay=0.5, epoch=1), 0, Clocks(0.0, 0))
    assert outbox.due() is None
    outbox.add(0, [Stored([1])], Clocks(10.0, 10))
    due = outbox.due()
    assert due is not None and due <= 10.0, "nothing was sent before it"
    assert len(outbox.seal(Clocks(10.0, 10))) == 1
    outbox.add(0, [Stored([2])], Clocks(10.1, 11))
    assert outbox.due() == 10.5
