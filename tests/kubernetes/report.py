"""A line for each check."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class Failed(Exception):
    """A check has found what should not be."""


class Report:
    """The checks so far. Each prints a line, with what was measured."""

    def __init__(self) -> None:
        self.failed = 0
        self.checked = 0

    @contextmanager
    def check(self, what: str) -> Iterator[list[str]]:
        """A check, whose notes are printed behind it. An error in it is a failure, and the next check goes on."""
        notes: list[str] = []
        begun = time.monotonic()
        try:
            yield notes
            word = "ok    "
        except Exception as error:
            if not isinstance(error, (Failed, TimeoutError)):
                traceback.print_exc()
            self.failed += 1
            word = "FAILED"
            notes.append(f"{type(error).__name__}: {error}")
        self.checked += 1
        print(f"{word} {time.monotonic() - begun:6.1f} s  {what}: {'; '.join(notes)}", flush=True)


def demand(condition: object, what: object) -> None:
    """Fails the check unless the condition holds."""
    if not condition:
        raise Failed(str(what))
