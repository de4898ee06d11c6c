"""Which engine gets a request: by what is cached, by load, and among equals by a home. It needs nothing else: copy it.

[README.md](README.md#how-it-chooses) says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

# Tokens that decide a prompt's home: more than the system prompt, which most prompts share.
HOME_TOKENS = 1024
# Where something is known, engines within a tenth of the prompt's own cost above the cheapest are equals.
KNOWN_TOLERANCE = 0.1
# Where nothing is known, the home has a good chance to have all of it.
UNKNOWN_TOLERANCE = 1.0


def home_score(engine: str, first_tokens: Sequence[int]) -> bytes:
    """The engine's score for prompts that begin with these tokens: the same in every router. The highest is the home."""
    digest = hashlib.blake2b(engine.encode() + b"\0", digest_size=8)
    digest.update(b"".join(token.to_bytes(4, "little") for token in first_tokens))
    return digest.digest()


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
    tolerance = (KNOWN_TOLERANCE if is_known else UNKNOWN_TOLERANCE) * blocks
    most = min(costs.values()) + tolerance
    first = tokens[:HOME_TOKENS]
    equals = (engine for engine, cost in costs.items() if cost <= most)
    chosen = max(equals, key=lambda engine: home_score(engine, first))
    return chosen, to_compute[chosen]
