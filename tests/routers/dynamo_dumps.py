"""Asks Dynamo's workers for all that they hold."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import uuid
from typing import Any

import nats
import xxhash
from dynamo_records import Record, records_of

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
        self.waiting: dict[str, asyncio.Future[Any]] = {}
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

    async def ask(self, record: Record) -> Record:
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
            answer: Record = await asyncio.wait_for(future, PATIENCE)
            writer.close()
            return answer
        client = await nats.connect(os.environ["NATS_SERVER"])
        await client.request(transport["nats_tcp"], message, timeout=PATIENCE)
        answer = await asyncio.wait_for(future, PATIENCE)
        await client.close()
        return answer


def block_hashes(tokens: list[int], size: int) -> list[int]:
    """The hash of each whole block of a prompt."""
    whole = range(0, len(tokens) - len(tokens) % size, size)
    packed = (struct.pack(f"<{size}I", *tokens[start : start + size]) for start in whole)
    return [xxhash.xxh3_64_intdigest(block, seed=1337) for block in packed]


def sequence_hashes(blocks: list[int]) -> list[int]:
    """The rolling hash of the prefix up to each block."""
    rolled: list[int] = []
    for block in blocks:
        pair = struct.pack("<QQ", rolled[-1], block) if rolled else b""
        rolled.append(xxhash.xxh3_64_intdigest(pair, seed=1337) if rolled else block)
    return rolled


class Held:
    """What one worker holds, as a tree: by the name of a parent, the child of each content."""

    def __init__(self, dump: Record) -> None:
        self.children: dict[tuple[int | None, int], int] = {}
        for event in dump["TreeDump"]["events"]:
            data = event["event"]["data"]
            # What has changed while the tree was written comes behind it.
            if "stored" not in data:
                gone = set(data["removed"]["block_hashes"])
                self.children = {place: name for place, name in self.children.items() if name not in gone}
                continue
            stored = data["stored"]
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


async def held_now(dumps: Dumps) -> dict[int, Held]:
    """What each worker holds, once that stands still."""
    before = None
    while True:
        found = records_of().below("v1/instances").values()
        sources = [record for record in found if record["endpoint"].startswith("worker_kv_query_source_")]
        asked = {record["instance_id"]: await dumps.ask(record) for record in sources}
        if asked == before:
            return {worker: Held(dump) for worker, dump in asked.items()}
        before = asked
        await asyncio.sleep(0.5)
