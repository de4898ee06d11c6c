"""vLLM's own block pool, hashing and ZMQ publisher, without a GPU: the modules of its wheel under stubs.

The folder with the wheel's vllm/ is named by KVATLAS_ENGINES.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proofs import Proofreader, read_pool
from stubs import Stubs

GENUINE = {
    "vllm.distributed.kv_events",
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_utils",
    "vllm.utils.hashing",
    "vllm.utils.math_utils",
}
# What the genuine modules use in isinstance().
SPECS = (
    "AttentionSpec ChunkedLocalAttentionSpec FullAttentionSpec KVCacheConfig KVCacheGroupSpec KVCacheSpec KVCacheTensor MambaSpec "
    "MLAAttentionSpec SlidingWindowSpec UniformTypeKVCacheSpecs CrossAttentionSpec"
)


class _Config:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def _logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    for once in ("info_once", "warning_once", "debug_once"):
        setattr(logger, once, logger.info)
    return logger


def _fill(module: Any) -> None:
    if module.__name__ == "vllm.v1.kv_cache_interface":
        base = type("Spec", (), {})
        for name in SPECS.split():
            setattr(module, name, type(name, (base,), {}))
    if module.__name__ == "vllm.config.kv_events":
        module.KVEventsConfig = _Config
    if module.__name__ == "vllm.logger":
        module.init_logger = _logger
    if module.__name__ == "vllm.multimodal.utils":
        module.get_mm_features_in_window = lambda *_, **__: (0, [])
    if module.__name__ == "vllm.v1.request":
        module.Request = object


Stubs(Path(os.environ["KVATLAS_ENGINES"]), {"vllm", "torch"}, GENUINE, _fill).install()
_kv_events = importlib.import_module("vllm.distributed.kv_events")
_block_pool = importlib.import_module("vllm.v1.core.block_pool")
_utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
_hashing = importlib.import_module("vllm.utils.hashing")


# The tokens in whose place images are, and the images' hashes.
Images = Sequence[tuple[int, str]]


class _Adapter:
    """What the pool reads of a LoRA request."""

    def __init__(self, name: str) -> None:
        self.name = self.lora_name = name
        self.lora_path = f"/adapters/{name}"
        self.adapter_id = self.lora_int_id = 1 + sum(name.encode())


class _Request:
    """What the pool reads of a request."""

    prompt_is_token_ids = None

    def __init__(self, number: int, tokens: list[int], salt: str | None, adapter: str | None, images: Images) -> None:
        self.request_id = str(number)
        self.all_token_ids = self.prompt_token_ids = tokens
        self.num_tokens = len(tokens)
        self.mm_features = [_Config(identifier=image, mm_position=_Config(offset=offset, length=1)) for offset, image in images]
        self.cache_salt = salt
        self.lora_request = _Adapter(adapter) if adapter else None
        self.prompt_embeds = None
        self.prompt_embeds_per_block_hashes: dict[Any, Any] = {}
        self.session_id = None
        self.block_hashes: list[Any] = []
        self.kv_hints = None
        self.skip_reading_prefix_cache = False


class Engine:
    """Serves prompts as the scheduler does: finds the cached prefix, allocates, caches full blocks, frees in reverse."""

    FORMAT = "vllm"

    def __init__(
        self,
        endpoint: str,
        replay: str | None,
        rank: int,
        blocks: int,
        block_size: int,
        buffer_steps: int,
        hash_fn: str,
        topic: str = "",
        names_seed: bytes | None = None,
    ) -> None:
        """With a seed of its own, an engine has names of its own, as one process has them with a hash that is not cryptographic."""
        self._size, self._count = block_size, 0
        function = getattr(_hashing, hash_fn)
        _utils.init_none_hash(function)
        self._none = _utils.BlockHash(function(names_seed)) if names_seed else None
        self._pool = _block_pool.BlockPool(
            num_gpu_blocks=blocks, enable_caching=True, hash_block_size=block_size, enable_kv_cache_events=True
        )
        self._hasher = _utils.get_request_block_hasher(block_size, function)
        # Drops blocks and tells nobody, where that is set.
        self.hides_removals = False
        # Blocks in host memory, by their hashes.
        self._host: set[Any] = set()
        self._publisher = _kv_events.ZmqEventPublisher(rank, endpoint, replay, buffer_steps=buffer_steps, topic=topic)

    def _request(self, tokens: list[int], salt: str | None, adapter: str | None, images: Images) -> _Request:
        self._count += 1
        request = _Request(self._count, tokens, salt, adapter, images)
        if self._none:
            setattr(_utils, "NONE_HASH", self._none)
        request.block_hashes = self._hasher(request)
        return request

    def _cached(self, hashes: list[Any]) -> list[Any]:
        found: list[Any] = []
        for block_hash in hashes:
            got = self._pool.get_cached_block(block_hash, [0])
            if not got:
                break
            found.append(got[0])
        return found

    def depth(self, tokens: list[int], salt: str | None = None, adapter: str | None = None, images: Images = ()) -> tuple[int, int]:
        """How many leading blocks the engine has now, and how many of them a request would take."""
        held = len(self.tiers(tokens, salt, adapter, images))
        return held, min(held, (len(tokens) - 1) // self._size)

    def tiers(self, tokens: list[int], salt: str | None = None, adapter: str | None = None, images: Images = ()) -> list[str]:
        """Where each leading block is that the engine has: "gpu", also where it is in host memory, too, or "cpu"."""
        found: list[str] = []
        for block_hash in self._request(tokens, salt, adapter, images).block_hashes:
            if self._pool.get_cached_block(block_hash, [0]):
                found.append("gpu")
            elif block_hash in self._host:
                found.append("cpu")
            else:
                break
        return found

    def offload(self, prompt: Any, first: int, is_described: bool) -> None:
        """Copies the leading blocks of a prompt in the pool to host memory, from this one on.

        Tells it as vLLM's own offloading does: with the blocks' tokens, or by their names alone.
        """
        request = self._request(*prompt)
        hashes = request.block_hashes[: len(self._cached(request.block_hashes))]
        names = [_utils.maybe_convert_block_hash(block_hash) for block_hash in hashes]
        told = {"lora_id": None, "lora_name": None, "medium": "CPU", "group_idx": 0}
        events = []
        for place in range(first, len(hashes)):
            if hashes[place] in self._host:
                continue
            before = names[place - 1] if place and is_described else None
            tokens = list(request.all_token_ids[place * self._size : (place + 1) * self._size]) if is_described else []
            described = {"kv_cache_spec_kind": "full_attention"} if is_described else {}
            size = self._size if is_described else 0
            events.append(
                _kv_events.BlockStored(block_hashes=[names[place]], parent_block_hash=before, token_ids=tokens, block_size=size, **told, **described)
            )
            self._host.add(hashes[place])
        if events:
            self.publish(events)

    def evict(self, prompt: Any, place: int) -> None:
        """Drops a block of a prompt from the pool, as vLLM drops one that it could not load."""
        [block] = self._pool.get_cached_block(self._request(*prompt).block_hashes[place], [0]) or [None]
        if block:
            self._pool.evict_blocks({block.block_id})
            self._flush()

    def unload(self, prompt: Any, first: int) -> None:
        """Drops the blocks of a prompt from host memory, from this one on."""
        self._drop([block_hash for block_hash in self._request(*prompt).block_hashes[first:] if block_hash in self._host])

    def _drop(self, hashes: list[Any]) -> None:
        if hashes:
            names = [_utils.maybe_convert_block_hash(block_hash) for block_hash in hashes]
            self.publish([_kv_events.BlockRemoved(block_hashes=names, medium="CPU", group_idx=0)])
            self._host -= set(hashes)

    def serve(self, prompts: list[Any]) -> list[tuple[int | None, list[int]]]:
        """Serves prompts. Returns how many blocks each took from the cache, where there was room for it, and no answers."""
        return [(self._serve(*prompt), []) for prompt in prompts]

    def _serve(self, tokens: list[int], salt: str | None, adapter: str | None, images: Images = ()) -> int | None:
        request = self._request(tokens, salt, adapter, images)
        full = len(tokens) // self._size
        hit = self._cached(request.block_hashes[: max(0, (len(tokens) - 1) // self._size)])
        need = -(-len(tokens) // self._size) - len(hit)
        if need > self._pool.get_num_free_blocks() - sum(1 for block in hit if block.ref_cnt == 0):
            return None
        self._pool.touch(hit)
        blocks = hit + self._pool.get_new_blocks(need)
        self._pool.cache_full_blocks(request, blocks, len(hit), full, self._size, 0)
        self._pool.free_blocks(reversed(blocks))
        self._flush()
        return len(hit)

    def reset(self) -> None:
        """Clears the cache, and host memory."""
        self._drop(list(self._host))
        self._pool.reset_prefix_cache()
        self._flush()

    def proofread(self) -> Proofreader:
        """Compares each stored event with the cache from now on."""
        return read_pool(self._pool, _utils)

    def close(self) -> None:
        """Ends the publisher, and frees its ports."""
        self._publisher.shutdown()

    def _flush(self) -> None:
        events = self._pool.take_events()
        if self.hides_removals:
            events = [event for event in events if not isinstance(event, _kv_events.BlockRemoved)]
        for event in events:
            if isinstance(event, _kv_events.BlockStored):
                # The cache manager, which is not here, says it of each group.
                event.kv_cache_spec_kind = "full_attention"
        if events:
            self.publish(events)

    def publish(self, events: list[Any]) -> None:
        """Publishes a batch, also of what is not in the cache."""
        self._publisher.publish(_kv_events.KVEventBatch(ts=time.time(), events=events))
