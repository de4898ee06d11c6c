"""Names, and the subjects that they make."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import xxhash

from ._checks import check_type, whole
from .errors import InvalidValueError
from .hashing import BASE_SEED

PREFIX: Final = "kvatlas"
"""What every subject begins with unless configured otherwise."""

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_name(text: str, what: str) -> str:
    """``text``, if it can be a namespace or worker: 1 to 64 characters out of ``A-Z a-z 0-9 _ -``."""
    check_type(text, str, what)
    if not _NAME.fullmatch(text):
        raise InvalidValueError(f"{what} {text!r} is not 1 to 64 characters out of A-Z a-z 0-9 _ -")
    return text


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects under one prefix."""

    prefix: str = PREFIX

    def __post_init__(self) -> None:
        if len(self.prefix) > 64 or not all(_NAME.fullmatch(token) for token in self.prefix.split(".")):
            raise InvalidValueError(
                f"prefix {self.prefix!r} is not tokens out of A-Z a-z 0-9 _ - joined by dots, at most 64 bytes"
            )

    def events(self, namespace: str, worker: str) -> str:
        """Where a worker publishes its batches."""
        return f"{self._scoped('events', namespace)}.{check_name(worker, 'worker')}"

    def resync(self, namespace: str, worker: str, rank: int) -> str:
        """Where the publisher of one rank is asked for what a daemon has missed."""
        return f"{self._scoped('resync', namespace)}.{check_name(worker, 'worker')}.{rank}"

    def query(self, namespace: str) -> str:
        """Where queries go."""
        return self._scoped("query", namespace)

    def status(self, namespace: str) -> str:
        """Where status requests go."""
        return self._scoped("status", namespace)

    def hint(self, namespace: str) -> str:
        """Where routers tell where they have sent requests."""
        return self._scoped("hint", namespace)

    def outcome(self, namespace: str) -> str:
        """Where routers tell what their requests have found."""
        return self._scoped("outcome", namespace)

    def shards_query(self, namespace: str) -> str:
        """Where queries go that every shard is to answer."""
        return self._scoped("shards.query", namespace)

    def shards_status(self, namespace: str) -> str:
        """Where status requests go that every shard is to answer."""
        return self._scoped("shards.status", namespace)

    def _scoped(self, kind: str, namespace: str) -> str:
        return f"{self.prefix}.v1.{kind}.{check_name(namespace, 'namespace')}"


def shard_of(worker: str, shards: int) -> int:
    """Which of so many shards knows a worker's blocks."""
    if whole(shards, "shards") < 1:
        raise InvalidValueError(f"{shards} shards are not possible; there is one at least")
    return int(xxhash.xxh3_64_intdigest(check_name(worker, "worker").encode(), seed=BASE_SEED)) % shards
