"""What a publisher keeps and says, without a broker."""

from __future__ import annotations

import msgpack
import pytest

from kvatlas import Cleared, Cursor, Doubted, Goodbye, InvalidValueError, Profile, PublisherOptions, RefusedError, Stored
from kvatlas._publish.outbox import Clocks, Outbox, ResyncRequest, SealedBatch
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
    [sealed] = outbox.add(0, [Cleared(), Doubted(["hashes_pairs"])], Clocks(60.0, 0))
    reasons = msgpack.unpackb(sealed.payload)["events"][1]["reasons"]
    assert reasons == ["hashes_pairs"], "nothing is left out any more"
    assert doubts(outbox, 60.0) == [["hashes_pairs"]]


def test_times_grow_where_the_clock_is_set_back() -> None:
    outbox = Outbox(PublisherOptions(batch_delay=0, epoch=1), 0, Clocks(0.0, 100))
    batches = [outbox.add(0, [Stored([block])], Clocks(0.0, now)) for block, now in ((1, 100), (2, 50), (3, 200))]
    times = [msgpack.unpackb(sealed.payload)["time_us"] for [sealed] in batches]
    assert times == [100, 101, 200]


def test_a_full_answer_waits_for_a_parent_for_a_moment_only() -> None:
    outbox = Outbox(PublisherOptions(batch_delay=0, epoch=1), 0, Clocks(0.0, 0))
    outbox.add(0, [Stored([1])], Clocks(0.0, 0))
    outbox.add(0, [Stored([8], parent=7)], Clocks(10.0, 0))
    with pytest.raises(RefusedError):
        full_state(outbox, 10.5)
    assert doubts(outbox, 11.0) == [["upstream_gap"]]
    assert len([event for event in full_state(outbox, 11.0) if event["type"] == "stored"]) == 1
    # Whoever was given that lacks the block, though the parent comes after all.
    outbox.add(0, [Stored([7])], Clocks(12.0, 0))
    [sealed] = outbox.add(0, [Doubted([])], Clocks(12.0, 0))
    assert msgpack.unpackb(sealed.payload)["events"][0]["reasons"] == ["upstream_gap"]
    assert doubts(outbox, 12.0) == [], "nothing is left out now"


@pytest.mark.parametrize("begin_anew", [True, False])
def test_the_state_of_a_new_epoch_is_known_whatever_was_before(begin_anew: bool) -> None:
    outbox = Outbox(PublisherOptions(batch_delay=0, after=Cursor(5, 7)), 0, Clocks(0.0, 10))
    outbox.add(0, [Stored([1])], Clocks(0.0, 10))
    with pytest.raises(RefusedError):
        full_state(outbox, 0.0)
    assert not outbox.rise_above(500, Clocks(1.0, 20))
    if begin_anew:
        outbox.begin_epoch(Clocks(1.0, 20))
    else:
        outbox.add(0, [Goodbye()], Clocks(1.0, 20))
    outbox.add(0, [Stored([2])], Clocks(1.0, 20))
    assert len(full_state(outbox, 1.0)) == 1
    assert outbox.rise_above(500, Clocks(1.0, 20))


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


