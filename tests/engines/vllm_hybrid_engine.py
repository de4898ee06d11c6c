"""vLLM's own scheduler and caches of models with several groups of layers, without a GPU: modules of its wheel under stubs.

The scheduler, the KV cache manager, the coordinator of groups, their planning, the block pool, hashing and the publisher are genuine. In the
model's place a seeded stub samples tokens. The folder with the wheel's vllm/ is named by KVATLAS_ENGINES.
"""

from __future__ import annotations

import importlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from proofs import Proofreader, read_pool
from stubs import Options, Stubs
from vllm_stubs import GENUINE, fill

Stubs(Path(os.environ["KVATLAS_ENGINES"]), {"vllm", "torch"}, GENUINE, fill, has_classes=True).install()
_events = importlib.import_module("vllm.distributed.kv_events")
_specs = importlib.import_module("vllm.v1.kv_cache_interface")
_utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
_planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
_scheduler = importlib.import_module("vllm.v1.core.sched.scheduler")
_request = importlib.import_module("vllm.v1.request")
_outputs = importlib.import_module("vllm.v1.outputs")
_hashing = importlib.import_module("vllm.utils.hashing")
_torch = importlib.import_module("torch")
importlib.import_module("vllm.v1.core.single_type_kv_cache_manager").register_all_kvcache_specs(None)

# Steps without a scheduled token after which a request can't be served.
_IDLE_MAX = 3


def _full(heads: int = 8, size: int = 64, block: int = 16) -> Any:
    return _specs.FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=size, dtype=_torch.bfloat16)


def _window(tokens: int, heads: int = 8, size: int = 64, block: int = 16) -> Any:
    return _specs.SlidingWindowSpec(
        block_size=block, num_kv_heads=heads, head_size=size, dtype=_torch.bfloat16, sliding_window=tokens, dcp_sharded=False
    )


