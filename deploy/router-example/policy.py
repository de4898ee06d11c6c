"""Which engine gets a request: by what is cached, by load, and among equals by a home. It needs nothing else: copy it.

[README.md](README.md#how-it-chooses) says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

# Most tokens that decide a prompt's home: more than the system prompt, which most prompts share.
HOME_TOKENS_MAX = 1024
# Where something is known, engines within a tenth of the prompt's own cost above the cheapest are equals.
KNOWN_TOLERANCE_DIVISOR = 10


def home_key(tokens: Sequence[int]) -> bytes:
    """The hash of the first tokens, which decide the prompt's home.

    Their number is a power of two: so a short conversation keeps its home over most turns.
    """
    shortened = min(len(tokens), HOME_TOKENS_MAX)
    decisive = 1 << shortened.bit_length() >> 1
    return hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in tokens[:decisive])).digest()


def home_score(engine: str, key: bytes) -> bytes:
    """The engine's score for prompts with this key: the same in every router. The highest is the home."""
    return hashlib.sha256(engine.encode() + b"\0" + key).digest()


def choose(
    engines: Iterable[str],
    tokens: Sequence[int],
    blocks: int,
    usable: Mapping[str, int],
    under_way: Mapping[str, int],
) -> tuple[str, int]:
    """The engine for a prompt of so many blocks, and how many of them it has to compute.

    `usable` says how many of them each engine need not compute, as far as that is known. `under_way` says how many blocks each
    engine has to compute for other prompts.
    """
    to_compute = {engine: max(blocks - usable.get(engine, 0), 0) for engine in engines}
    costs = {engine: missing + under_way.get(engine, 0) for engine, missing in to_compute.items()}
    is_known = any(usable.get(engine, 0) for engine in costs)
    # Where nothing is known, the home has a good chance to have all of it.
    divisor = KNOWN_TOLERANCE_DIVISOR if is_known else 1
    # In parts of a block, so that nothing is rounded.
    most = min(costs.values()) * divisor + blocks
    key = home_key(tokens)
    equals = (engine for engine, cost in costs.items() if cost * divisor <= most)
    chosen = max(equals, key=lambda engine: home_score(engine, key))
    return chosen, to_compute[chosen]
