"""What SGLang's caches need of the modules that are not theirs, and which modules are genuine."""

from __future__ import annotations

import hashlib
from array import array
from types import SimpleNamespace
from typing import Any

import numpy

# Of every cache.
GENUINE = {
    "sglang.srt.disaggregation.kv_events",
    "sglang.srt.mem_cache.base_prefix_cache",
    "sglang.srt.mem_cache.cache_init_params",
    "sglang.srt.mem_cache.events",
    "sglang.srt.mem_cache.evict_policy",
    "sglang.srt.mem_cache.radix_cache",
    "sglang.srt.mem_cache.utils",
}


class Tensor(numpy.ndarray):  # type: ignore[misc]
    """The little of a tensor that the caches use."""

    def clone(self) -> Any:
        return self.copy()

    def to(self, *_: Any, **__: Any) -> Any:
        return self

    def numel(self) -> int:
        return int(self.size)

    def detach(self) -> Any:
        return self


def tensor(values: Any, **_: Any) -> Any:
    """A tensor of whole numbers."""
    return numpy.asarray(list(values), dtype=numpy.int64).view(Tensor)


def _chained_hash(key: Any, prior: bytes | None, page_size: int) -> list[str]:
    """In place of the extension that SGLang compiles: a SHA-256 chain, a page a step. To consumers the values are opaque."""
    tokens, pages = array("I", key.raw_token_ids()), []
    for start in range(0, len(key), page_size):
        prior = hashlib.sha256((prior or b"") + tokens[start : start + page_size].tobytes()).digest()
        pages.append(prior.hex())
    return pages


def fill(module: Any) -> None:
    """Gives a stub what must be real."""
    if module.__name__ == "torch":
        module.Tensor, module.tensor, module.int64, module.int32, module.bool = Tensor, tensor, numpy.int64, numpy.int32, bool
        module.device = type("device", (), {"__init__": lambda self, name: None})
        module.empty = lambda shape, **_: numpy.empty(shape, dtype=numpy.int64).view(Tensor)
        module.cat = lambda parts, **_: numpy.concatenate(parts).view(Tensor)
    if module.__name__ == "sglang.srt.mem_cache.cpp_utils.native_hash":
        module.get_native_hash = _chained_hash
    if module.__name__ == "sglang.srt.utils.common":
        module.ceil_align = lambda value, to: -(-value // to) * to


def key_of(radix: Any, names: Any, tokens: list[int], salt: str | None, adapter: str | None) -> Any:
    """The key of a prompt in a tree. An adapter's name is registered with `names`."""
    extra = None
    if adapter:
        # As the scheduler does: the adapter's number, 32 digits, ends the key.
        extra = hashlib.md5(adapter.encode()).hexdigest()
        names.register(SimpleNamespace(extra_key=extra, lora_id=extra), adapter)
    return radix.RadixKey(token_ids=array("q", tokens), extra_key=extra, cache_salt=salt)