def _state(block: int, page: int) -> Any:
    return _specs.MambaSpec(
        block_size=block, shapes=((page // 4,),), dtypes=(_torch.float32,), mamba_cache_mode="align", page_size_padded=page
    )


def _gemma(window: int) -> list[Any]:
    return [*([_window(window, 16, 128)] * 5 + [_full(16, 128)]) * 10, *[_window(window, 16, 128)] * 2]


def _qwen3_next() -> list[Any]:
    attention = _full(2, 256, 64)
    return ([_state(64, attention.page_size_bytes)] * 3 + [attention]) * 12


# The layers of models, as vLLM describes them. Sizes of heads make the pages that decide on block sizes.
MODELS: dict[str, Callable[[], list[Any]]] = {
    "llama": lambda: [_full()] * 32,
    "gpt-oss": lambda: [_window(128), _full()] * 12,
    "gemma-3": lambda: _gemma(1024),
    "gemma-3, windows of 256": lambda: _gemma(256),
    # Windows have blocks of two of main attention, or the other way about.
    "gemma-4": lambda: ([_window(512, 8, 64)] * 5 + [_full(8, 128)]) * 10,
    "large main blocks": lambda: [_window(128, 8, 128), _full(8, 64)] * 12,
    "deepseek-v4": lambda: [
        _full(1, 16, 256),
        _window(128, 4, 16, 64),
        _window(127, 4, 16, 64),
        _window(8, 64, 16, 4),
        _window(128, 32, 16, 8),
    ]
    * 8,
    "qwen3-next": _qwen3_next,
    "window and state": lambda: [_state(16, _full().page_size_bytes), _window(128), _full()] * 8,
    "two windows": lambda: [_window(64), _window(256), _full()] * 8,
    "windows only": lambda: [_window(512)] * 32,
    "chunked attention": lambda: (
        [
            _specs.ChunkedLocalAttentionSpec(
                block_size=16, num_kv_heads=8, head_size=64, dtype=_torch.bfloat16, attention_chunk_size=512
            )
        ]
        * 3
        + [_full()]
    )
    * 12,
}


class Engine:
    """One engine: vLLM's scheduler and caches, and a stub in the model's place."""

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
        model: str,
        retention: int | None,
        at_once: int,
        topic: str = "",
    ) -> None:
        layers = MODELS[model]()
        states = [layer for layer in layers if isinstance(layer, _specs.MambaSpec)]
        cache = Options(
            block_size=states[0].block_size if states else 16,
            enable_prefix_caching=True,
            prefix_cache_retention_interval=retention,
            mamba_cache_mode="align" if states else "none",
            num_gpu_blocks=blocks,
            enable_mamba_shared_prefix_checkpoint=False,
            get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False),
        )
        config = self._config(cache, rank, endpoint, replay, buffer_steps, topic)
        groups = _planning.get_kv_cache_groups(config, {f"layer.{number}": layer for number, layer in enumerate(layers)})
        for group in groups:
            if isinstance(group.kv_cache_spec, _specs.UniformTypeKVCacheSpecs):
                group.kv_cache_spec = next(iter(group.kv_cache_spec.kv_cache_specs.values()))
        if len(groups) == 1:
            cache.block_size = groups[0].kv_cache_spec.block_size
        caches = _specs.KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups, prefix_cache_retention_interval=retention
        )
        self._groups, self._at_once, self._count = groups, at_once, 0
        self._random = random.Random()
        self._start(config, caches, getattr(_hashing, hash_fn))
        self._mains = [
            number for number, group in enumerate(groups) if isinstance(group.kv_cache_spec, _specs.FullAttentionSpec)
        ]
        self._size = groups[self._mains[0] if self._mains else 0].kv_cache_spec.block_size
        assert self._size == block_size, f"{model} has blocks of {self._size} tokens"

    @staticmethod
    def _config(cache: Any, rank: int, endpoint: str, replay: str | None, buffer_steps: int, topic: str) -> Any:
        budget = 2048
        return Options(
            cache_config=cache,
            parallel_config=Options(
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                data_parallel_index=rank,
                data_parallel_size=1,
                pipeline_parallel_size=1,
            ),
            scheduler_config=Options(
                max_num_seqs=8,
                max_num_batched_tokens=budget,
                policy="fcfs",
                watermark=0.0,
                long_prefill_token_threshold=0,
                prefill_schedule_interval=1,
                enable_chunked_prefill=True,
                scheduler_reserve_full_isl=True,
                disable_hybrid_kv_cache_manager=False,
            ),
            kv_events_config=_events.KVEventsConfig(
                publisher="zmq", endpoint=endpoint, replay_endpoint=replay, buffer_steps=buffer_steps, topic=topic
            ),
            model_config=Options(max_model_len=32_768, runner_type="generate"),
            observability_config=Options(per_request_spec_decode_metrics="none"),
            max_in_flight_tokens=budget,
            num_speculative_tokens=0,
            num_lookahead_tokens=0,
            num_prefill_lookahead_tokens=0,
            num_hash_lookahead_tokens=0,
            max_concurrent_batches=1,
            aux_output_config=Options(enabled=False),
            ec_manager_config=Options(get_encoder_cache_manager_obj=lambda: None),
            attention_config=Options(),
        )

    def _start(self, config: Any, caches: Any, hash_function: Any) -> None:
        unit, self._hash_unit = _utils.resolve_kv_cache_block_sizes(caches, config)
        _utils.init_none_hash(hash_function)
        self._hasher = _utils.get_request_block_hasher(self._hash_unit, hash_function, 0)
        grammars = SimpleNamespace(
            accept_tokens=lambda *_: True, should_advance=lambda *_: False, grammar_init=lambda *_: None
        )
        self._scheduler = _scheduler.Scheduler(
            config, caches, grammars, block_size=unit, hash_block_size=self._hash_unit, log_stats=False
        )
        self._manager = self._scheduler.kv_cache_manager
        # How many tokens of each running request came from the cache.
        self._taken: dict[str, int] = {}

    def _new(self, tokens: list[int], salt: str | None, output: int) -> Any:
        self._count += 1
        sampling = Options(max_tokens=output, min_tokens=0, stop_token_ids=(), all_stop_token_ids=set())
        return _request.Request(
            str(self._count), list(tokens), sampling, None, cache_salt=salt, block_hasher=self._hasher
        )

    def depth(self, tokens: list[int], salt: str | None = None, adapter: str | None = None) -> tuple[int, int]:
        """How many leading blocks all groups of full attention have now, and how many a request would take."""
        assert adapter is None
        hashes, matched = self._new(tokens, salt, 1).block_hashes, 0
        if self._mains:
            for one in _utils.resolve_block_hashes(hashes, self._hash_unit, self._size):
                if not self._manager.block_pool.get_cached_block(one, self._mains):
                    break
                matched += 1
        return matched, self._manager.coordinator.find_longest_cache_hit(hashes, len(tokens) - 1)[1] // self._size

    def serve(self, prompts: list[Any]) -> list[tuple[int, list[int]]]:
        """Serves prompts, some at once. Returns how many blocks each took from the cache, and what the model answered."""
        served = []
        for place in range(0, len(prompts), self._at_once):
            requests = []
            # The same prompts get the same answers from every engine.
            self._random.seed(str(prompts[place : place + self._at_once]))
            for tokens, salt, _ in prompts[place : place + self._at_once]:
                request = self._new(tokens, salt, self._random.randint(1, 3 * self._size))
                self._scheduler.add_request(request)
                requests.append((request, len(tokens)))
            self._run()
            for request, length in requests:
                taken = self._taken.pop(request.request_id, 0) // self._size
                served.append((taken, list(request.all_token_ids[length:])))
        return served

    def proofread(self) -> Proofreader:
        """Compares each stored event with the cache from now on."""
        return read_pool(self._manager.block_pool, _utils, set(range(len(self._groups))) - set(self._mains))

    def close(self) -> None:
        """Ends the publisher, and frees its ports."""
        self._scheduler.kv_event_publisher.shutdown()

    def _run(self) -> None:
        idle = 0
        while self._scheduler.has_unfinished_requests():
            idle = 0 if self._step() else idle + 1
            if idle > _IDLE_MAX:
                raise RuntimeError("a request does not fit the cache")

    def _step(self) -> bool:
        """One step of the engine. Returns whether it computed something."""
        planned = self._scheduler.schedule()
        names = list(planned.num_scheduled_tokens)
        for new in planned.scheduled_new_reqs:
            self._taken.setdefault(new.req_id, new.num_computed_tokens)
        sampled = []
        for name in names:
            request = self._scheduler.requests[name]
            is_computed = request.num_computed_tokens >= request.num_tokens
            sampled.append([self._random.randrange(128_000)] if is_computed else [])
        result = _outputs.ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: place for place, name in enumerate(names)}, sampled_token_ids=sampled
        )
        self._scheduler.update_from_output(planned, result)
        return bool(names)

    def reset(self) -> None:
        """Clears the cache."""
        self._manager.reset_prefix_cache()
        events = self._manager.take_events()
        if events:
            batch = _events.KVEventBatch(ts=time.time(), events=events)
            self._scheduler.kv_event_publisher.publish(batch)
