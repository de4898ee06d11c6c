"""What vLLM's scheduler and caches need of the modules that are stubs."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

GENUINE = {
    "vllm.distributed.kv_events",
    "vllm.utils.hashing",
    "vllm.utils.math_utils",
    "vllm.v1.engine",
    "vllm.v1.hisparse.block_pool",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.metrics.cache_hit_source",
    "vllm.v1.metrics.stats",
    "vllm.v1.outputs",
    "vllm.v1.request",
    "vllm.v1.core.block_pool",
    "vllm.v1.core.encoder_cache_manager",
    "vllm.v1.core.kv_cache_config_builder",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.kv_cache_metrics",
    "vllm.v1.core.kv_cache_planning",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.core.sched.interface",
    "vllm.v1.core.sched.output",
    "vllm.v1.core.sched.request_queue",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.core.sched.utils",
}
# Types of tensors, and the bytes of an element.
_TYPES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "uint8": 1,
    "int8": 1,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
}


class _Type:
    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize

    def __deepcopy__(self, _: Any) -> _Type:
        return self


@dataclasses.dataclass
class _EventsConfig:
    publisher: str
    endpoint: str
    replay_endpoint: str | None
    buffer_steps: int
    enable_kv_cache_events: bool = True
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


def _logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    for once in ("info_once", "warning_once", "debug_once"):
        setattr(logger, once, lambda message="", *_, **__: logger.debug("%s", message))
    return logger


def _genuine_class(file: str, name: str) -> Any:
    """A class of a genuine file that can't be imported as a whole."""
    path = Path(os.environ["KVATLAS_ENGINES"], file)
    body = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == name]
    scope: dict[str, Any] = {}
    exec("from collections.abc import Sequence\nfrom typing import *\nT = TypeVar('T')", scope)
    exec(compile(ast.Module(body, []), str(path), "exec"), scope)
    return scope[name]


def fill(module: Any) -> None:
    """Gives a stub what must be real."""
    match module.__name__:
        case "torch":
            module.dtype = _Type
            for name, size in _TYPES.items():
                setattr(module, name, _Type(name, size))
        case "vllm.utils.torch_utils":
            module.get_dtype_size = lambda one: one.itemsize
            module.PIN_MEMORY = False
        case "vllm.utils":
            module.length_from_prompt_token_ids_or_embeds = lambda tokens, _: len(tokens)
        case "vllm.config" | "vllm.config.kv_events":
            module.KVEventsConfig = _EventsConfig
            module.get_current_vllm_config_or_none = lambda: None
        case "vllm.logger":
            module.init_logger = _logger
        case "vllm.multimodal.utils":
            module.get_mm_features_in_window = lambda *_, **__: (0, [])
        case "vllm.v1.utils":
            module.ConstantList = _genuine_class("vllm/v1/utils.py", "ConstantList")
            module.record_function_or_nullcontext = lambda *_: contextlib.nullcontext()
        case "vllm.v1.structured_output.request":
            module.StructuredOutputRequest = type(
                "StructuredOutputRequest", (), {"from_sampling_params": staticmethod(lambda _: None)}
            )
        case "vllm.v1.hisparse.layout":
            module.get_hisparse_kv_cache_groups = lambda *_: None
        case "vllm.envs":
            module.__getattr__ = lambda _: None
