"""The contract's vectors, which the Rust implementation computes, against this package."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from typing import Any

import msgpack
import pytest
from processes import REPOSITORY

import kvatlas
from kvatlas import (
    Cleared,
    Cursor,
    Doubted,
    Event,
    Goodbye,
    LineageHash,
    Query,
    QueryReply,
    Removed,
    Resumable,
    Stored,
    StoredByLineage,
    Subjects,
    encode_batch,
)
from kvatlas._publish.outbox import Clocks, Outbox, ResyncRequest
from kvatlas.queries import encode_queries, encode_query
from kvatlas.wire import (
    decode_batch_reply,
    decode_query_reply,
    decode_status_reply,
    encode_hint,
)

VECTORS: dict[str, Any] = json.loads((REPOSITORY / "deploy/test-vectors.json").read_text())


def each(section: str, name: str = "name") -> Any:
    vectors = VECTORS[section]
    ids = [str(vector.get(name, "")) if isinstance(vector, dict) else vector for vector in vectors]
    return pytest.mark.parametrize("vector", vectors, ids=ids)


def hexes(values: list[int]) -> list[str]:
    return [f"{value:016x}" for value in values]


def unhex(values: list[str]) -> list[int]:
    return [int(value, 16) for value in values]


def lineage(values: list[str]) -> list[LineageHash]:
    return [LineageHash.from_bytes(bytes.fromhex(value)) for value in values]


def test_every_section_is_checked() -> None:
    checked = {mark.args[1] is VECTORS[name] and name for mark in MARKS for name in VECTORS if mark.args}
    sections = {name for name, vectors in VECTORS.items() if isinstance(vectors, list)}
    unchecked = sections - checked
    assert unchecked == {"batches_refused", "llmd_keys", "sglang_pages", "vllm_blocks"}, "what is refused is for daemons to check, and schemes are for bridges"


@each("hashes")
def test_hashes(vector: dict[str, Any]) -> None:
    named = {"lora_name": vector["lora_name"], "cache_salt": vector["cache_salt"]}
    assert f"{kvatlas.cache_seed(**named):016x}" == vector["seed"]
    blocks = kvatlas.block_hashes(vector["tokens"], vector["block_size"], **named)
    assert hexes(blocks) == vector["block_hashes"]
    sequence = kvatlas.sequence_hashes(blocks)
    assert hexes(sequence) == vector["sequence_hashes"]
    assert [str(found) for found in kvatlas.lineage_hashes(sequence)] == vector["lineage_hashes"]


@each("lineage", "position")
def test_lineage_hashes(vector: dict[str, Any]) -> None:
    parent = None if vector["parent"] is None else int(vector["parent"], 16)
    packed = LineageHash.of(int(vector["current"], 16), parent, vector["position"])
    assert str(packed) == vector["lineage_hash"]
    assert LineageHash.from_bytes(packed.to_bytes()) == packed
    assert (packed.mode, packed.position) == (vector["mode"], vector["position"])
    assert f"{packed.current_fragment:016x}" == vector["current_fragment"]
    assert f"{packed.parent_fragment:016x}" == vector["parent_fragment"]


@each("lineage_refused", "why")
def test_lineage_hashes_that_no_block_has(vector: dict[str, Any]) -> None:
    with pytest.raises(kvatlas.InvalidValueError):
        LineageHash.from_bytes(bytes.fromhex(vector["lineage_hash"]))


def test_lineage_hashes_that_are_made_are_such_as_are_read() -> None:
    edges = [0, 1, (1 << 8) - 1, 1 << 8, (1 << 16) - 1, 1 << 16, (1 << 24) - 1]
    for position in edges:
        parent = None if position == 0 else kvatlas.hashing.U64_MAX
        made = LineageHash.of(kvatlas.hashing.U64_MAX, parent, position)
        assert LineageHash(made.packed) == made
        assert made.position == position


def test_queries_take_hashes_that_come_one_by_one() -> None:
    chain = kvatlas.sequence_hashes([1, 2, 3])
    lineage = list(kvatlas.lineage_hashes(chain))
    assert Query.by_lineage_hashes(kvatlas.lineage_hashes(chain)) == Query.by_lineage_hashes(lineage)
    assert Query.by_sequence_hashes(iter(chain)) == Query.by_sequence_hashes(chain)
    chosen = Query.by_sequence_hashes(chain, positions=[0, 1, 2])
    assert Query.by_sequence_hashes(iter(chain), positions=iter(range(3))) == chosen
    assert Query.by_block_hashes(iter(chain)) == Query.by_block_hashes(chain)


def test_lineage_hashes_end_where_positions_do() -> None:
    with pytest.raises(kvatlas.InvalidValueError):
        LineageHash.of(1, 2, 1 << 24)
    last = LineageHash.of(1, 2, (1 << 24) - 1)
    with pytest.raises(kvatlas.InvalidValueError):
        last.child(3)


@each("subjects", "prefix")
def test_subjects(vector: dict[str, Any]) -> None:
    subjects = Subjects(vector["prefix"])
    names = vector["namespace"], vector["worker"]
    assert subjects.events(*names) == vector["events"]
    assert subjects.resync(*names, vector["rank"]) == vector["resync"]
    for kind in ("query", "status", "shards_query", "shards_status"):
        assert getattr(subjects, kind)(names[0]) == vector[kind]


@each("names_refused")
def test_names_that_are_none(vector: str) -> None:
    with pytest.raises(kvatlas.InvalidValueError):
        Subjects().query(vector)
    with pytest.raises(kvatlas.InvalidValueError):
        Subjects().events("llama", vector)


@each("shards", "worker")
def test_shards(vector: dict[str, Any]) -> None:
    assert kvatlas.shard_of(vector["worker"], vector["shards"]) == vector["shard"]


def event_of(meaning: dict[str, Any]) -> Event:
    """The event that a meaning describes."""
    kind = meaning["type"]
    if kind == "cleared":
        return Cleared()
    if kind == "goodbye":
        return Goodbye()
    if kind == "doubted":
        return Doubted(meaning["reasons"])
    given = {key: value for key, value in meaning.items() if key != "type"}
    for key in ("sequence_hashes", "engine_hashes", "block_hashes"):
        if key in given:
            given[key] = unhex(given[key])
    if "lineage_hashes" in given:
        given["lineage_hashes"] = lineage(given["lineage_hashes"])
    if "parent" in given:
        given["parent"] = int(given["parent"], 16)
    if kind == "removed":
        return Removed(**given)
    if kind == "resumable":
        return Resumable(**given)
    return StoredByLineage(**given) if "lineage_hashes" in given else Stored(**given)


def encoded(meaning: dict[str, Any]) -> bytes:
    events = [event_of(event) for event in meaning["events"]]
    cursor = Cursor(meaning["epoch"], meaning["seq"])
    given = {"tier": meaning["tier"]} | {key: meaning.get(key) for key in ("time_us", "block_size")}
    if "profile" in meaning:
        given["profile"] = kvatlas.Profile(**meaning["profile"])
    return encode_batch(cursor, meaning["rank"], events, **given)


@each("batches")
def test_batches(vector: dict[str, Any]) -> None:
    payload = encoded(vector["meaning"])
    if not vector.get("only_decode"):
        assert payload.hex() == vector["payload"]


def query_of(meaning: dict[str, Any]) -> Query:
    options = {key: meaning[key] for key in ("workers", "limit", "min_blocks", "explain", "tiers", "predicted") if key in meaning}
    positions = meaning.get("positions")
    counted = {"token_count": meaning.get("token_count")}
    if "tokens" in meaning:
        named = {key: meaning[key] for key in ("lora_name", "cache_salt") if key in meaning}
        query = Query.by_tokens(meaning["tokens"], **named)
    elif "block_hashes" in meaning:
        query = Query.by_block_hashes(unhex(meaning["block_hashes"]), **counted)
    elif "sequence_hashes" in meaning:
        query = Query.by_sequence_hashes(
            unhex(meaning["sequence_hashes"]), positions=positions, **counted
        )
    else:
        query = Query.by_lineage_hashes(lineage(meaning["lineage_hashes"]), positions=positions, **counted)
    return query.narrowed(**options)


@each("queries")
def test_queries(vector: dict[str, Any]) -> None:
    assert encode_query(query_of(vector["meaning"])).hex() == vector["payload"]


@each("hints")
def test_hints(vector: dict[str, Any]) -> None:
    meaning = vector["meaning"]
    hint = kvatlas.Hint(meaning["worker"], query_of(meaning["prompt"]), meaning["rank"])
    assert encode_hint(hint).hex() == vector["payload"]


@each("query_batches")
def test_query_batches(vector: dict[str, Any]) -> None:
    queries = [query_of(meaning) for meaning in vector["meaning"]["queries"]]
    assert encode_queries(queries).hex() == vector["payload"]


def reply_meaning(reply: QueryReply) -> dict[str, Any]:
    def holder(found: kvatlas.HolderMatch) -> dict[str, Any]:
        dropped = found.dropped_out
        return {
            "worker": found.worker,
            "rank": found.rank,
            "matched_blocks": found.matched_blocks,
            "matched_blocks_max": found.matched_blocks_max,
            "usable_blocks": found.usable_blocks,
            "device_blocks": found.device_blocks,
            "host_blocks": found.host_blocks,
            "device_usable_blocks": found.device_usable_blocks,
            "host_usable_blocks": found.host_usable_blocks,
            "exact": found.exact,
            "degraded": list(found.degraded),
            "dropped_out": dropped
            and {
                "position": dropped.position,
                "lineage_hash": str(dropped.lineage_hash),
                "other_holders": dropped.other_holders,
            },
            "limited_by": found.limited_by,
            "address": found.address,
            "labels": found.labels,
        }

    return {
        "query_blocks": reply.query_blocks,
        "block_size": reply.block_size,
        "holders": [holder(found) for found in reply.holders],
        "holders_total": reply.holders_total,
        "foreign_holders": reply.foreign_holders,
        "doubtful_holders": reply.doubtful_holders,
        "unseen_blocks_max": reply.unseen_blocks_max,
        "gathered": reply.gathered
        and {"shards": reply.gathered.shards, "missing": list(reply.gathered.missing)},
        "predicted": [asdict(found) for found in reply.predicted],
    }


def known(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Requires what this release knows; a later contract may say more."""
    for key, value in found.items():
        if key == "holders":
            for mine, theirs in zip(value, expected[key], strict=True):
                known(mine, theirs)
        else:
            assert value == expected[key], key


