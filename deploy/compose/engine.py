#!/usr/bin/env python3
"""An engine's event publisher and its replay socket, for drills: what vLLM publishes over ZeroMQ, with nothing but Python's own library.

    deploy/compose/engine.py ADDRESS PORT REPLAY_PORT

It stores a block a second and says so, until it is ended. Stopped by SIGSTOP it hangs as an engine does: its connections stay open.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time

# ZMTP 3.0 with the mechanism NULL: the greeting of both sides.
GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 0]) + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4
BLOCK_SIZE = 16
END = struct.pack(">q", -1)


def packed(value: object) -> bytes:
    """The value as MessagePack; numbers in their longest form."""
    if value is None:
        return b"\xc0"
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, int):
        return b"\xcf" + struct.pack(">Q", value)
    if isinstance(value, str):
        return bytes([0xD9, len(value)]) + value.encode()
    assert isinstance(value, list)
    return b"\xdc" + struct.pack(">H", len(value)) + b"".join(map(packed, value))


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body


def message(*parts: bytes) -> bytes:
    return b"".join(frame(part, MORE) for part in parts[:-1]) + frame(parts[-1])


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    [flags] = await reader.readexactly(1)
    size = await reader.readexactly(8 if flags & LONG else 1)
    return flags, await reader.readexactly(int.from_bytes(size, "big"))


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str) -> None:
    """Says which kind of socket this is."""
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind.encode()
    writer.write(GREETING + frame(ready, COMMAND))
    await reader.readexactly(len(GREETING))
    await read_frame(reader)


class Engine:
    """Batches by number, from 0, and who hears the next one."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.subscribers: set[asyncio.StreamWriter] = set()

    async def publish(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await greet(reader, writer, "PUB")
            # The subscription, to whatever.
            await read_frame(reader)
            self.subscribers.add(writer)
            while True:
                await read_frame(reader)
        except (OSError, asyncio.IncompleteReadError):
            self.subscribers.discard(writer)
            writer.close()

    async def replay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await greet(reader, writer, "ROUTER")
            while True:
                flags, body = MORE, b""
                while flags & MORE:
                    flags, body = await read_frame(reader)
                start = int.from_bytes(body, "big")
                for number, batch in enumerate(self.batches[start:], start):
                    writer.write(message(b"", struct.pack(">Q", number), batch))
                writer.write(message(b"", END, b""))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            writer.close()

    def store(self) -> None:
        """Stores one more block behind the last, and says so."""
        number = len(self.batches)
        tokens = list(range(number * BLOCK_SIZE, (number + 1) * BLOCK_SIZE))
        stored = ["BlockStored", [number + 1], number or None, tokens, BLOCK_SIZE, None, "GPU"]
        batch = packed([time.time(), [stored]])
        self.batches.append(batch)
        for subscriber in self.subscribers:
            subscriber.write(message(b"", struct.pack(">Q", number), batch))


async def main(address: str, port: str, replay_port: str) -> None:
    engine = Engine()
    await asyncio.start_server(engine.publish, address, int(port))
    await asyncio.start_server(engine.replay, address, int(replay_port))
    while True:
        engine.store()
        await asyncio.sleep(1.0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
