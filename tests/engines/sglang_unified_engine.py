"""SGLang's own unified radix cache, its default for every model, with event recorder and ZMQ publisher, without a GPU: the modules of its wheel under stubs.

The tree core is the Python one. An allocator of slots of full and of window attention stands in the place of SGLang's. The folder with the
wheel's sglang/ is named by KVATLAS_ENGINES.
"""

from __future__ import annotations

import importlib
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
from proofs import Proofreader, read_tree
from sglang_stubs import GENUINE, Tensor, fill, key_of, tensor
from stubs import Options, Stubs

_CACHE = "sglang.srt.mem_cache."
_UNIFIED = {
    _CACHE + name
    for name in (
        "unified_radix_cache",
        "unified_cache.cache_action",
        "unified_cache.component_type",
        "unified_cache.components",
        "unified_cache.components.base",
        "unified_cache.components.full",
        "unified_cache.components.mamba",
        "unified_cache.components.swa",
        "unified_cache.session_ref_tracker",
        "unified_cache.unified_tree_core",
        "unified_cache.unified_tree_core_interface",
    )
}


class _Allocator:
    """Slots of full and of window attention, and which window slot belongs to which full slot."""

    device = "cpu"

    def __init__(self, full: int, window: int) -> None:
        self._sizes = full, window
        self.full_attn_allocator = SimpleNamespace(free_segment=self.free_full)
        self.clear()

    def clear(self) -> None:
        full, window = self._sizes
        self._full, self._window = list(range(full, 0, -1)), list(range(window, 0, -1))
        self._mapping = numpy.zeros(full + 1, dtype=numpy.int64)

    def mamba_full_cache_donor(self) -> None:
        """None: there are no states."""

    def full_available_size(self) -> int:
        return len(self._full)

    available_size = full_available_size

    def swa_available_size(self) -> int:
        return len(self._window)

    def alloc(self, count: int) -> Any:
        full = [self._full.pop() for _ in range(count)]
        for slot in full:
            self._mapping[slot] = self._window.pop()
        return tensor(full)

    def free_full(self, slots: Any, start_pos: int = 0) -> None:
        self._full.extend(int(slot) for slot in slots)

    free_full_segment = free_full

    def free_swa_segment(self, slots: Any, start_pos: int = 0) -> None:
        for slot in slots:
            if self._mapping[slot]:
                self._window.append(int(self._mapping[slot]))
                self._mapping[slot] = 0

    def free_segment(self, slots: Any, start_pos: int = 0) -> None:
        self.free_swa_segment(slots)
        self.free_full(slots)

    def translate_swa_indices_for_transfer(self, slots: Any) -> Any:
        return self._mapping[numpy.asarray(slots)].view(Tensor)

    def set_full_to_swa_mapping(self, full: Any, window: Any) -> None:
        self._mapping[numpy.asarray(full)] = numpy.asarray(window)

    def clear_full_to_swa_mapping(self, full: Any) -> None:
        self._mapping[numpy.asarray(full)] = 0


