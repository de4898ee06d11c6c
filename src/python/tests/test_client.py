"""The query client and the wrapper without `await`, against a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import msgpack
import nats.errors
import pytest
from processes import PATIENCE, Broker, Daemon, running
from world import NAMESPACE, eventually, hashes, options, world

import kvatlas
import kvatlas.hashing
import kvatlas.models
import kvatlas.sync
from kvatlas import LineageHash, Query, QueryClient, QueryReply, Removed, Stored, StoredByLineage
from kvatlas.gather import SHARD_HEADER
from kvatlas.wire import ERROR_CODE_HEADER


async def test_all_forms_of_a_query_get_the_same_answer(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        named = {"lora_name": "my-lora", "cache_salt": "tenant-a"}
        tokens = list(range(1, 101))
        blocks = kvatlas.block_hashes(tokens, **named)
        sequence = kvatlas.sequence_hashes(blocks)
        lineage = list(kvatlas.lineage_hashes(sequence))
        assert len(sequence) == 6, "the tail of four tokens is no block"
        await (await here.publisher("by-sequence")).publish(Stored(sequence[:5]))
        await (await here.publisher("by-lineage")).publish(StoredByLineage(lineage[:3]))
        expected = [("by-sequence", 0, 5, True), ("by-lineage", 0, 3, True)]
        await here.matching(sequence, expected)
        queries = [
            Query.by_tokens(tokens, **named),
            Query.by_block_hashes(blocks),
            Query.by_sequence_hashes(sequence),
            Query.by_lineage_hashes(lineage),
        ]
        alone = [await here.queries.query(NAMESPACE, query) for query in queries]
        for reply in (*alone, *await here.queries.query_batch(NAMESPACE, queries)):
            assert isinstance(reply, QueryReply)
            assert reply.query_blocks == 6
            found = [
                (holder.worker, holder.rank, holder.matched_blocks, holder.exact) for holder in reply.holders
            ]
            assert found == expected


async def test_a_connection_comes_back_before_daemons_count_on_everybody(broker: Broker) -> None:
    async with kvatlas.connect(broker.url) as connection:
        assert connection.options["reconnect_time_wait"] < 1, "a daemon waits for 1.5 s"
    async with kvatlas.connect(broker.url, reconnect_time_wait=3) as connection:
        assert connection.options["reconnect_time_wait"] == 3


async def test_a_model_is_named_as_it_is_served(broker: Broker, daemon: Daemon) -> None:
    model = "meta-llama/Llama-3.1-8B-Instruct"
    query = Query.by_sequence_hashes([11, 22])
    async with kvatlas.connect(broker.url) as connection:
        client = QueryClient(connection)
        async with await kvatlas.Publisher.start(connection, model=model, worker="gpu-0") as publisher:
            await publisher.publish(Stored([11, 22]))
            namespace = kvatlas.ModelKey(model).namespace()
            cursor = await publisher.flush()
            applied = await client.applied(model=model, worker="gpu-0", cursor=cursor)
            assert (applied.worker, applied.blocks) == ("gpu-0", 2)
            assert (await client.applied(namespace, "gpu-0", cursor)).blocks == 2
            later = kvatlas.Cursor(cursor.epoch, cursor.seq + 1000)
            with pytest.raises(kvatlas.TimedOutError, match=r"within 0\.05 s"):
                await client.applied(model=model, worker="gpu-0", cursor=later, patience=0.05)
            by_model = await client.query(model=model, query=query)
            assert by_model.holders == (await client.query(namespace, query)).holders
            assert [holder.matched_blocks for holder in by_model.holders] == [2]
            assert (await client.status(model=model)).holders
            (batched,) = await client.query_batch(model=model, queries=[query])
            assert isinstance(batched, QueryReply) and batched.holders == by_model.holders

            async def look() -> bool:
                return (await client.query(model=model, query=query)).exact

            # A daemon that has just started does not know yet who else there is.
            await eventually("the whole answer is exact", look)
        for wrong in ({}, {"namespace": namespace, "model": model}):
            with pytest.raises(kvatlas.InvalidValueError, match="either a namespace or a model"):
                await client.query(query=query, **wrong)
            with pytest.raises(kvatlas.InvalidValueError, match="either a namespace or a model"):
                await client.applied(worker="gpu-0", cursor=cursor, **wrong)
        with pytest.raises(kvatlas.InvalidValueError, match="no query"):
            await client.query(namespace)
        with pytest.raises(kvatlas.InvalidValueError, match="a worker and a cursor"):
            await client.applied(model=model, worker="gpu-0")
    assert connection.is_closed


async def test_what_requests_found_is_told(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here, kvatlas.connect(broker.url) as router:
        publisher = await here.publisher("gpu-0")
        await publisher.publish(Stored(hashes(1, 150)))
        await here.matching(hashes(1, 150), [("gpu-0", 0, 150, True)])
        heard = await here.nats.subscribe(f"kvatlas.v1.outcome.{NAMESPACE}")
        await here.nats.flush()
        client = QueryClient(router)
        reply = await client.query(NAMESPACE, Query.by_sequence_hashes(hashes(1, 150)))
        outcome = kvatlas.Outcome.of(reply.holders[0], found_tokens=16 * 120, prompt_tokens=16 * 150 + 1)
        await client.tell(NAMESPACE, [outcome] * 300)
        reports = [msgpack.unpackb((await heard.next_msg(PATIENCE)).data) for _ in range(2)]
        assert [len(report["outcomes"]) for report in reports] == [256, 44]
        assert reports[0]["outcomes"][0] == {
            "worker": "gpu-0",
            "rank": 0,
            "promised_blocks": 150,
            "found_tokens": 1920,
            "prompt_tokens": 2401,
            "exact": True,
        }


async def test_where_requests_are_sent_is_hinted(broker: Broker) -> None:
    with running(broker.url, hints_ttl_ms=60_000):
        async with world(broker.url) as here:
            publisher = await here.publisher("gpu-0")
            await publisher.publish(Stored(hashes(1, 4)))
            await here.matching(hashes(1, 4), [("gpu-0", 0, 4, True)])
            query = Query.by_sequence_hashes(hashes(1, 8))
            client = QueryClient(here.nats)

            async def look() -> tuple[kvatlas.Predicted, ...]:
                await client.hint(NAMESPACE, [kvatlas.Hint("gpu-0", query)])
                return (await client.query(NAMESPACE, query.narrowed(predicted=True))).predicted

            await eventually("a hint is heard", look)
            assert await look() == (kvatlas.Predicted("gpu-0", 0, 8, None),)
            reply = await client.query(NAMESPACE, query)
            assert reply.predicted == () and reply.holders[0].matched_blocks == 4
            with pytest.raises(kvatlas.InvalidValueError):
                await client.hint(NAMESPACE, [kvatlas.Hint("a.b", query)])


async def test_a_query_has_a_patience_of_its_own(broker: Broker) -> None:
    async with kvatlas.connect(broker.url) as connection:
        # Somebody hears it and says nothing.
        silent = await connection.subscribe("kvatlas.v1.query.*")
        await connection.flush()
        with pytest.raises(kvatlas.TimedOutError, match=r"0\.05"):
            await QueryClient(connection, patience=3600.0).query(
                NAMESPACE, Query.by_sequence_hashes([1]), patience=0.05
            )
        # A connection waits at its end until all is read.
        await silent.unsubscribe()


def test_an_answer_is_exact_where_all_of_it_is() -> None:
    def reply(**changed: Any) -> QueryReply:
        fields = {"query_blocks": 1, "holders": (), "holders_total": 0, "foreign_holders": 0, "doubtful_holders": 0}
        rest = {"unseen_blocks_max": 0, "gathered": None, "behind_us": 0, "fields": {}}
        return QueryReply(**(fields | rest | changed))

    class Holder:
        def __init__(self, exact: bool) -> None:
            self.exact = exact

    assert reply().exact and reply(holders=(Holder(True),)).exact
    assert reply(gathered=kvatlas.Gathered(shards=2, missing=())).exact
    for doubt in (
        {"foreign_holders": 1},
        {"doubtful_holders": 1},
        {"holders": (Holder(True), Holder(False))},
        {"gathered": kvatlas.Gathered(shards=2, missing=(1,))},
    ):
        assert not reply(**doubt).exact, doubt


def test_a_query_keeps_the_options_that_are_not_given_again() -> None:
    query = Query.by_tokens([1]).narrowed(workers=["a"], limit=2, min_blocks=3, explain=True)
    again = query.narrowed(tiers=True, limit=4)
    expected = ({"workers": ["a"], "limit": 4, "min_blocks": 3, "explain": True, "tiers": True}).items()
    assert expected <= again.entries().items()
    assert again.narrowed(workers=None, limit=None, min_blocks=0, explain=False, tiers=False) == Query.by_tokens([1])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_a_number_each(kind: type) -> None:
    text = bytes(range(64))
    assert kvatlas.block_hashes(kind(text)) == kvatlas.block_hashes(list(text))
    assert Query.by_tokens(kind(text)) == Query.by_tokens(list(text))
    assert Query.by_sequence_hashes(kind(text)) == Query.by_sequence_hashes(list(text))
    assert Stored(kind(text), engine_hashes=kind(text)) == Stored(list(text), engine_hashes=list(text))


async def test_options_narrow_the_answer_and_explain_it(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        for worker, count in [("a", 5), ("b", 3), ("c", 5), ("d", 1)]:
            await (await here.publisher(worker)).publish(Stored(hashes(10, count)))
        everybody = [("a", 0, 5, True), ("c", 0, 5, True), ("b", 0, 3, True), ("d", 0, 1, True)]
        await here.matching(hashes(10, 6), everybody)

        async def names(**narrowed: object) -> list[str]:
            return [holder.worker for holder in (await here.ask(hashes(10, 6), **narrowed)).holders]

        assert await names(min_blocks=3) == ["a", "c", "b"]
        assert await names(workers=["b", "d", "nobody"]) == ["b", "d"]
        limited = await here.ask(hashes(10, 6), limit=2)
        assert (len(limited.holders), limited.holders_total) == (2, 4)
        explained = await here.ask(hashes(10, 6), explain=True)
        dropped = explained.holders[2].dropped_out
        assert dropped is not None
        lineage = list(kvatlas.lineage_hashes(hashes(10, 6)))
        assert (dropped.position, dropped.lineage_hash, dropped.other_holders) == (3, lineage[3], 2)


async def test_storage_that_all_workers_share_is_told_from_workers(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        for worker in ("gpu-0", "_pmain"):
            await (await here.publisher(worker)).publish(Stored([1]))
        await here.matching([1], [("_pmain", 0, 1, True), ("gpu-0", 0, 1, True)])
        assert [holder.kind for holder in (await here.ask([1])).holders] == ["pool", None]


async def test_a_compressed_chain_has_bounds(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        await (await here.publisher()).publish(Stored(hashes(10, 100)))
        await here.matching(hashes(10, 100), [("gpu-0", 0, 100, True)])
        positions = [0, 64, 128]
        query = Query.by_sequence_hashes([10 + position for position in positions], positions=positions)
        reply = await here.queries.query(NAMESPACE, query)
        [holder] = reply.holders
        assert (holder.matched_blocks, holder.matched_blocks_max, reply.query_blocks) == (65, 128, 129)
        lineage = list(kvatlas.lineage_hashes(hashes(10, 129)))
        chosen = [lineage[position] for position in positions]
        assert (
            await here.queries.query(NAMESPACE, Query.by_lineage_hashes(chosen, positions=positions)) == reply
        )


async def test_every_error_has_a_type(tmp_path: Path) -> None:
    with Broker(tmp_path / "broker", max_payload=32_768) as broker:
        async with world(broker.url, has_daemon=False) as here:
            short = QueryClient(here.nats, patience=0.1)
            with pytest.raises(kvatlas.NoDaemonError):
                await short.status(NAMESPACE)
            # Somebody who listens, and says nothing.
            silent = await here.nats.subscribe("kvatlas.v1.status.llama")
            with pytest.raises(kvatlas.TimedOutError):
                await short.status(NAMESPACE)
            await silent.unsubscribe()

            async def garbage(question: object) -> None:
                await question.respond(b"garbage")  # type: ignore[attr-defined]

            answering = await here.nats.subscribe("kvatlas.v1.status.llama", cb=garbage)
            with pytest.raises(kvatlas.UndecodableError):
                await here.queries.status(NAMESPACE)
            await answering.unsubscribe()
        with Daemon(broker.url, queries_max_depth_blocks=100) as _:
            async with world(broker.url) as here:
                assert (await here.unknown("nobody")).code == 404
                await (await here.publisher()).publish(Stored([1]))
                await here.matching([1], [("gpu-0", 0, 1, True)])
                with pytest.raises(kvatlas.LimitExceededError):
                    await here.ask(hashes(1, 101))
                with pytest.raises(kvatlas.BadRequestError):
                    await here.queries.query(NAMESPACE, Query({}))
                apart = [Query.by_sequence_hashes([1]), Query.by_sequence_hashes(hashes(1, 101))]
                with pytest.raises(kvatlas.LimitExceededError):
                    await here.queries.query_batch(NAMESPACE, apart)
                with pytest.raises(kvatlas.RequestTooLargeError):
                    await here.ask(hashes(1, 5000))
        with pytest.raises(kvatlas.ConnectionFailedError):
            await here.queries.status(NAMESPACE)
    with pytest.raises(kvatlas.ConnectionFailedError):
        await kvatlas.connect(broker.url, patience=0.2)


@pytest.mark.parametrize("subject", ["kvatlas.v1.status.llama", "kvatlas.v1.shards.status.llama"])
async def test_a_request_that_nobody_listens_to_is_sent_again_for_a_moment(broker: Broker, subject: str) -> None:
    gathering = ".shards." in subject
    async with world(broker.url, has_daemon=False) as here:
        patient = QueryClient(here.nats, patience=600.0, gathering=gathering)
        waiting = asyncio.create_task(patient.status(NAMESPACE))
        # Both ask on one connection, one after the other: when this one has heard that nobody is there, so has the other.
        await asyncio.sleep(0)
        with pytest.raises(kvatlas.NoDaemonError):
            await QueryClient(here.nats, patience=2.0, gathering=gathering).status(NAMESPACE)
        assert not waiting.done()

        async def answer(question: object) -> None:
            headers = {SHARD_HEADER: "0/1", ERROR_CODE_HEADER: "799"}
            await here.nats.publish(question.reply, headers=headers)  # type: ignore[attr-defined]

        answering = await here.nats.subscribe(subject, cb=answer)
        with pytest.raises(kvatlas.RefusedError, match="799"):
            await waiting
        await answering.unsubscribe()


def test_the_clients_without_await(broker: Broker, daemon: Daemon) -> None:
    with kvatlas.sync.connect(broker.url, patience=30.0) as connection:
        queries = connection.queries()
        with connection.publisher(model="llama", worker="gpu-0", options=options()) as publisher:
            publisher.publish(Stored(hashes(10, 3)))
            publisher.try_publish(Removed([12]))
            cursor = publisher.flush()
            assert cursor.seq >= 2
            assert publisher.cursor >= cursor
            while True:
                try:
                    reply = queries.query("llama", Query.by_sequence_hashes(hashes(10, 3)))
                except (kvatlas.NoDaemonError, kvatlas.UnavailableError, kvatlas.UnknownNamespaceError):
                    continue
                if reply.holders and reply.holders[0].exact and reply.holders[0].matched_blocks == 2:
                    break
            assert queries.applied(model="llama", worker="gpu-0", cursor=cursor).blocks == 2
            found = queries.status("llama").holder("gpu-0")
            assert found is not None
            assert found.blocks == 2
            results: list[object] = []

            def from_another_thread() -> None:
                results.extend(queries.query_batch("llama", [Query.by_sequence_hashes([10])] * 2))

            thread = threading.Thread(target=from_another_thread)
            thread.start()
            thread.join(30)
            assert len(results) == 2
        with pytest.raises(kvatlas.StoppedError):
            publisher.publish()
        while queries.status("llama").holder("gpu-0") is not None:
            pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_process_connects_anew_and_its_parents_connection_stays(broker: Broker, daemon: Daemon) -> None:
    with kvatlas.sync.connect(broker.url, patience=30.0) as connection:
        queries = connection.queries()
        with connection.publisher(model="llama", worker="gpu-0", options=options()) as publisher:
            publisher.publish(Stored([10]))
            queries.applied(model="llama", worker="gpu-0", cursor=publisher.flush())
            child = os.fork()
            if child == 0:
                outcome = 1
                try:
                    signal.alarm(60)
                    with contextlib.suppress(RuntimeError):
                        queries.status("llama")
                        os._exit(2)
                    with kvatlas.sync.connect(broker.url, patience=30.0) as own:
                        outcome = 0 if own.queries().status("llama").holder("gpu-0") else 3
                finally:
                    os._exit(outcome)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            assert queries.status("llama").holder("gpu-0") is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stored([-1]),
        lambda: Stored([1 << 64]),
        lambda: Stored(["1"]),
        lambda: Stored([1], position=3),
        lambda: Stored([1], parent=5, position=0),
        lambda: Stored([1], parent=1 << 64),
        lambda: Stored([1], position=-1),
        lambda: Stored([1, 2], parent=5, position=(1 << 24) - 1),
        lambda: Stored([1, 2], engine_hashes=[1]),
        lambda: Stored([1, 2], block_hashes=[1]),
        lambda: Stored([1, 2], tokens=[1, 2, 3]),
        lambda: Stored([1], tokens=[1 << 32]),
        lambda: Stored([1], tokens=[1], block_hashes=[1]),
        lambda: Stored([1], tokens=[1], lora_name="x" * 1025),
        lambda: Stored([1], lora_name="x"),
        lambda: StoredByLineage([LineageHash.of(1, None, 0)], engine_hashes=[]),
        lambda: Query.by_sequence_hashes([1], positions=[]),
        lambda: Query.by_sequence_hashes([1, 2], positions=[5, 5]),
        lambda: Query.by_sequence_hashes([1], positions=[1 << 24]),
        lambda: Query.by_tokens([-1]),
        lambda: Query.by_tokens([1], cache_salt="x" * 1025),
        lambda: Query.by_tokens([1]).narrowed(workers=["a.b"]),
        lambda: Query.by_tokens([1]).narrowed(workers="gpu-0"),
        lambda: Query.by_tokens([1]).narrowed(limit=-1),
        lambda: kvatlas.PublisherOptions(epoch=1, after=kvatlas.Cursor(1, 1)),
        lambda: kvatlas.PublisherOptions(heartbeat_interval=0),
        lambda: kvatlas.PublisherOptions(hashing="other"),
        lambda: kvatlas.PublisherOptions(heartbeat_interval=float("nan")),
        lambda: kvatlas.PublisherOptions(epoch=-1),
        lambda: kvatlas.PublisherOptions(epoch=1 << 64),
        lambda: kvatlas.PublisherOptions(epoch=1.5),
        lambda: kvatlas.PublisherOptions(after=kvatlas.Cursor(-1, 1)),
        lambda: kvatlas.PublisherOptions(after=kvatlas.Cursor(1, 1 << 63)),
        lambda: kvatlas.PublisherOptions(block_size=(1 << 16) + 1),
        lambda: kvatlas.PublisherOptions(block_size=16.0),
        lambda: LineageHash(1 << 130),
        lambda: LineageHash(-1),
        lambda: LineageHash(3 << 126),
        lambda: LineageHash(1 << 60),
        lambda: LineageHash(1.0),
        lambda: StoredByLineage([5]),
        lambda: Removed(lineage_hashes=[5]),
        lambda: kvatlas.Resumable(lineage_hashes=[5]),
        lambda: Query.by_lineage_hashes([5]),
        lambda: Stored([1], parent=1.5),
        lambda: Stored([1], parent=1, position=1.5),
        lambda: Stored([1], resumable=[0.5]),
        lambda: kvatlas.block_hashes([1], 0),
        lambda: kvatlas.Doubted(["gap"]),
    ],
)
def test_what_the_contract_does_not_allow_cannot_be_said(make: object) -> None:
    with pytest.raises(kvatlas.InvalidValueError):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("model", "tenant", "namespace"),
    [
        ("llama", "default", "llama"),
        ("meta-llama/Llama-3.1-8B-Instruct", "", "meta-llama__Llama-3_d1-8B-Instruct"),
        ("Qwen/Qwen3:latest", "acme", "Qwen__Qwen3_clatest_tacme"),
        ("my_model", "a_b", "my_umodel_ta_ub"),
        ("ä", "default", "_xc3_xa4"),
    ],
)
def test_models_are_namespaces(model: str, tenant: str, namespace: str) -> None:
    key = kvatlas.ModelKey(model, tenant)
    assert key.namespace() == namespace
    assert kvatlas.ModelKey.of_namespace(namespace) == key


def test_every_name_leads_back_to_its_model() -> None:
    pick = random.Random(7)
    for _ in range(3000):
        name = "".join(pick.choices("abc_tdux0_9-", k=pick.randrange(1, 13)))
        key = kvatlas.ModelKey.of_namespace(name)
        assert key is None or key.namespace() == name
        model, tenant = ("".join(pick.choices("ab_/.:tdux ä", k=pick.randrange(1, 7))) for _ in range(2))
        key = kvatlas.ModelKey(model, tenant)
        assert kvatlas.ModelKey.of_namespace(key.namespace()) == key
        assert kvatlas.instance_of_worker(kvatlas.worker_of_instance(model)) == model
    for name in ["a_", "a_q", "_x2", "_x2d", "_xC3_xa4", "_xff", "a_t", "a_tdefault", "a_tb_tc", "_ta"]:
        assert kvatlas.ModelKey.of_namespace(name) is None, name
    assert kvatlas.instance_of_worker("a_q") == "a_q"
    for model in ("", "." * 33):
        with pytest.raises(kvatlas.InvalidValueError):
            kvatlas.ModelKey(model).namespace()


def test_the_examples_in_the_documentation_hold() -> None:
    for module in (kvatlas.hashing, kvatlas.models):
        outcome = doctest.testmod(module)
        assert outcome.attempted > 0
        assert outcome.failed == 0


def test_errors_are_of_one_family() -> None:
    assert issubclass(kvatlas.TimedOutError, TimeoutError)
    assert issubclass(kvatlas.InvalidValueError, ValueError)
    assert not issubclass(kvatlas.KvatlasError, nats.errors.Error)
