"""What a caller gets wrong is told where it is given, by an error of the package that names it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from processes import Broker
from world import NAMESPACE, world

import kvatlas
from kvatlas import (
    Acknowledged,
    Cleared,
    Cursor,
    Doubted,
    Hint,
    LineageHash,
    Outcome,
    Profile,
    PublisherOptions,
    Query,
    Removed,
    Resumable,
    Stored,
    StoredByLineage,
)
from kvatlas.client import make_connection

QUERY = Query.by_sequence_hashes([1])
OUTCOME = Outcome("gpu-0", 0, 1, 16, 17, True)
WRONG: Any = "wrong"

VALUES: dict[str, tuple[str, Callable[[], object]]] = {
    "an adapter that is no text": ("lora_name", lambda: Query.by_tokens([1], lora_name=5)),  # type: ignore[arg-type]
    "a salt that is no text": ("cache_salt", lambda: Query.by_tokens([1], cache_salt=b"x")),  # type: ignore[arg-type]
    "a salt beyond UTF-8": ("UTF-8", lambda: Query.by_tokens([1], cache_salt="\ud800")),
    "an adapter of an event": ("lora_name", lambda: Stored([1], tokens=[1] * 16, lora_name=WRONG and 3)),
    "an adapter of hashes": ("lora_name", lambda: kvatlas.block_hashes([1] * 16, lora_name=WRONG and 3)),
    "a size of hashes": ("block_size", lambda: kvatlas.block_hashes([1] * 16, WRONG)),
    "a count of tokens": ("token_count", lambda: Query.by_sequence_hashes([1], token_count=WRONG)),
    "a count below the tokens": ("token_count", lambda: Query.by_tokens([1, 2], token_count=1)),
    "workers": ("workers", lambda: QUERY.narrowed(workers=WRONG and 5)),
    "a limit": ("limit", lambda: QUERY.narrowed(limit=WRONG)),
    "a broken limit": ("limit", lambda: QUERY.narrowed(limit=WRONG and 1.5)),
    "a limit below 0": ("limit", lambda: QUERY.narrowed(limit=-1)),
    "a least depth": ("min_blocks", lambda: QUERY.narrowed(min_blocks=WRONG and None)),
    "a label": ("label 'a'", lambda: Profile(labels={"a": WRONG and 1})),
    "labels": ("labels", lambda: Profile(labels=WRONG and None)),
    "an address": ("address", lambda: Profile(address=WRONG and 5)),
    "doubts that are none": ("list of doubts", lambda: Doubted(WRONG and None)),
    "a doubt alone": ("list of doubts", lambda: Doubted("upstream_gap")),
    "a flag of an event": ("resumable", lambda: Resumable([1], resumable=WRONG and 1)),
    "no flag of an event": ("resumable", lambda: Resumable([1], resumable=WRONG and None)),
    "no hashes of an event": ("lineage_hashes", lambda: Removed([1], WRONG and None)),
    "no lineage hashes": ("lineage_hashes", lambda: StoredByLineage(WRONG and None)),
    "a first block below 0": ("block hashes", lambda: kvatlas.sequence_hashes([-1])),
    "a first block of 65 bits": ("block hashes", lambda: kvatlas.sequence_hashes([1 << 65])),
    "a parent of hashes": ("parent", lambda: kvatlas.sequence_hashes([1], -1)),
    "a lineage below 0": ("64 bits", lambda: LineageHash.of(-1, None, 0)),
    "a lineage of 65 bits": ("64 bits", lambda: LineageHash.of(1, 1 << 64, 1)),
    "a broken lineage": ("whole numbers", lambda: LineageHash.of(WRONG and 1.0, None, 0)),
    "no shards": ("shards", lambda: kvatlas.shard_of("gpu-0", 0)),
    "an acknowledgement's timeout": ("timeout", lambda: Acknowledged(timeout=WRONG)),
    "an acknowledgement's attempts": ("attempts", lambda: Acknowledged(attempts=WRONG)),
    "a timeout of 0": ("above 0", lambda: Acknowledged(timeout=0)),
    "a profile": ("profile", lambda: PublisherOptions(profile=WRONG and {"address": "h:1"})),
    "no profile": ("profile", lambda: PublisherOptions(profile=WRONG and None)),
    "a transport": ("transport", lambda: PublisherOptions(transport=WRONG)),
    "a cursor": ("after", lambda: PublisherOptions(after=WRONG and (1, 2))),
    "a number of a cursor": ("batch of after", lambda: PublisherOptions(after=Cursor(1, WRONG))),
    "an epoch": ("epoch", lambda: PublisherOptions(epoch=WRONG)),
    "a block size": ("block_size", lambda: PublisherOptions(block_size=WRONG and "16")),
    "a broken limit of a queue": ("queue_batches_max", lambda: PublisherOptions(queue_batches_max=WRONG and 1.5)),
    "an interval": ("heartbeat_interval", lambda: PublisherOptions(heartbeat_interval=WRONG)),
    "an outcome without a figure": ("found_tokens", lambda: Outcome("gpu-0", 0, 1, WRONG and None, 17, True)),
    "an outcome below 0": ("found_tokens", lambda: Outcome("gpu-0", 0, 1, -16, 17, True)),
    "an outcome of 64 bits": ("prompt_tokens", lambda: Outcome("gpu-0", 0, 1, 16, 1 << 32, True)),
    "an outcome's worker": ("worker", lambda: Outcome("gpu 0", 0, 1, 16, 17, True)),
    "an outcome's exactness": ("exact", lambda: Outcome("gpu-0", 0, 1, 16, 17, WRONG)),
    "a hint's rank": ("rank", lambda: Hint("gpu-0", QUERY, -1)),
    "a hint's prompt": ("prompt", lambda: Hint("gpu-0", WRONG and [1, 2])),
    "a hint's worker": ("worker", lambda: Hint(WRONG and None, QUERY)),
}


@pytest.mark.parametrize("misuse", VALUES)
def test_a_value_is_refused_where_it_is_made(misuse: str) -> None:
    named, make = VALUES[misuse]
    with pytest.raises(kvatlas.InvalidValueError, match=named):
        make()


def test_what_is_right_is_taken() -> None:
    assert Query.by_tokens([1, 2], token_count=5).key["token_count"] == 5
    assert Outcome("gpu-0", 0, 1, 16, None, True).prompt_tokens is None
    assert PublisherOptions(transport=Acknowledged(), after=Cursor(1, 2), heartbeat_interval=1).after == Cursor(1, 2)
    bool_ = type("bool_", (), {"__module__": "numpy", "__bool__": lambda _self: False})
    assert Resumable([1], resumable=bool_()).resumable is False  # type: ignore[arg-type]
    assert kvatlas.cache_seed("", None) == kvatlas.cache_seed()


async def test_a_call_is_refused_before_anything_is_sent(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        client = here.queries
        publisher = await here.publisher()
        start = kvatlas.Publisher.start
        for named, call in (
            ("query", lambda: client.query("llama", WRONG and [1, 2, 3])),
            ("queries", lambda: client.query_batch("llama", WRONG and [3])),
            ("outcomes", lambda: client.tell("llama", WRONG and OUTCOME)),
            ("outcomes", lambda: client.tell("llama", WRONG and [("gpu-0", 1)])),
            ("hints", lambda: client.hint("llama", WRONG and None)),
            ("give.* model=", lambda: client.query("meta-llama/Llama-3.1-8B", QUERY)),
            ("events", lambda: publisher.publish(WRONG and None)),
            ("events", lambda: publisher.publish(WRONG and 5)),
            ("events", lambda: publisher.publish(WRONG and Cleared)),
            ("events", lambda: publisher.publish(WRONG)),
            ("profile", lambda: publisher.set_profile(WRONG and {"address": "h:1"})),
            ("options", lambda: start(here.nats, "llama", "w", options=WRONG and {"block_size": 16})),
            ("rank", lambda: start(here.nats, "llama", "w", WRONG and PublisherOptions())),
            ("url", lambda: make_connection(WRONG and [broker.url])),
            ("http://127.0.0.1:4222", lambda: make_connection("http://127.0.0.1:4222")),
            ("username", lambda: make_connection(broker.url, username="x")),
        ):
            with pytest.raises(kvatlas.InvalidValueError, match=named):
                await call()
        await client.tell(NAMESPACE, (outcome for outcome in [OUTCOME]))
        # The publisher has not ended.
        await publisher.publish(Stored([1]))
        assert (await publisher.flush()).seq > 0


async def test_a_publisher_that_has_ended_by_an_error_tells_it(broker: Broker) -> None:
    async with world(broker.url, has_daemon=False) as here:
        publisher = await here.publisher()

        def fail(*_arguments: object) -> None:
            raise ArithmeticError("nobody has thought of this")

        publisher._outbox.add = fail  # type: ignore[assignment, method-assign]
        await publisher.publish(Stored([1]))
        for call in (publisher.flush, publisher.publish, publisher.begin_epoch):
            with pytest.raises(kvatlas.StoppedError, match="ArithmeticError: nobody has thought of this") as stopped:
                await call()
            assert isinstance(stopped.value.__cause__, ArithmeticError)


async def test_credentials_without_their_package_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_arguments: object, **_options: object) -> None:
        raise ModuleNotFoundError("No module named 'nkeys'", name="nkeys")

    monkeypatch.setattr("kvatlas.client.Connection.connect", connect)
    with pytest.raises(kvatlas.ConnectionFailedError, match=r"kvatlas\[credentials\]"):
        await asyncio.wait_for(make_connection("nats://127.0.0.1:1", user_credentials="/etc/nats.creds"), 5)
