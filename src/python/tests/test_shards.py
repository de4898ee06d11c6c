"""A client that gathers the answers of shards says what one daemon with all workers would say."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import msgpack
import pytest
from nats.aio.msg import Msg
from processes import Broker, running
from world import NAMESPACE, eventually, hashes, world

import kvatlas
from kvatlas import Query, QueryClient, QueryReply, Stored
from kvatlas.gather import REPLIES_MAX, SHARDS_MAX, Collection, _collect, merge_replies, merge_statuses
from kvatlas.wire import ERROR_CODE_HEADER, ERROR_HEADER, Gathered, decode_query_reply, decode_status_reply

WORKERS = 9


async def test_a_client_gathers_what_one_daemon_would_say(broker: Broker) -> None:
    with contextlib.ExitStack() as stack:
        daemons = [stack.enter_context(running(broker.url, shard=f"{index}/3")) for index in range(3)]
        async with world(broker.url, has_daemon=False) as here:
            queries = QueryClient(here.nats, gathering=True)
            chain = Query.by_sequence_hashes(hashes(10, 20))
            for number in range(WORKERS):
                publisher = await here.publisher(f"gpu-{number}")
                await publisher.publish(Stored(hashes(10, number + 1)))
            expected = [(f"gpu-{number}", number + 1) for number in reversed(range(WORKERS))]

            async def all_known() -> QueryReply | None:
                try:
                    reply = await queries.query(NAMESPACE, chain)
                except (kvatlas.NoDaemonError, kvatlas.RefusedError):
                    return None
                is_whole = reply.gathered is not None and not reply.gathered.missing
                is_exact = all(holder.exact for holder in reply.holders)
                return reply if is_whole and is_exact and len(reply.holders) == WORKERS else None

            reply = await eventually("all workers are known", all_known)
            assert [(holder.worker, holder.matched_blocks) for holder in reply.holders] == expected
            assert reply.gathered is not None
            assert (reply.gathered.shards, reply.holders_total) == (3, WORKERS)
            # The limit holds for the whole, not for each shard.
            limited = chain.narrowed(limit=4)
            first, second = await queries.query_batch(NAMESPACE, [limited, chain])
            assert isinstance(first, QueryReply)
            assert isinstance(second, QueryReply)
            assert [(holder.worker, holder.matched_blocks) for holder in first.holders] == expected[:4]
            assert len(second.holders) == WORKERS
            status = await queries.status(NAMESPACE)
            assert [holder.worker for holder in status.holders] == [
                f"gpu-{number}" for number in range(WORKERS)
            ]
            async def unknown() -> bool | None:
                try:
                    await queries.status("nobody")
                except kvatlas.UnknownNamespaceError:
                    return True
                except kvatlas.UnavailableError:
                    return None
                return False

            assert await eventually("all shards know who publishes", unknown)

            # Without a shard the answer says which.
            gone = kvatlas.shard_of("gpu-0", 3)
            daemons[gone].stop()
            queries.patience = 0.5
            partial = await queries.query(NAMESPACE, chain)
            assert partial.gathered is not None
            assert partial.gathered.missing == (gone,)
            left = [(worker, depth) for worker, depth in expected if kvatlas.shard_of(worker, 3) != gone]
            assert [(holder.worker, holder.matched_blocks) for holder in partial.holders] == left
            with pytest.raises(kvatlas.UnavailableError):
                await queries.status("nobody")
            for daemon in daemons:
                daemon.stop()
            with pytest.raises(kvatlas.NoDaemonError):
                await queries.query(NAMESPACE, chain)


def test_an_answer_is_as_old_as_the_oldest_of_its_shards() -> None:
    gathered = Gathered(3, ())
    query = {"v": 1, "query_blocks": 2, "holders": [], "holders_total": 0}
    status = {"v": 1, "block_size": 16, "distinct_blocks": 0, "batches_waiting": 0, "holders": []}
    ages: list[dict[str, int]] = [{}, {"behind_us": 700}, {"behind_us": 30}]
    replies = [decode_query_reply(msgpack.packb(query | age)) for age in ages]
    statuses = [decode_status_reply(msgpack.packb(status | age)) for age in ages]
    merged = merge_replies(replies, Query.by_sequence_hashes(hashes(10, 2)), gathered)
    assert (merged.behind_us, merge_statuses(statuses, gathered).behind_us) == (700, 700)


def test_shards_with_blocks_of_other_sizes_give_no_answer() -> None:
    gathered = Gathered(2, ())

    def merged(*sizes: int) -> QueryReply:
        fields = {"v": 1, "query_blocks": 2, "holders": [], "holders_total": 0}
        told = [fields | ({"block_size": size} if size else {}) for size in sizes]
        replies = [decode_query_reply(msgpack.packb(reply)) for reply in told]
        return merge_replies(replies, Query.by_sequence_hashes(hashes(10, 2)), gathered)

    assert [merged(*sizes).block_size for sizes in [(16, 16), (0, 16), (16, 0), (0, 0)]] == [16, 16, 16, 0]
    for sizes in [(16, 32), (0, 16, 32)]:
        with pytest.raises(kvatlas.UnavailableError, match="tokens a block has"):
            merged(*sizes)


def test_no_more_predictions_are_merged_than_a_reply_has() -> None:
    def reply(shard: int) -> QueryReply:
        predicted = [{"worker": f"w{number}", "rank": shard, "blocks": number} for number in range(1, 41)]
        told = {"v": 1, "query_blocks": 40, "holders": [], "holders_total": 0, "predicted": predicted}
        return decode_query_reply(msgpack.packb(told))

    query = Query.by_sequence_hashes(hashes(10, 40))
    merged = merge_replies([reply(0), reply(1)], query, Gathered(2, ())).predicted
    assert len(merged) == 64
    assert (merged[0].blocks, merged[-1].blocks) == (40, 9)


def test_holders_that_are_left_out_are_added_up() -> None:
    status = {"v": 1, "block_size": 16, "distinct_blocks": 0, "batches_waiting": 0, "holders": []}
    told = [status | {"refused_holders": 2, "unheard_holders": 1}, status, status | {"refused_holders": 3, "unheard_holders": 1}]
    statuses = [decode_status_reply(msgpack.packb(found)) for found in told]
    merged = merge_statuses(statuses, Gathered(3, ()))
    assert (merged.refused_holders, merged.unheard_holders) == (5, 2)


def test_whoever_is_cut_off_and_may_hold_more_is_counted() -> None:
    def reply(worker: str, blocks: int, *, exact: bool, doubtful: int) -> QueryReply:
        holder = {"worker": worker, "rank": 0, "matched_blocks": blocks, "exact": exact}
        found = {"v": 1, "query_blocks": 9, "holders": [holder], "holders_total": 1}
        return decode_query_reply(msgpack.packb(found | {"doubtful_holders": doubtful}))

    replies = [
        reply("a", 5, exact=False, doubtful=1),
        reply("b", 4, exact=False, doubtful=0),
        reply("c", 3, exact=True, doubtful=2),
    ]
    for limit, doubtful in [(None, 3), (3, 3), (2, 3), (1, 4), (0, 5)]:
        query = Query.by_sequence_hashes(hashes(10, 9)).narrowed(limit=limit)
        assert merge_replies(replies, query, Gathered(3, ())).doubtful_holders == doubtful


async def test_replies_that_are_of_no_use(broker: Broker) -> None:
    """Shards that answer nonsense count as missing, and a change of their number is told apart."""
    async with world(broker.url, has_daemon=False) as here:
        queries = QueryClient(here.nats, gathering=True, patience=0.5)
        empty = bytes.fromhex("85a17601aa626c6f636b5f73697a6510af64697374696e63745f626c6f636b7300")
        empty += bytes.fromhex("af626174636865735f77616974696e6700a7686f6c6465727390")

        async def answer(question: object) -> None:
            for shard, payload in [
                ("0/2", b"garbage"),
                ("1/2", empty),
                ("0/3", empty),
                ("0/3", b"a second one"),
                ("4/3", empty),
                ("x", empty),
                ("1/3", empty),
            ]:
                headers = {"Kvatlas-Shard": shard}
                await here.nats.publish(question.reply, payload, headers=headers)  # type: ignore[attr-defined]

        await here.nats.subscribe("kvatlas.v1.shards.status.llama", cb=answer)
        status = await queries.status(NAMESPACE)
        assert status.gathered == kvatlas.Gathered(2, (0,)), "the division that was complete first"


def test_replies_for_shards_without_end_are_not_collected() -> None:
    small, large = Msg(None, data=b"x"), Msg(None, data=b"x" * 60)  # type: ignore[arg-type]
    collection = Collection(bytes_max=100)
    assert not collection.add((0, 3), large)
    assert collection.add((0, 200), large), "there is no room for its bytes"
    assert collection.best() == (3, {0: large})
    collection = Collection()
    shards = [(index, count) for count in range(2, SHARDS_MAX + 1) for index in range(count - 1)]
    kept = next(number for number, shard in enumerate(shards) if collection.add(shard, small))
    assert kept == REPLIES_MAX


def _reply(code: str | None) -> Msg:
    return Msg(None, headers=None if code is None else {ERROR_CODE_HEADER: code})  # type: ignore[arg-type]


class _Line:
    """A connection on which these messages come, one a second. Where there is none, the link is a new one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *messages: Msg | None) -> None:
        self.stats = {"reconnects": 0}
        self.left = list(messages)
        self.now = 0.0
        monkeypatch.setattr("kvatlas._connection.time", SimpleNamespace(monotonic=lambda: self.now))

    def new_inbox(self) -> str:
        return "_INBOX.own"

    async def subscribe(self, _inbox: str, pending_msgs_limit: int) -> _Line:
        return self

    async def unsubscribe(self) -> None:
        pass

    async def publish(self, _subject: str, _payload: bytes, reply: str) -> None:
        pass

    async def next_msg(self, _timeout: float) -> Msg:
        self.now += 1.0
        message = self.left.pop(0)
        if message is None:
            self.stats["reconnects"] += 1
            raise asyncio.TimeoutError
        return message