@each("query_replies")
def test_query_replies(vector: dict[str, Any]) -> None:
    known(reply_meaning(decode_query_reply(bytes.fromhex(vector["payload"]))), vector["meaning"])


@each("query_batch_replies")
def test_query_batch_replies(vector: dict[str, Any]) -> None:
    results = decode_batch_reply(bytes.fromhex(vector["payload"]))
    for found, expected in zip(results, vector["meaning"]["results"], strict=True):
        if isinstance(found, QueryReply):
            known(reply_meaning(found), expected["reply"])
        else:
            assert {"code": found.code, "text": found.text} == expected["error"]
    is_refused = "error" in vector["meaning"]["results"][1]
    assert isinstance(results[1], kvatlas.LimitExceededError) == is_refused


@each("status_replies")
def test_status_replies(vector: dict[str, Any]) -> None:
    status, expected = decode_status_reply(bytes.fromhex(vector["payload"])), vector["meaning"]
    numbers = ("block_size", "distinct_blocks", "batches_waiting", "unsized_holders", "refused_holders", "unheard_holders")
    for key in (*numbers, "gathered"):
        assert getattr(status, key) == expected[key]
    for found, holder in zip(status.holders, expected["holders"], strict=True):
        assert found.cursor == Cursor(holder["epoch"], holder["seq"])
        assert list(found.degraded) == holder["degraded"]
        keys = ("worker", "rank", "blocks", "parked_events", "foreign_chain", "epoch_ahead_s", "since_us", "exact", "address", "labels")
        for key in keys:
            assert getattr(found, key) == holder[key]


