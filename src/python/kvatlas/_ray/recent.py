"""The load of replicas, as far as choices tell of it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Final

LASTING: Final = 10.0
"""Seconds for which a request is taken to last: so long, on average, a choice counts."""


class RecentChoices:
    """How many requests each replica was chosen for lately. A choice counts less the older it is, and never more than 1."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, tuple[float, float]] = {}

    def add(self, replica: Hashable, now: float) -> None:
        """Counts a choice."""
        self._counts[replica] = (self.of(replica, now) + 1.0, now)

    def of(self, replica: Hashable, now: float) -> float:
        """The count of a replica."""
        count, at = self._counts.get(replica, (0.0, now))
        return count * math.exp((at - now) / LASTING)

    def keep(self, replicas: Iterable[Hashable]) -> None:
        """Forgets all but these."""
        kept = set(replicas)
        self._counts = {replica: count for replica, count in self._counts.items() if replica in kept}
