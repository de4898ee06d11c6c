"""A TCP proxy whose network can fail: connections cut, nothing arriving, or whole ZeroMQ messages lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Coroutine
from typing import Any

GREETING = 64
MORE, LONG, COMMAND = 1, 2, 4


class Loop:
    """An event loop on a thread of its own, for all proxies."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True, name="proxies").start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine there, and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)


class Proxy:
    """Leads from `port` to `target`, both on this machine. With `loses_messages`, what comes back is ZeroMQ."""

    def __init__(self, loop: Loop, port: int, target: int, seed: int, loses_messages: bool = False) -> None:
        self._loop, self._target, self._framed = loop, target, loses_messages
        self._random = random.Random(seed)
        self._loss = 0.0
        self.lost = 0
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._moves: asyncio.Event = loop.run(self._event())
        loop.run(asyncio.start_server(self._accept, "127.0.0.1", port))

    @staticmethod
    async def _event() -> asyncio.Event:
        event = asyncio.Event()
        event.set()
        return event

    def lose(self, share: float) -> None:
        """From now on, this share of the messages is lost."""
        self._loss = share

    def cut(self) -> None:
        """Breaks all connections; none can be made until `heal`."""
        self._is_cut = True
        self._loop.run(self._break())

    async def _break(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def silence(self) -> None:
        """Nothing arrives until `heal`; then everything does."""
        self._loop.loop.call_soon_threadsafe(self._moves.clear)

    def heal(self) -> None:
        """The network works again."""
        self._is_cut, self._loss = False, 0.0
        self._loop.loop.call_soon_threadsafe(self._moves.set)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, to_writer}
        there = self._pass_on(reader, to_writer)
        back = self._pass_messages(to_reader, writer) if self._framed else self._pass_on(to_reader, writer)
        tasks = [asyncio.ensure_future(there), asyncio.ensure_future(back)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for end in (writer, to_writer):
            self._writers.discard(end)
            end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._moves.wait()
                writer.write(data)
                await writer.drain()

    async def _pass_messages(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            # Piece by piece: libzmq sends the rest of its greeting only when it has seen the beginning of the other side's.
            greeted = 0
            while greeted < GREETING and (data := await reader.read(GREETING - greeted)):
                greeted += len(data)
                writer.write(data)
            message = b""
            while True:
                head = await reader.readexactly(1)
                flags = head[0]
                length = await reader.readexactly(8 if flags & LONG else 1)
                message += head + length + await reader.readexactly(int.from_bytes(length))
                if flags & MORE:
                    continue
                await self._moves.wait()
                if not flags & COMMAND and self._random.random() < self._loss:
                    self.lost += 1
                else:
                    writer.write(message)
                    await writer.drain()
                message = b""