async def test_nobody_may_listen_for_a_moment_on_each_link(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = Msg(None, headers={"Status": "503"})  # type: ignore[arg-type]
    reply = Msg(None, data=b"x", headers={"Kvatlas-Shard": "0/2"})  # type: ignore[arg-type]
    # The moment has two seconds.
    for messages, kept in (
        ([nobody, nobody, nobody], None),
        ([nobody, None, nobody, nobody, None, nobody, nobody, nobody], None),
        ([nobody, None, None, nobody, nobody, reply, nobody], 1),
    ):
        line, collection = _Line(monkeypatch, *messages), Collection()
        asking = _collect(line, "asked", b"", 40.0, collection)  # type: ignore[arg-type]
        if kept is None:
            with pytest.raises(kvatlas.NoDaemonError):
                await asking
        else:
            await asking
        assert line.left == []
        assert len((collection.best() or (0, {}))[1]) == (kept or 0)


@pytest.mark.parametrize("code", ["503", "404"])
def test_new_shards_that_refuse_do_not_speak_for_old_ones_that_answer(code: str) -> None:
    refused, answer = _reply(code), _reply(None)
    heard, expected = Collection(), Collection(expected=2)
    assert not heard.add((0, 2), answer)
    for collection in (heard, expected):
        for index in range(3):
            assert not collection.add((index, 3), refused)
    assert expected.expected_next() is None, "the old shards have gone"
    assert not expected.add((0, 2), answer)
    for collection in (heard, expected):
        assert collection.add((1, 2), answer)
        assert collection.best() == (2, {0: answer, 1: answer})
        assert collection.expected_next() == 2


@pytest.mark.parametrize("codes", [("503", "503"), ("404", "404"), (None, "503"), (None, "404"), ("404", "503")])
def test_a_division_alone_ends_the_wait_whatever_its_shards_reply(codes: tuple[str | None, str]) -> None:
    collection = Collection()
    assert not collection.add((0, 2), _reply(codes[0]))
    assert collection.add((1, 2), _reply(codes[1]))
    assert collection.expected_next() == (2 if codes == (None, "404") else None)


def test_shards_that_have_answered_before_are_believed_that_nobody_knows_the_namespace() -> None:
    collection = Collection(expected=2)
    assert not collection.add((0, 3), _reply("503"))
    assert not collection.add((0, 2), _reply("404"))
    assert collection.add((1, 2), _reply("404"))


@pytest.mark.parametrize("code", ["503", "429"])
async def test_a_shard_that_is_busy_is_missing(broker: Broker, code: str) -> None:
    async with world(broker.url, has_daemon=False) as here:
        queries = QueryClient(here.nats, gathering=True, patience=0.5)
        empty = bytes.fromhex("85a17601aa626c6f636b5f73697a6510af64697374696e63745f626c6f636b7300")
        empty += bytes.fromhex("af626174636865735f77616974696e6700a7686f6c6465727390")

        async def answer(question: object) -> None:
            busy = {"Kvatlas-Shard": "0/2", ERROR_CODE_HEADER: code, ERROR_HEADER: "busy"}
            for headers, payload in [(busy, b""), ({"Kvatlas-Shard": "1/2"}, empty)]:
                await here.nats.publish(question.reply, payload, headers=headers)  # type: ignore[attr-defined]

        await here.nats.subscribe("kvatlas.v1.shards.status.llama", cb=answer)
        status = await queries.status(NAMESPACE)
        assert status.gathered == kvatlas.Gathered(2, (0,))
