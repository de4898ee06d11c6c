"""The small part of Ray Serve that :mod:`kvatlas.ray` uses, for tests without Ray. tests/routers/ray_router.py has the genuine one."""

from __future__ import annotations

import sys
from collections import Counter as Tally
from types import ModuleType, SimpleNamespace
from typing import Any


class QueueLengths:
    """The queues that a router knows of."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def get(self, replica: str) -> int | None:
        return self.known.get(replica)


class RequestRouter:
    def __init__(self) -> None:
        self.replica_queue_len_cache = QueueLengths()
        self.replicas: list[Any] = []

    def update_replicas(self, replicas: list[Any]) -> None:
        self.replicas = replicas


class LocalityMixin:
    def apply_locality_routing(self, pending_request: Any = None) -> set[str]:
        return {replica.replica_id for replica in self.replicas}  # type: ignore[attr-defined]


class MultiplexMixin:
    def apply_multiplex_routing(self, pending_request: Any = None) -> set[str]:
        wanted = pending_request.metadata.multiplexed_model_id
        return {replica.replica_id for replica in self.replicas if wanted in replica.models}  # type: ignore[attr-defined]


class KVAwareRouter(RequestRouter):
    """Ray's own, which is there where an engine is."""


class Counter:
    """Counts by tags."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.counts: Tally[str] = Tally()

    def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        self.counts["".join((tags or {}).values())] += 1


def install(patch: Any, *, has_engine: bool) -> None:
    """Puts the fakes in the place of Ray, and forgets what was made with others."""
    modules = {
        "ray": {},
        "ray.util": {},
        "ray.util.metrics": {"Counter": Counter},
        "ray.serve": {},
        "ray.serve.request_router": {
            "LocalityMixin": LocalityMixin,
            "MultiplexMixin": MultiplexMixin,
            "RequestRouter": RequestRouter,
        },
        "ray.serve.llm": {},
    }
    if has_engine:
        modules["ray.serve.llm.request_router"] = {"KVAwareRouter": KVAwareRouter}
    for name, members in modules.items():
        module = ModuleType(name)
        module.__path__ = []
        module.__dict__.update(members)
        patch.setitem(sys.modules, name, module)
    patch.delitem(sys.modules, "kvatlas.ray", raising=False)


def replica(name: str, endpoint: str | None = None, *, models: tuple[str, ...] = (), **metadata: Any) -> Any:
    """A replica that advertises an event source, if it has one."""
    source = {"endpoint": endpoint, "block_size": 16, "dp_rank": 0, "replay_endpoint": None} | metadata
    stats = {"kv_event_metadata": source} if endpoint else {}
    return SimpleNamespace(replica_id=name, routing_stats=stats, models=models)


def request(tokens: object = None, *args: Any, model: str = "", **kwargs: Any) -> Any:
    """A request with its tokens."""
    return SimpleNamespace(
        args=list(args),
        kwargs=kwargs if tokens is None else {"request_token_ids": tokens} | kwargs,
        metadata=SimpleNamespace(multiplexed_model_id=model),
        routing_context=SimpleNamespace(should_backoff=False),
    )
