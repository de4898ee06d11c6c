"""The last batches, for daemons that miss some."""

from __future__ import annotations

from collections import deque
from itertools import islice


class Ring:
    """The last batches of one epoch, without a gap, bounded in number and bytes."""

    def __init__(self, last: int, batches_max: int, bytes_max: int) -> None:
        self._batches: deque[bytes] = deque()
        self._bytes = 0
        self._last = last
        self._batches_max = batches_max
        self._bytes_max = bytes_max

    def push(self, payload: bytes) -> None:
        """Takes the next batch up, and forgets the oldest ones that there is no room for."""
        self._last += 1
        self._bytes += len(payload)
        self._batches.append(payload)
        while self._batches and (len(self._batches) > self._batches_max or self._bytes > self._bytes_max):
            self._bytes -= len(self._batches.popleft())

    def after(self, seq: int) -> list[bytes] | None:
        """The batches after number ``seq``; none where some of them are forgotten, or ``seq`` is ahead."""
        missing = self._last - seq
        if not 0 <= missing <= len(self._batches):
            return None
        return list(islice(self._batches, len(self._batches) - missing, None))
