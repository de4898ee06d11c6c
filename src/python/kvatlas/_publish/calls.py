"""What waits to be published."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..events import Cursor, Event
from ..profile import Profile


class Flushed(NamedTuple):
    """The last batch at a flush, why one was not sent, and the link on which the first one since the last flush was handed over."""

    cursor: Cursor
    failure: str | None
    link: int | None


@dataclass(frozen=True, slots=True)
class Flush:
    """Answer when all calls before have been handed to NATS."""

    done: asyncio.Future[Flushed]


@dataclass(frozen=True, slots=True)
class Leave(Flush):
    """Say goodbye, and answer as for a flush. Nothing behind it is published."""


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Begin a new epoch, in which the holder has nothing, with these doubts."""

    doubts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """Send heartbeats, or be silent between batches."""

    are_sent: bool


@dataclass(frozen=True, slots=True)
class SetProfile:
    """Tell this profile from now on."""

    profile: Profile


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish these events, which take about so many bytes."""

    tier: int
    events: list[Event]
    size: int


Command: TypeAlias = Publish | BeginEpoch | Heartbeats | SetProfile | Flush


class CallQueue(asyncio.Queue["Command | None"]):
    """What waits to be published, bounded in calls and in their bytes."""

    def __init__(self, calls_max: int, bytes_max: int) -> None:
        super().__init__(calls_max)
        self._bytes, self._bytes_max = 0, bytes_max

    def full(self) -> bool:
        return super().full() or self._bytes >= self._bytes_max

    def _put(self, item: Command | None) -> None:
        super()._put(item)
        self._bytes += item.size if isinstance(item, Publish) else 0

    def _get(self) -> Command | None:
        item = super()._get()
        self._bytes -= item.size if isinstance(item, Publish) else 0
        return item