def test_answers_keep_to_what_the_server_takes_now() -> None:
    outbox = Outbox(PublisherOptions(batch_delay=0, epoch=1), 0, Clocks(0.0, 0))
    outbox.add(0, [Stored(list(range(1 << 62, (1 << 62) + 5000)))], Clocks(0.0, 0))
    outbox.add(0, [Stored([1])], Clocks(0.0, 0))
    for limit, kind in ((1 << 20, "missing"), (4096, "full"), (1024, "full"), (1 << 20, "missing")):
        outbox.note_server_limit(limit)
        answer = outbox.answer(ResyncRequest(0, Cursor(1, 0), False), Clocks(0.0, 0))
        assert answer.kind == kind
        assert all(len(chunk) <= limit for chunk in answer.chunks)
        # What fits is given from the ring all the same.
        assert outbox.answer(ResyncRequest(0, Cursor(1, 1), False), Clocks(0.0, 0)).kind == "missing"
    outbox.note_server_limit(1024)
    assert sum(len(event["sequence_hashes"]) // 8 for event in full_state(outbox, 0.0)) == 5001


def test_what_no_longer_fits_into_one_batch_becomes_several() -> None:
    outbox = Outbox(PublisherOptions(epoch=1), 0, Clocks(0.0, 0))
    events = [Stored(list(range(root << 32, (root << 32) + 50))) for root in range(1, 7)]
    assert outbox.add(0, events, Clocks(0.0, 0)) == []
    # The next server takes less.
    outbox.note_server_limit(2048)
    sealed = outbox.seal(Clocks(0.0, 0)) + outbox.add(0, [*events, Doubted(["upstream_gap"])], Clocks(0.0, 0))
    assert [batch.cursor.seq for batch in sealed] == list(range(1, len(sealed) + 1))
    assert all(len(batch.payload) <= 2048 for batch in sealed)
    types = [[event["type"] for event in msgpack.unpackb(batch.payload)["events"]] for batch in sealed]
    assert len(sealed) > 2 and sum(types, []).count("stored") == 12
    of_doubt = types[-next(n for n in range(1, len(types)) if sum(types[-n:], []).count("stored") >= 6) :]
    assert all(part[-1] == "doubted" for part in of_doubt), "nothing is found exact in between"


def test_a_full_answer_has_no_batch_of_more_events_than_others() -> None:
    outbox = Outbox(PublisherOptions(batch_delay=0, epoch=1, batch_events_max=5), 0, Clocks(0.0, 0))
    for root in range(1, 13):
        outbox.add(0, [Stored([root << 32])], Clocks(0.0, 0))
    answer = outbox.answer(ResyncRequest(0, Cursor(0, 0), True), Clocks(0.0, 0))
    batches = [batch for chunk in answer.chunks for batch in msgpack.unpackb(chunk)["batches"]]
    assert [len(msgpack.unpackb(batch)["events"]) for batch in batches] == [5, 5, 2]


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
    now_us = 1_800_000_000_000_000
    asked = Outbox(PublisherOptions(), 0, Clocks(0.0, now_us))
    assert not asked.rise_above(4_000_000_000_000_000_000, Clocks(1.0, now_us)), "daemons would drop all that comes in one above"
    assert asked.rise_above(now_us + 60_000_000, Clocks(1.0, now_us))


def test_a_holder_comes_back_in_the_last_epoch_where_there_is_none_above() -> None:
    last = (1 << 64) - 1
    outbox = Outbox(PublisherOptions(batch_delay=0, epoch=last), 0, Clocks(0.0, 10))
    outbox.add(0, [Goodbye()], Clocks(0.0, 10))
    [back] = outbox.add(0, [Stored([1])], Clocks(0.0, 10))
    assert back.cursor == Cursor(last, 1)


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


def test_the_profile_is_told_first_with_every_heartbeat_and_with_the_full_state() -> None:
    here = Profile("10.0.0.7:8000", {"role": "prefill"})
    there = Profile("10.0.0.8:8000")
    outbox = Outbox(PublisherOptions(batch_delay=0, epoch=1, profile=here), 0, Clocks(0.0, 0))

    def told(sealed: list[SealedBatch]) -> list[tuple[object, object]]:
        batches = [msgpack.unpackb(batch.payload) for batch in sealed]
        return [(batch.get("address"), batch.get("labels")) for batch in batches]

    def stored() -> list[tuple[object, object]]:
        return told(outbox.add(0, [Stored([1])], Clocks(0.0, 0)))

    def fully() -> list[object]:
        answer = outbox.answer(ResyncRequest(0, Cursor(0, 0), True), Clocks(0.0, 0))
        batches = [msgpack.unpackb(batch) for chunk in answer.chunks for batch in msgpack.unpackb(chunk)["batches"]]
        return [batch["address"] for batch in batches if "address" in batch]

    all_of_it = ("10.0.0.7:8000", {"role": "prefill"})
    assert stored() == [all_of_it]
    assert stored() == [(None, None)]
    assert told(outbox.heartbeat(Clocks(0.0, 0))) == [all_of_it]
    assert fully() == ["10.0.0.7:8000"]
    assert told(outbox.set_profile(there, Clocks(0.0, 0))) == [("10.0.0.8:8000", None)]
    assert outbox.set_profile(there, Clocks(0.0, 0)) == []
    assert told(outbox.set_profile(Profile(), Clocks(0.0, 0))) == [("", None)]
    assert fully() == [""]
    # The new epoch has none, and nothing has to be said of that.
    assert told(outbox.begin_epoch(Clocks(0.0, 0))) == [(None, None)]
    outbox.set_profile(here, Clocks(0.0, 0))
    assert told(outbox.begin_epoch(Clocks(0.0, 0))) == [all_of_it]
    outbox.add(0, [Goodbye()], Clocks(0.0, 0))
    assert outbox.set_profile(there, Clocks(0.0, 0)) == []
    assert stored() == [("10.0.0.8:8000", None)]


@pytest.mark.parametrize(
    ("address", "labels"),
    [
        ("host", {}),
        ("host:0", {}),
        ("http://user@host:80", {}),
        ("host:80\n", {}),
        ("[host]:80", {}),
        ("http://host/?a", {}),
        (None, {"": "x"}),
        (None, {"a": "\x1b"}),
        (None, {str(number): "" for number in range(17)}),
        (None, {str(number): "x" * 127 for number in range(5)}),
    ],
)
def test_profiles_that_are_none(address: str | None, labels: dict[str, str]) -> None:
    with pytest.raises(InvalidValueError):
        Profile(address, labels)


@pytest.mark.parametrize("address", ["h_1.x:1", "[fd00::7]:8000", "https://h/v1", "grpc://[::1]:1"])
def test_addresses(address: str) -> None:
    assert Profile(address).entries() == {"address": address}


def test_a_profile_does_not_change_with_the_map_that_it_was_made_of() -> None:
    labels = {"a": "x"}
    profile = Profile(None, labels)
    labels["b"] = "\x1b"
    assert profile.entries() == {"labels": {"a": "x"}}
