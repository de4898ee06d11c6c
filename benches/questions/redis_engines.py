"""Engines that publish as vLLM does, and hold whatever they are given."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

import msgpack  # type: ignore[import-untyped]
import zmq
from llmd_site import SIZE, Driver, Pod, site

PODS = 4


class Engine:
    """A publisher with its replay socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], number: int) -> None:
        self._publisher, self._replays = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (self._publisher, self._replays)]
        self.pod = Pod(f"10.0.0.{number}:8000", *ports)
        self._batches: list[bytes] = []

    def store(self, tokens: list[int]) -> bytes:
        """Publishes that it has stored a prompt. Returns the payload."""
        names = [random.getrandbits(63) | 1 for _ in range(len(tokens) // SIZE)]
        event = ["BlockStored", names, None, tokens, SIZE, None, "GPU", None, None]
        payload: bytes = msgpack.packb([time.time(), [event], 0])
        number = len(self._batches)
        self._batches.append(payload)
        self._publisher.send_multipart([self.pod.topic.encode(), number.to_bytes(8, "big"), payload])
        return payload

    def answer_replays(self) -> None:
        """Gives a bridge that asks what it has missed."""
        while self._replays.poll(0):
            client, *_, start = self._replays.recv_multipart()
            for number in range(int.from_bytes(start, "big"), len(self._batches)):
                self._replays.send_multipart([client, b"", number.to_bytes(8, "big"), self._batches[number]])
            self._replays.send_multipart([client, b"", (-1).to_bytes(8, "big", signed=True), b""])


@contextlib.contextmanager
def filled_site(prompts: list[list[int]]) -> Iterator[Driver]:
    """llm-d's index beside kvatlas and Redis, which both know that all engines hold the prompts."""
    with zmq.Context() as context:
        engines = [Engine(context, number) for number in range(PODS)]

        def answer() -> None:
            for engine in engines:
                engine.answer_replays()

        try:
            with site("xxh64", "", [engine.pod for engine in engines], answer) as driver:
                for engine in engines:
                    for tokens in prompts:
                        driver.tell(engine.pod, engine.store(tokens))
                for engine in engines:
                    driver.do(op="wait", pod=engine.pod.name, tokens=prompts[-1])
                yield driver
        finally:
            context.destroy(0)
