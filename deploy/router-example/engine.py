"""A mock engine: OpenAI-style HTTP, a bounded prefix cache, and vLLM's KV events over ZMQ. It computes nothing but time.

    python engine.py --listen 8001 --events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558

The events are those of vLLM (`--kv-events-config '{"publisher": "zmq", ...}'`): frames `[topic, sequence number, payload]`, and the
payload is `[timestamp, [event, ...], rank]` in MessagePack. The replay socket gives the last batches again, as vLLM's does.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import zmq
import zmq.asyncio
from aiohttp import web
from text import tokens_of

BLOCK_SIZE = 16
BATCHES_KEPT = 10_000


class Events:
    """vLLM's publisher of KV events."""

    def __init__(self, events: str, replay: str) -> None:
        context = zmq.asyncio.Context.instance()
        self._publisher = context.socket(zmq.PUB)
        self._publisher.bind(events)
        self._replay = context.socket(zmq.ROUTER)
        self._replay.bind(replay)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=BATCHES_KEPT)
        self._next = 0

    async def publish(self, events: list[dict[str, Any]]) -> None:
        """Sends a batch."""
        payload = msgpack.packb([time.time(), events, 0])
        number = self._next.to_bytes(8, "big")
        self._next += 1
        self._kept.append((number, payload))
        await self._publisher.send_multipart((b"", number, payload))

    async def serve_replay(self) -> None:
        """Answers those who have missed batches: what is kept from a number on, and an end."""
        while True:
            request = await self._replay.recv_multipart()
            if len(request) != 3:
                continue
            client, _, first = request
            for number, payload in list(self._kept):
                if number >= first:
                    await self._replay.send_multipart((client, b"", number, payload))
            await self._replay.send_multipart((client, b"", (-1).to_bytes(8, "big", signed=True), b""))


class PrefixCache:
    """Blocks of tokens, each known by all tokens up to it. The least recently used ones without a child make room."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._parents: OrderedDict[int, int | None] = OrderedDict()
        self._children: dict[int, int] = {}

    def admit(self, tokens: list[int]) -> tuple[int, list[dict[str, Any]]]:
        """Serves a prompt: how many of its blocks were there, and what has changed, as vLLM tells it."""
        names = self._names(tokens)
        hits = 0
        while hits < len(names) and names[hits] in self._parents:
            hits += 1
        removed = self._make_room(len(names) - hits, set(names))
        parent = names[hits - 1] if hits else None
        # Of a prompt that is larger than the cache, what there is room for.
        added = names[hits : hits + self._blocks_max - len(self._parents)]
        events = (
            [{"type": "BlockRemoved", "block_hashes": removed, "medium": "GPU", "group_idx": 0}]
            if removed
            else []
        )
        if added:
            events.append(
                self._stored(parent, added, tokens[hits * BLOCK_SIZE : (hits + len(added)) * BLOCK_SIZE])
            )
        for name in added:
            self._parents[name] = parent
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
            parent = name
        # Children before their parents, so that whoever makes room meets a block after all that follow it.
        for name in reversed(names[: hits + len(added)]):
            self._parents.move_to_end(name)
        return hits, events

    @staticmethod
    def _names(tokens: list[int]) -> list[int]:
        """An engine has hashes of its own: here 64 bits of a chain of SHA-256."""
        names, digest = [], b""
        for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            block = b"".join(token.to_bytes(4, "little") for token in tokens[end - BLOCK_SIZE : end])
            digest = hashlib.sha256(digest + block).digest()
            names.append(int.from_bytes(digest[:8], "big"))
        return names

    def _make_room(self, needed: int, kept: set[int]) -> list[int]:
        removed = []
        for name in list(self._parents):
            if len(self._parents) + needed <= self._blocks_max:
                break
            if name in kept or self._children.get(name):
                continue
            parent = self._parents.pop(name)
            if parent is not None:
                self._children[parent] -= 1
            removed.append(name)
        return removed

    @staticmethod
    def _stored(parent: int | None, names: list[int], tokens: list[int]) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * len(names),
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }


class Engine:
    """Serves prompts, one at a time, as long as their blocks take."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._events = Events(options.events, options.replay)
        self._cache = PrefixCache(options.blocks)
        self._block_seconds = options.block_ms / 1000
        self._busy = asyncio.Lock()

    def application(self) -> web.Application:
        """The engine's HTTP interface."""
        application = web.Application()
        application.router.add_post("/v1/completions", self.complete)
        application.router.add_post("/v1/chat/completions", self.complete)
        application.router.add_get("/health", self.health)
        application.cleanup_ctx.append(self._replay)
        return application

    async def _replay(self, _application: web.Application) -> AsyncIterator[None]:
        serving = asyncio.create_task(self._events.serve_replay())
        yield
        serving.cancel()

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = tokens_of(body)
        async with self._busy:
            hits, events = self._cache.admit(tokens)
            await asyncio.sleep((len(tokens) // BLOCK_SIZE - hits) * self._block_seconds)
            if events:
                await self._events.publish(events)
        usage = {
            "prompt_tokens": len(tokens),
            "completion_tokens": 1,
            "total_tokens": len(tokens) + 1,
            "prompt_tokens_details": {"cached_tokens": hits * BLOCK_SIZE},
        }
        choice = {"index": 0, "finish_reason": "length", "text": "."}
        if "messages" in body:
            choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "."}}
        return web.json_response(
            {"object": "completion", "model": body.get("model"), "choices": [choice], "usage": usage}
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="A mock engine with vLLM's KV events.")
    parser.add_argument("--listen", type=int, required=True, help="port for HTTP, on the loopback address")
    parser.add_argument(
        "--events", required=True, help="ZMQ endpoint of the events, such as tcp://127.0.0.1:5557"
    )
    parser.add_argument("--replay", required=True, help="ZMQ endpoint of the replay socket")
    parser.add_argument(
        "--blocks", type=int, default=1000, help="blocks of 16 tokens that the cache has room for"
    )
    parser.add_argument(
        "--block-ms", type=float, default=0.5, help="milliseconds that a block takes to compute"
    )
    options = parser.parse_args()

    async def application() -> web.Application:
        return Engine(options).application()

    web.run_app(application(), host="127.0.0.1", port=options.listen, print=None)


if __name__ == "__main__":
    main()
