"""The thread behind the clients without `await`."""

from __future__ import annotations

import asyncio
import queue
import threading
import time

import pytest

from kvatlas import sync


class _Loop:
    """A loop with nothing to do. While one is made, other threads have a turn."""

    def __init__(self) -> None:
        time.sleep(0)

    def run_forever(self) -> None:
        pass


def test_threads_that_begin_together_share_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "new_event_loop", _Loop)
    for _ in range(50):
        shared, found = sync._Thread(), set[asyncio.AbstractEventLoop]()
        together = threading.Barrier(4)

        def begin() -> None:
            together.wait()
            found.add(shared.loop())

        threads = [threading.Thread(target=begin) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 1


def test_a_thread_that_cannot_begin_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "new_event_loop", _Loop)
    shared, begun = sync._Thread(), queue.SimpleQueue[_Loop]()
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="new thread"):
            shared.loop()
    monkeypatch.setattr(_Loop, "run_forever", lambda loop: begun.put(loop))
    loop: object = shared.loop()
    assert begun.get(timeout=60) is loop
