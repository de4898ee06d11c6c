"""The thread behind the clients without `await`."""

from __future__ import annotations

import asyncio
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
