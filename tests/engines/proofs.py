"""Stored events as proofs: where its parent is known by name, an event may prove that the cache has all blocks before it on the device.

Each event is compared with the cache at the moment at which it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any


class Proofreader:
    """Looks at stored events of the device. `has_all` says whether the cache has all blocks of these names there now, for a group of layers."""

    def __init__(self, has_all: Callable[[int | None, list[Any]], bool], windows: Container[int | None] = ()) -> None:
        """Groups are of full attention, but for those in `windows`."""
        self._has_all, self._windows = has_all, windows
        # Of each group, every name that was told, and the name before it.
        self._parents: dict[int | None, dict[Any, Any]] = {}
        # Events with a known parent, and those of them of which a block before was not held: of full attention, and of other groups.
        self.counts = [[0, 0], [0, 0]]

    def saw(self, event: Any) -> None:
        """Notes an event, which the cache tells now."""
        medium = getattr(event, "medium", None)
        if not hasattr(event, "parent_block_hash") or getattr(medium, "value", medium) not in ("GPU", None):
            return
        group = getattr(event, "group_idx", None)
        parents = self._parents.setdefault(group, {})
        before, name = [], event.parent_block_hash
        while name in parents:
            before.append(name)
            name = parents[name]
        if before and name is None:
            counts = self.counts[group in self._windows]
            counts[0] += 1
            counts[1] += not self._has_all(group, before)
        name = event.parent_block_hash
        for block in event.block_hashes:
            parents[block], name = name, block


class _Queue(list[Any]):
    """vLLM's queue of events, which shows each to a proofreader."""

    def __init__(self, reader: Proofreader) -> None:
        super().__init__()
        self._reader = reader

    def append(self, event: Any) -> None:
        self._reader.saw(event)
        super().append(event)


def read_pool(pool: Any, utils: Any, windows: Container[int | None] = ()) -> Proofreader:
    """Looks at what vLLM's block pool tells from now on."""

    # The pool's keys by what events call them.
    keys: dict[tuple[int | None, Any], Any] = {}

    def has_all(group: int | None, names: Iterable[Any]) -> bool:
        cached, told = pool.cached_block_hash_to_block._cache, [(group, name) for name in names]
        if not all(one in keys for one in told):
            keys.update({(utils.get_group_id(key), utils.maybe_convert_block_hash(utils.get_block_hash(key))): key for key in cached})
        return all(keys.get(one) in cached for one in told)

    def take_events() -> list[Any]:
        events = list(take())
        pool.kv_event_queue = _Queue(reader)
        return events

    reader, take = Proofreader(has_all, windows), pool.take_events
    pool.kv_event_queue = _Queue(reader)
    pool.take_events = take_events
    return reader


def read_tree(tree: Any, events: Any) -> Proofreader:
    """Looks at what a radix tree of SGLang tells from now on."""
    recorder = tree.kv_events

    def has_all(_: int | None, names: Iterable[Any]) -> bool:
        missing, nodes = set(names), list(tree.root_node.children.values())
        while nodes and missing:
            node = nodes.pop()
            nodes.extend(node.children.values())
            if not node.evicted:
                seed = recorder._namespace_seed(node)
                for one in recorder._node_event_hash_values(node):
                    missing.discard(events.namespaced_block_hash(events.hash_str_to_int64(one), namespace_seed=seed))
        return not missing

    def enqueue(event: Any) -> None:
        reader.saw(event)
        put(event)

    reader, put = Proofreader(has_all), recorder.enqueue
    recorder.enqueue = enqueue
    return reader
