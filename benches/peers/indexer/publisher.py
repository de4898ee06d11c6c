"""A publisher of pyzmq, as an engine has one, and what its cache has."""

from __future__ import annotations

import collections
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

BLOCK = 16
END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """An engine's two sockets, and what its cache has: a block is named by its path."""

    def __init__(self, context: zmq.Context[Any], number: int) -> None:
        self.number = number
        self._pub, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._pub.set_hwm(0)
        self.ports = [self._pub.bind_to_random_port("tcp://127.0.0.1"), self._replay.bind_to_random_port("tcp://127.0.0.1")]
        self._replay.set_hwm(0)
        self._lock = threading.Lock()
        self._sent: collections.deque[tuple[bytes, bytes]] = collections.deque(maxlen=10_000)
        self._number = 0
        threading.Thread(target=self._answer_replays, daemon=True).start()
        self.held: dict[int, int] = {}

    def publish(self, events: list[Any]) -> None:
        """One batch."""
        self.send(msgspec.msgpack.encode([time.time(), events, 0]))

    @staticmethod
    def bare(payloads: list[bytes]) -> float:
        """How many of these a second a subscriber gets that does nothing with them, in a process of its own."""
        with zmq.Context() as context, context.socket(zmq.PUB) as pub:
            pub.set_hwm(0)
            endpoint = f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}"
            counter = [sys.executable, str(Path(__file__).with_name("count.py")), endpoint, str(len(payloads))]
            with subprocess.Popen(counter, stdout=subprocess.PIPE) as counting:
                assert counting.stdout is not None
                while not select.select([counting.stdout], [], [], 0.01)[0]:
                    pub.send(b"")
                counting.stdout.readline()
                begun = time.monotonic()
                for number, payload in enumerate(payloads):
                    pub.send_multipart((b"", number.to_bytes(8, "big"), payload))
                if counting.stdout.readline() != b"done\n":
                    raise RuntimeError("the bare subscriber ended early")
                return len(payloads) / (time.monotonic() - begun)

    def send(self, payload: bytes) -> None:
        """One batch, as bytes."""
        number = self._number.to_bytes(8, "big")
        self._number += 1
        with self._lock:
            self._sent.append((number, payload))
        self._pub.send_multipart((b"", number, payload))

    def _answer_replays(self) -> None:
        """Answers who asks for what was sent, on a thread of its own."""
        while True:
            client, _, start = self._replay.recv_multipart()
            with self._lock:
                sent = [one for one in self._sent if one[0] >= start]
            for number, payload in sent:
                self._replay.send_multipart((client, b"", b"", number, payload))
            self._replay.send_multipart((client, b"", b"", END, b""))

    def store(self, chain: list[int], names: list[int]) -> None:
        """The blocks of a prompt that it has not."""
        first = 0
        while first < len(names):
            if names[first] in self.held:
                first += 1
                continue
            end = first
            while end < len(names) and names[end] not in self.held:
                end += 1
            parent = names[first - 1] if first else None
            tokens = chain[first * BLOCK : end * BLOCK]
            self.publish([["BlockStored", names[first:end], parent, tokens, BLOCK, None, "GPU"]])
            for place in range(first, end):
                self.held[names[place]] = names[place - 1] if place else 0
            first = end

    def remove(self, names: list[int]) -> None:
        """Blocks that it has."""
        for name in names:
            del self.held[name]
        self.publish([["BlockRemoved", names, "GPU"]])

    def clear(self) -> None:
        """All blocks."""
        self.held.clear()
        self.publish([["AllBlocksCleared"]])

    def depth(self, names: list[int]) -> int:
        """How many leading blocks it has."""
        for place, name in enumerate(names):
            if name not in self.held:
                return place
        return len(names)
