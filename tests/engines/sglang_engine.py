"""SGLang's own radix cache, event recorder and ZMQ publisher, without a GPU: the modules of its wheel under stubs, numpy for tensors.

The folder with the wheel's sglang/ is named by KVATLAS_ENGINES.
"""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

from proofs import Proofreader, read_tree
from sglang_stubs import GENUINE, fill, key_of
from stubs import Stubs

Stubs(Path(os.environ["KVATLAS_ENGINES"]), {"sglang", "torch", "triton"}, GENUINE, fill).install()
_kv_events = importlib.import_module("sglang.srt.disaggregation.kv_events")
_radix = importlib.import_module("sglang.srt.mem_cache.radix_cache")
_base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
_events = importlib.import_module("sglang.srt.mem_cache.events")


class _Allocator:
    device = "cpu"

    def free_segment(self, *_: Any, **__: Any) -> None:
        pass


class Engine:
    """Serves prompts as the scheduler does: matches, inserts, evicts the least recently used leaves when full."""

    FORMAT = "sglang"

    def __init__(
        self, endpoint: str, replay: str | None, rank: int, blocks: int, block_size: int, buffer_steps: int, hash_fn: str
    ) -> None:
        self._size, self._capacity, self._rank = block_size, blocks * block_size, rank
        self._names = _events.KvEventLoraNames()
        self._cache = _radix.RadixCache.create_simulated(
            mock_allocator=_Allocator(),
            page_size=block_size,
            enable_kv_cache_events=True,
            kv_event_lora_names=self._names,
        )
        # Drops blocks and tells nobody, where that is set.
        self.hides_removals = False
        self._publisher = _kv_events.ZmqEventPublisher(rank, endpoint, replay, buffer_steps=buffer_steps)
        self._flush()

    def _key(self, tokens: list[int], salt: str | None, adapter: str | None) -> Any:
        return key_of(_radix, self._names, tokens, salt, adapter)

    def depth(self, tokens: list[int], salt: str | None = None, adapter: str | None = None) -> tuple[int, int]:
        """How many leading blocks the cache has now, and how many of them a request would take."""
        held = self._depth(tokens, salt, adapter)
        return held, min(held, (len(tokens) - 1) // self._size)

    def _depth(self, tokens: list[int], salt: str | None, adapter: str | None) -> int:
        """Touches and splits nothing."""
        key = self._key(tokens, salt, adapter).page_aligned(self._size)
        node, have = self._cache.root_node, 0
        while len(key) > 0:
            child = node.children.get(key.child_key(self._size))
            if child is None:
                break
            common = child.key.match(key, page_size=self._size)
            have += common
            if common < len(child.key):
                break
            key, node = key[common:], child
        return int(have // self._size)

    def serve(self, prompts: list[Any]) -> list[tuple[int, list[int]]]:
        """Serves prompts. Returns how many blocks each took from the cache, and no answers."""
        return [(self._serve(*prompt), []) for prompt in prompts]

    def _serve(self, tokens: list[int], salt: str | None, adapter: str | None) -> int:
        # The last token is always computed.
        match = self._cache.match_prefix(_base.MatchPrefixParams(key=self._key(tokens[:-1], salt, adapter)))
        key = self._key(tokens, salt, adapter)
        self._cache.insert(_base.InsertParams(key=key))
        over = self._cache.total_size() - self._capacity
        if over > 0:
            self._cache.evict(_base.EvictParams(num_tokens=over))
        self._flush()
        return int(match.device_prefix_len // self._size)

    def proofread(self) -> Proofreader:
        """Compares each stored event with the cache from now on."""
        return read_tree(self._cache, _events)

    def reset(self) -> None:
        """Clears the cache."""
        self._cache.reset()
        self._flush()

    def _flush(self) -> None:
        events = self._cache.kv_events.take()
        if self.hides_removals:
            events = [event for event in events if not isinstance(event, _kv_events.BlockRemoved)]
        if events:
            batch = _kv_events.KVEventBatch(ts=time.time(), events=events, attn_dp_rank=self._rank)
            self._publisher.publish(batch)