class _Settings:
    """The environment's settings, of which none is set but that of the tree core."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(get=lambda: {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}.get(name, False))


class _StreamingSession:
    def __init__(self, cache: Any) -> None:
        self.slots: dict[str, Any] = {}

    def try_match_prefix(self, params: Any) -> None:
        """None: there are no sessions."""


def _create_core(name: str, params: Any, components: Any) -> Any:
    return importlib.import_module(_CACHE + "unified_cache.unified_tree_core").UnifiedTreeCore(params, components)


def _fill(module: Any) -> None:
    fill(module)
    match module.__name__.removeprefix(_CACHE):
        case "torch":
            module.device = lambda name: name
        case "hicache_storage":
            module.PoolTransfer = Options
        case "sglang.srt.environ":
            module.envs = _Settings()
        case "unified_cache.tree_core_registry":
            module.select_tree_core_backend = lambda params: "python"
            module.create_tree_core = _create_core
        case "sglang.srt.utils.rank_consensus_checker":
            module.rank_consensus = lambda *_, **__: lambda function: function
        case "allocator.swa":
            module.SWATokenToKVPoolAllocator = _Allocator
        case "allocator.unified_hybrid_swa":
            module.UnifiedSWAAllocatorBase = type("UnifiedSWAAllocatorBase", (), {})
        case "sglang.srt.session.streaming_session":
            module.StreamingSession = _StreamingSession
            module.is_virtual_node = lambda node: False
        case "allocator.page_interleave":
            module.page_interleave_shard_size = lambda allocator: 1


Stubs(Path(os.environ["KVATLAS_ENGINES"]), {"sglang", "torch", "triton"}, GENUINE | _UNIFIED, _fill, has_classes=True).install()
_kv_events = importlib.import_module("sglang.srt.disaggregation.kv_events")
_base = importlib.import_module(_CACHE + "base_prefix_cache")
_events = importlib.import_module(_CACHE + "events")
_init = importlib.import_module(_CACHE + "cache_init_params")
_radix = importlib.import_module(_CACHE + "radix_cache")
_unified = importlib.import_module(_CACHE + "unified_radix_cache")
_kinds = importlib.import_module(_CACHE + "unified_cache.component_type").ComponentType

# Of models with windows: tokens of one, and their slots for each of full attention.
MODELS: dict[str | None, tuple[int, float] | None] = {None: None, "host": None, "windows": (128, 0.8), "wide windows": (1024, 0.6)}


class _Part:
    """The upper part of a node, as a split would make it."""

    def __init__(self, node: Any, length: int) -> None:
        self.component_data, self.backuped, self.evicted = node.component_data, node.backuped, node.evicted
        self.key = range(length)


class Engine:
    """Serves prompts as the scheduler does for a request that runs alone: matches, locks, makes room, inserts after the prefill and at the end."""

    FORMAT = "sglang"

    def __init__(
        self,
        endpoint: str,
        replay: str | None,
        rank: int,
        blocks: int,
        block_size: int,
        buffer_steps: int,
        hash_fn: str,
        model: str | None = None,
        **_: Any,
    ) -> None:
        self._size, self._rank, self._random = block_size, rank, random.Random(rank)
        windows = MODELS[model]
        self._window, ratio = windows or (0, 1.0)
        # Slots of the host have nothing in them, and are never used again.
        self._has_host, self._host_slots = model == "host", 0
        self._allocator = _Allocator(blocks * block_size, int(blocks * block_size * ratio))
        self._names = _events.KvEventLoraNames()
        self._cache = _unified.UnifiedRadixCache(
            _init.CacheInitParams(
                disable=False,
                req_to_token_pool=SimpleNamespace(),
                token_to_kv_pool_allocator=self._allocator,
                page_size=block_size,
                enable_kv_cache_events=True,
                kv_event_lora_names=self._names,
                sliding_window_size=self._window or None,
                tree_components=(_kinds.FULL, _kinds.SWA) if windows else (_kinds.FULL,),
            )
        )
        self._cache.update_eviction_metrics = lambda *_, **__: None
        self._publisher = _kv_events.ZmqEventPublisher(rank, endpoint, replay, buffer_steps=buffer_steps)
        self._flush()

    def depth(self, tokens: list[int], salt: str | None = None, adapter: str | None = None) -> tuple[int, int]:
        """How many leading blocks full attention has now, on the host too, and how many of them a request would take. Touches and splits nothing."""
        held = self._walk(self._key(tokens, salt, adapter), _kinds.FULL)
        return held, self._walk(self._key(tokens[:-1], salt, adapter), None)

    def serve(self, prompts: list[Any]) -> list[tuple[int, list[int]]]:
        """Serves prompts. Returns how many blocks each took from the cache, and its answer."""
        return [self._serve(*prompt) for prompt in prompts]

    def proofread(self) -> Proofreader:
        """Compares each stored event with the cache from now on."""
        return read_tree(self._cache.tree_core, _events)

    def reset(self) -> None:
        """Clears the cache."""
        self._cache.reset()
        self._allocator.clear()
        self._flush()

    def _key(self, tokens: list[int], salt: str | None, adapter: str | None) -> Any:
        return key_of(_radix, self._names, tokens, salt, adapter).page_aligned(self._size)

    def _walk(self, key: Any, only: Any) -> int:
        """The depth of the last place at which all components agree."""
        core = self._cache.tree_core
        of = [part for part in core.components if only is None or part.component_type == only]
        validators = [part.create_match_validator(match_device_only=not self._has_host) for part in of]
        node, have, best = core.root_node, 0, 0
        while len(key) > 0:
            child = node.children.get(key.child_key(self._size))
            if child is None or (child.evicted and not (self._has_host and child.backuped)):
                break
            common = child.key.match(key, page_size=self._size)
            if common == 0:
                break
            have += common
            is_whole = common == len(child.key)
            seen = child if is_whole else _Part(child, common)
            # Each of them counts on, so all are asked.
            if all([validator(seen) for validator in validators]):
                best = have
            if not is_whole:
                break
            key, node = key[common:], child
        return int(best // self._size)

    def _serve(self, prompt: list[int], salt: str | None, adapter: str | None) -> tuple[int, list[int]]:
        tokens, answer = list(prompt), []
        match = self._cache.match_prefix(_base.MatchPrefixParams(key=self._key(tokens[:-1], salt, adapter)))
        lock = self._cache.lock(match.last_device_node)
        if self._has_host:
            self._load(tokens[:-1], salt, adapter)
            self._cache.unlock(lock)
            match = self._cache.match_prefix(_base.MatchPrefixParams(key=self._key(tokens[:-1], salt, adapter)))
            lock = self._cache.lock(match.last_device_node)
        hit = match.device_prefix_len
        row = [int(slot) for slot in self._cache.path_device_indices(match.last_device_node)[:hit]]
        row += self._room(len(tokens) - hit)
        row, lock, protected = self._insert(self._key(tokens, salt, adapter), row, hit, 0, lock)
        freed = 0
        for _ in range(self._random.randrange(1, 2 * self._size)):
            answer.append(self._random.randrange(128_000))
            row += self._room(1)
            length = len(tokens) + len(answer)
            freed = self._free_behind_window(row, length, max(freed, protected), freed)
        # The last token has no slot of its own yet.
        whole = self._key(tokens + answer[:-1], salt, adapter)
        row, lock, protected = self._insert(whole, row, protected, freed, lock)
        self._allocator.free_segment(tensor(row[protected:]))
        self._cache.unlock(lock)
        if self._has_host:
            self._offload()
        self._flush()
        return hit // self._size, answer

    def _load(self, tokens: list[int], salt: str | None, adapter: str | None) -> None:
        """Loads what the host has of a prompt, as SGLang's controller does."""
        core, key = self._cache.tree_core, self._key(tokens, salt, adapter)
        node = core.root_node
        while len(key) > 0:
            child = node.children.get(key.child_key(self._size))
            if child is None or child.key.match(key, page_size=self._size) < len(child.key):
                break
            key, node = key[len(child.key) :], child
        spec, _ = core.build_load_back_spec(node.id)
        if spec.nodes_to_load:
            core.commit_load_back(node.id, tensor(self._room(len(spec.host_indices))), spec, {})
            core.finish_load_back(node.id)

    def _offload(self) -> None:
        """Moves some leaves of the device to the host, each behind what is before it, and drops one there, as SGLang's controller does."""
        core = self._cache.tree_core
        leaves = sorted(core.evictable_device_leaves, key=lambda node: node.id)
        for leaf in self._random.sample(leaves, min(3, len(leaves))):
            for node in core.build_backup_kv_action(leaf.id).node_ids:
                value, _ = core.build_backup_spec(node)
                if len(value):
                    core.commit_backup(node, tensor(range(self._host_slots, self._host_slots + len(value))), {})
                    self._host_slots += len(value)
                    core.finish_write_through([node], node)
            demoted = core.demote(leaf.id)
            for slots in demoted.device_frees.pop(_kinds.FULL, ()):
                self._allocator.free_segment(slots)
        dropped = core.drive_host_eviction(_kinds.FULL, 1)
        dropped.host_frees.clear()

    def _free_behind_window(self, row: list[int], length: int, start: int, freed: int) -> int:
        """Frees whole pages of windows that decoding leaves behind and the tree doesn't own. Returns up to where they are free."""
        if not self._window:
            return freed
        keep = -(-max(self._window, self._size) // self._size) * self._size
        edge = max(start, length - 1 - keep) // self._size * self._size
        if edge <= start:
            return freed
        self._allocator.free_swa_segment(tensor(row[start:edge]))
        return edge

    def _room(self, count: int) -> list[int]:
        short = max(0, count - self._allocator.full_available_size())
        short_of_windows = max(0, count - self._allocator.swa_available_size())
        if short or short_of_windows:
            self._cache.evict_for_alloc(_base.EvictParams(num_tokens=short, swa_num_tokens=short_of_windows))
        return [int(slot) for slot in self._allocator.alloc(count)]

    def _insert(self, key: Any, row: list[int], protected: int, freed: int, lock: Any) -> tuple[list[int], Any, int]:
        params = _base.InsertParams(key=key, value=tensor(row[: len(key)]), prev_prefix_len=protected)
        if self._window:
            params.set_evicted_seqlen(_kinds.SWA, freed)
        result = self._cache.insert(params)
        slots = self._cache.path_device_indices(result.last_device_node)
        row[: len(slots)] = [int(slot) for slot in slots]
        self._cache.unlock(lock)
        return row, self._cache.lock(result.last_device_node), len(slots)

    def _flush(self) -> None:
        events = self._cache.take_events()
        if events:
            batch = _kv_events.KVEventBatch(ts=time.time(), events=events, attn_dp_rank=self._rank)
            self._publisher.publish(batch)