@pytest.mark.parametrize("section", ["query_replies", "query_batch_replies", "status_replies"])
def test_damaged_replies_are_errors(section: str) -> None:
    decode = {
        "query_replies": decode_query_reply,
        "query_batch_replies": decode_batch_reply,
        "status_replies": decode_status_reply,
    }[section]
    for vector in VECTORS[section]:
        whole = bytes.fromhex(vector["payload"])
        for at in range(len(whole)):
            with pytest.raises(kvatlas.UndecodableError):
                decode(whole[:at])
            for flip in (0x01, 0x20, 0x80, 0xFF):
                damaged = bytearray(whole)
                damaged[at] ^= flip
                with contextlib.suppress(kvatlas.UndecodableError):
                    decode(bytes(damaged))
        with pytest.raises(kvatlas.UndecodableError):
            decode(whole + b"\xc0")


@each("resync_requests")
def test_resync_requests(vector: dict[str, Any]) -> None:
    request = ResyncRequest.decode(bytes.fromhex(vector["payload"]))
    meaning = vector["meaning"]
    cursor = Cursor(meaning["epoch"], meaning["seq"])
    assert request == ResyncRequest(meaning["rank"], cursor, meaning["full"])


@each("resync_chunks")
def test_resync_chunks(vector: dict[str, Any]) -> None:
    """An outbox in the state that the vector describes gives the same chunk."""
    meaning = vector["meaning"]
    payloads = [encoded(batch) for batch in meaning["batches"]]
    options = kvatlas.PublisherOptions(
        after=Cursor(meaning["epoch"], meaning["seq"]),
        hashing="recompute" if "recomputed_block_size" in meaning else "engine",
        # Every batch is a chunk of its own, but for those of one vector.
        chunk_bytes_max=1 if meaning["kind"] == "full" else 1 << 20,
    )
    outbox = Outbox(options, meaning["rank"], Clocks(0.0, 0))
    outbox._made_us = meaning["time_us"]
    others = [b""] * meaning["chunk"], [b""] * (not meaning["last"])
    answer = outbox._answer(meaning["kind"], [*others[0], *payloads, *others[1]])
    assert answer.chunks[meaning["chunk"]].hex() == vector["payload"]
    assert msgpack.unpackb(answer.chunks[-1])["last"] is True


MARKS = [mark for test in list(globals().values()) for mark in getattr(test, "pytestmark", [])]
