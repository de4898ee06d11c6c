"""SGLang's own radix cache, event recorder and ZMQ publisher, without a GPU: the modules of its wheel under stubs, numpy for tensors.

The folder with the wheel's sglang/ is named by KVATLAS_ENGINES.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
from stubs import Stubs

GENUINE = {
    "sglang.srt.disaggregation.kv_events",
    "sglang.srt.mem_cache.base_prefix_cache",
    "sglang.srt.mem_cache.cache_init_params",
    "sglang.srt.mem_cache.events",
    "sglang.srt.mem_cache.evict_policy",
    "sglang.srt.mem_cache.radix_cache",
    "sglang.srt.mem_cache.utils",
}


class _Tensor(numpy.ndarray):  # type: ignore[misc]
    """The little of a tensor that the cache uses."""

    def clone(self) -> Any:
        return self.copy()

    def to(self, *_: Any, **__: Any) -> Any:
        return self


def _tensor(values: Any, **_: Any) -> Any:
    return numpy.asarray(list(values), dtype=numpy.int64).view(_Tensor)


def _chained_hash(key: Any, prior: bytes | None, page_size: int) -> list[str]:
    """In place of the extension that SGLang compiles: a SHA-256 chain, a page a step. To consumers the values are opaque."""
    tokens, pages = array("I", key.raw_token_ids()), []
    for start in range(0, len(key), page_size):
        prior = hashlib.sha256((prior or b"") + tokens[start : start + page_size].tobytes()).digest()
        pages.append(prior.hex())
    return pages


def _fill(module: Any) -> None:
    if module.__name__ == "torch":
        module.Tensor, module.tensor, module.int64 = _Tensor, _tensor, numpy.int64
        module.device = type("device", (), {"__init__": lambda self, name: None})
        module.empty = lambda shape, **_: numpy.empty(shape, dtype=numpy.int64).view(_Tensor)
        module.cat = lambda parts, **_: numpy.concatenate(parts).view(_Tensor)
    if module.__name__ == "sglang.srt.mem_cache.cpp_utils.native_hash":
        module.get_native_hash = _chained_hash
    if module.__name__ == "sglang.srt.utils.common":
        module.ceil_align = lambda value, to: -(-value // to) * to


Stubs(Path(os.environ["KVATLAS_ENGINES"]), {"sglang", "torch", "triton"}, GENUINE, _fill).install()
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
        self._publisher = _kv_events.ZmqEventPublisher(rank, endpoint, replay, buffer_steps=buffer_steps)
        self._flush()

    def _key(self, tokens: list[int], salt: str | None, adapter: str | None) -> Any:
        extra = None
        if adapter:
            # As the scheduler does: the adapter's number, 32 digits, ends the key.
            number = hashlib.md5(adapter.encode()).hexdigest()
            extra = number
            self._names.register(SimpleNamespace(extra_key=extra, lora_id=number), adapter)
        return _radix.RadixKey(token_ids=array("q", tokens), extra_key=extra, cache_salt=salt)

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
        taken = self.depth(tokens, salt, adapter)[1]
        key = self._key(tokens, salt, adapter)
        self._cache.match_prefix(_base.MatchPrefixParams(key=key))
        self._cache.insert(_base.InsertParams(key=key))
        over = self._cache.total_size() - self._capacity
        if over > 0:
            self._cache.evict(_base.EvictParams(num_tokens=over))
        self._flush()
        return taken

    def reset(self) -> None:
        """Clears the cache."""
        self._cache.reset()
        self._flush()

    def _flush(self) -> None:
        events = self._cache.kv_events.take()
        if events:
            batch = _kv_events.KVEventBatch(ts=time.time(), events=events, attn_dp_rank=self._rank)
            self._publisher.publish(batch)
