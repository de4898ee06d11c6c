"""The event sources that replicas of Ray Serve advertise, and which holders they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..errors import InvalidValueError
from ..models import worker_of_instance
from ..wire import HolderMatch, QueryReply

METADATA_KEY: Final = "kv_event_metadata"
"""The entry of ``routing_stats`` in which a replica tells its event source."""

Depths = Mapping[tuple[str, int], int]
"""Blocks that are certain to be reusable, by a holder's worker or address and its rank."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """The socket on which an engine publishes its KV events.

    :param endpoint: ``tcp://HOST:PORT``.
    :param rank: the data-parallel rank.
    :param replay_endpoint: the socket that replays events, if there is one.
    :param block_size: tokens in a block, where the replica tells it.
    :param worker: the worker that is called ``HOST:PORT``; ``None`` where that is too long for a name.
    """

    endpoint: str
    rank: int
    replay_endpoint: str | None
    block_size: int | None
    worker: str | None

    @classmethod
    def of_stats(cls, stats: object) -> EventSource | None:
        """The source in a replica's ``routing_stats``; none where there is none."""
        metadata = stats.get(METADATA_KEY) if isinstance(stats, Mapping) else None
        if not isinstance(metadata, Mapping):
            return None
        endpoint, rank = metadata.get("endpoint"), metadata.get("dp_rank") or 0
        if not isinstance(endpoint, str) or not endpoint or not isinstance(rank, int):
            return None
        replay, size = metadata.get("replay_endpoint"), metadata.get("block_size")
        return cls(
            endpoint,
            rank,
            replay if isinstance(replay, str) and replay else None,
            size if isinstance(size, int) else None,
            _worker_at(endpoint),
        )

    @property
    def instance(self) -> str:
        """``HOST:PORT``: what the engine is called unless it has been given a name."""
        return _authority(self.endpoint)

    def blocks(self, depths: Depths) -> int:
        """How many blocks of a prompt the engine is certain to have, by its name or its address."""
        by_name = 0 if self.worker is None else depths.get((self.worker, self.rank), 0)
        return max(by_name, depths.get((self.instance, self.rank), 0))


def _authority(endpoint: str) -> str:
    return endpoint.rpartition("//")[2]


def _worker_at(endpoint: str) -> str | None:
    try:
        return worker_of_instance(_authority(endpoint))
    except InvalidValueError:
        return None


def certain_blocks(holder: HolderMatch) -> int:
    """How many leading blocks a request can reuse for certain: all tiers, or those about which there is no doubt."""
    if holder.exact:
        return holder.usable_blocks
    if holder.host_exact:
        return holder.host_usable_blocks or 0
    if holder.device_exact:
        return holder.device_usable_blocks or 0
    return 0


def depths_of(reply: QueryReply) -> Depths:
    """What an answer says for certain, by workers and by addresses. Neither is ever taken for the other: addresses have a colon."""
    depths: dict[tuple[str, int], int] = {}
    for holder in reply.holders:
        blocks = certain_blocks(holder)
        for name in (holder.worker, holder.address):
            if name is not None and blocks:
                key = (name, holder.rank)
                depths[key] = max(blocks, depths.get(key, 0))
    return depths
