"""How to publish."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final, Literal, TypeAlias

from .._checks import check_type, whole
from ..errors import InvalidValueError
from ..events import Cursor
from ..hashing import BLOCK_SIZE, U64_MAX
from ..profile import Profile

Hashing: TypeAlias = Literal["engine", "recompute"]
"""Whether a namespace takes the hashes in events for its chain, or computes the chain from the content beside them."""


AFTER_SEQ_MAX: Final = U64_MAX // 2
"""The largest number behind which a publisher goes on. It never comes to the end of the numbers above."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """JetStream: a batch is sent until the stream has acknowledged it, and the next one waits. The stream has to exist.

    :param timeout: seconds that an acknowledgement may take before the batch is sent again.
    :param attempts: how often a batch is sent before it is given up. What is given up shows as a gap, and is asked for.
    """

    timeout: float = 5.0
    attempts: int = 6

    def __post_init__(self) -> None:
        check_type(self.timeout, (int, float), "timeout")
        object.__setattr__(self, "attempts", whole(self.attempts, "attempts"))
        if not self.timeout > 0 or self.attempts < 1:
            raise InvalidValueError("an acknowledgement needs a timeout above 0, and at least one attempt")


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """How to publish. The defaults are right for an engine.

    :param epoch: the incarnation, which has to be above every one before; the time in microseconds where it is absent.
    :param after: instead of ``epoch``: goes on behind this batch of an incarnation whose blocks are not known here. Daemons
        can be given what was published since, but not the full state. The batch's number is at most 2^63 - 1.
    :param transport: core NATS where it is absent.
    :param block_size: tokens in a block. Every batch says it: a namespace that the daemon's configuration does not name takes it
        over, and any other one refuses batches of another size.
    :param hashing: as in the daemon's namespace.
    :param profile: where requests for the holder go, and how it is labelled: told with the first batch, with every heartbeat, and with
        what clears.
    :param heartbeat_interval: the longest silence, in seconds; a heartbeat ends it.
    :param batch_delay: the least time between two batches, in seconds: events that come sooner share the next one. After a pause
        they are sent at once. Zero makes every call a batch.
    :param batch_events_max: most events of a batch.
    :param batch_bytes_max: most bytes of a batch, about; never more than the NATS server takes.
    :param queue_batches_max: most calls that wait to be published.
    :param queue_bytes_max: about how many bytes they take at most, and one call more.
    :param ring_batches_max: most batches that are kept for daemons that miss them.
    :param ring_bytes_max: most payload bytes that are kept for them.
    :param chunk_bytes_max: most bytes of one chunk of an answer, about; never more than the NATS server takes.
    :param answers_max: most answers that are sent at once; further questions are refused, and come again.
    :param answers_resyncs: whether to answer daemons, and so to keep the ring and the block table.
    """

    epoch: int | None = None
    after: Cursor | None = None
    transport: Acknowledged | None = None
    block_size: int = BLOCK_SIZE
    hashing: Hashing = "engine"
    profile: Profile = field(default_factory=Profile)
    heartbeat_interval: float = 1.0
    batch_delay: float = 0.002
    batch_events_max: int = 1024
    batch_bytes_max: int = 512 << 10
    queue_batches_max: int = 1024
    queue_bytes_max: int = 64 << 20
    ring_batches_max: int = 4096
    ring_bytes_max: int = 16 << 20
    chunk_bytes_max: int = 256 << 10
    answers_max: int = 4
    answers_resyncs: bool = True

    def __post_init__(self) -> None:
        if self.epoch is not None and self.after is not None:
            raise InvalidValueError("give epoch or after, not both")
        check_type(self.profile, Profile, "profile")
        if self.transport is not None:
            check_type(self.transport, Acknowledged, "transport")
        self._check_begin()
        if self.hashing not in ("engine", "recompute"):
            raise InvalidValueError(f"hashing {self.hashing!r} is not one of engine, recompute")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if name in _SECONDS:
                check_type(value, (int, float), name)
            else:
                value = whole(value, name)
                object.__setattr__(self, name, value)
            if not value >= least:
                raise InvalidValueError(f"{name} must be at least {least}")
        if self.block_size > _BLOCK_SIZE_MAX:
            raise InvalidValueError(f"block_size must be at most {_BLOCK_SIZE_MAX}")

    def _check_begin(self) -> None:
        begun = Cursor(0, 0)
        if self.epoch is not None:
            begun = Cursor(whole(self.epoch, "epoch"), 0)
            object.__setattr__(self, "epoch", begun.epoch)
        elif self.after is not None:
            check_type(self.after, Cursor, "after")
            begun = Cursor(whole(self.after.epoch, "the epoch of after"), whole(self.after.seq, "the batch of after"))
            object.__setattr__(self, "after", begun)
        if not (0 <= begun.epoch <= U64_MAX and 0 <= begun.seq <= AFTER_SEQ_MAX):
            raise InvalidValueError(
                f"epochs are from 0 to {U64_MAX}, and a publisher goes on behind batch {AFTER_SEQ_MAX} at most: begin a new epoch"
            )


_BLOCK_SIZE_MAX: Final = 1 << 16
"""Most tokens in a block."""

_LEAST: Final[dict[str, float]] = {
    "block_size": 1,
    "heartbeat_interval": 0.001,
    "batch_delay": 0,
    "batch_events_max": 1,
    "batch_bytes_max": 1,
    "queue_batches_max": 1,
    "queue_bytes_max": 1,
    "ring_batches_max": 0,
    "ring_bytes_max": 0,
    "chunk_bytes_max": 1,
    "answers_max": 1,
}
_SECONDS: Final = ("heartbeat_interval", "batch_delay")
assert set(_LEAST) <= {known.name for known in fields(PublisherOptions)}
