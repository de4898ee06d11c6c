"""Asks Dynamo's own router, whose remote indexer is kvatlas, and compares with what Dynamo's workers say they hold.

    python3 dynamo_router.py BLOCK_SIZE VOCABULARY PROMPTS QUESTIONS SEED

Runs as a process of Dynamo's runtime: discovery and planes come from its environment. Prints a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import struct
import sys
import time
import uuid
from pathlib import Path

import nats
import xxhash
from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime, dynamo_worker

SIZE, VOCABULARY, PROMPTS, QUESTIONS, SEED = map(int, sys.argv[1:6])
PATIENCE = 60.0


def two_parts(header: bytes, body: bytes) -> bytes:
    """A message of Dynamo's request plane."""
    return struct.pack(">QQQ", len(header), len(body), 0) + header + body


async def read_two_parts(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Header and body of the next message."""
    header, body, _ = struct.unpack(">QQQ", await reader.readexactly(24))
    return await reader.readexactly(header), await reader.readexactly(body)


class Dumps:
    """Asks workers for all that they hold: their endpoint `worker_kv_query_source_…`."""

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Future[dict[str, object]]] = {}
        self.port = 0

    async def start(self) -> None:
        """Listens for answers."""
        server = await asyncio.start_server(self.take, "127.0.0.1", 0, limit=1 << 26)
        self.port = server.sockets[0].getsockname()[1]

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes one answer."""
        hello, _ = await read_two_parts(reader)
        future = self.waiting.pop(json.loads(hello)["subject"])
        while True:
            header, body = await read_two_parts(reader)
            if header == b'"sentinel"':
                break
            data = json.loads(body).get("data") if body else None
            if data is not None and not future.done():
                future.set_result(data)
        writer.close()

    async def ask(self, record: dict[str, object]) -> dict[str, object]:
        """The answer of one worker."""
        subject, future = str(uuid.uuid4()), asyncio.get_running_loop().create_future()
        self.waiting[subject] = future
        info = {"address": f"127.0.0.1:{self.port}", "subject": subject, "context": subject, "stream_type": "response"}
        control = {
            "id": subject,
            "request_type": "single_in",
            "response_type": "many_out",
            "payload_codec": "json",
            "connection_info": {"transport": "tcp_server", "info": json.dumps(info)},
        }
        question = {"worker_id": record["instance_id"], "dp_rank": 0, "start_event_id": None, "end_event_id": None}
        message = two_parts(json.dumps(control).encode(), json.dumps(question).encode())
        transport = record["transport"]
        if "tcp" in transport:
            address, path = transport["tcp"].split("/", 1)
            host, port = address.rsplit(":", 1)
            headers = json.dumps({"x-endpoint-path": path, "request-id": subject}).encode()
            _, writer = await asyncio.open_connection(host, int(port))
            parts = (struct.pack(">H", len(path)), path.encode(), struct.pack(">H", len(headers)), headers)
            writer.write(b"".join((*parts, struct.pack(">I", len(message)), message)))
            answer = await asyncio.wait_for(future, PATIENCE)
            writer.close()
            return answer
        client = await nats.connect(os.environ["NATS_SERVER"])
        await client.request(transport["nats_tcp"], message, timeout=PATIENCE)
        answer = await asyncio.wait_for(future, PATIENCE)
        await client.close()
        return answer


def block_hashes(tokens: list[int]) -> list[int]:
    """The hash of each whole block of a prompt."""
    whole = range(0, len(tokens) - len(tokens) % SIZE, SIZE)
    packed = (struct.pack(f"<{SIZE}I", *tokens[start : start + SIZE]) for start in whole)
    return [xxhash.xxh3_64_intdigest(block, seed=1337) for block in packed]


class Held:
    """What one worker holds, as a tree: by the name of a parent, the child of each content."""

    def __init__(self, dump: dict[str, object]) -> None:
        self.children: dict[tuple[int | None, int], int] = {}
        for event in dump["TreeDump"]["events"]:
            stored = event["event"]["data"]["stored"]
            parent = stored["parent_hash"]
            for block in stored["blocks"]:
                self.children[parent, block["tokens_hash"]] = block["block_hash"]
                parent = block["block_hash"]

    def depth(self, hashes: list[int]) -> int:
        """How many leading blocks of a prompt it holds."""
        parent: int | None = None
        for depth, content in enumerate(hashes):
            parent = self.children.get((parent, content))
            if parent is None:
                return depth
        return len(hashes)


def records(endpoint: str) -> list[dict[str, object]]:
    """The instances of an endpoint whose name begins so."""
    folder = Path(os.environ["DYN_FILE_KV"]) / "v1/instances"
    all_of_them = [json.loads(path.read_text()) for path in folder.iterdir()]
    return [record for record in all_of_them if record["endpoint"].startswith(endpoint)]


async def truth(dumps: Dumps) -> dict[int, Held]:
    """What each worker holds, once that stands still."""
    before = None
    while True:
        asked = {record["instance_id"]: await dumps.ask(record) for record in records("worker_kv_query_source_")}
        if asked == before:
            return {worker: Held(dump) for worker, dump in asked.items()}
        before = asked
        await asyncio.sleep(0.5)


async def overlaps(router: KvRouter, tokens: list[int]) -> dict[int, int]:
    """By worker, how many leading blocks the router believes to be on its device."""
    answer = await router.get_overlap_scores(tokens)
    return {worker["worker_id"]: worker["device_blocks"] for worker in answer["workers"]}


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Serves prompts, asks about others, and compares."""
    endpoint, dice = runtime.endpoint("dynamo.backend.generate"), random.Random(SEED)
    asks, own = KvRouter(endpoint, SIZE, KvRouterConfig(use_remote_indexer=True)), KvRouter(endpoint, SIZE, KvRouterConfig())
    dumps = Dumps()
    await dumps.start()
    await asyncio.sleep(3)
    word = lambda: dice.randrange(3, VOCABULARY)
    chats = [[word() for _ in range(SIZE * dice.randint(1, 12))] for _ in range(12)]
    asked = wrong = wrong_own = 0
    asking = 0.0
    rounds = max(1, QUESTIONS // 500)
    for _ in range(rounds):
        for _ in range(PROMPTS // rounds):
            chat = dice.choice(chats)
            chat += [word() for _ in range(dice.randint(1, 3 * SIZE))]
            if len(chat) > 60 * SIZE:
                chats.remove(chat)
                chats.append([word() for _ in range(SIZE)])
            stream = await asks.generate(chat, "m", stop_conditions={"max_tokens": 4})
            async for _ in stream:
                pass
        held = await truth(dumps)
        await asyncio.sleep(0.5)
        for _ in range(QUESTIONS // rounds):
            chat = dice.choice(chats)
            prompt = chat[: dice.randint(SIZE, len(chat))] + [word() for _ in range(dice.randint(0, 2 * SIZE))]
            expected = {worker: tree.depth(block_hashes(prompt)) for worker, tree in held.items()}
            started = time.perf_counter()
            answer = await overlaps(asks, prompt)
            asking += time.perf_counter() - started
            asked += len(expected)
            wrong += sum(answer.get(worker, 0) != depth for worker, depth in expected.items())
            answer = await overlaps(own, prompt)
            wrong_own += sum(answer.get(worker, 0) != depth for worker, depth in expected.items())
    result = {"answers": asked, "wrong": wrong, "wrong of Dynamo's own index": wrong_own}
    print(json.dumps({**result, "microseconds a question": round(asking / QUESTIONS * 1e6)}), flush=True)
    # Its threads outlive the interpreter.
    os._exit(0)


asyncio.run(main())
