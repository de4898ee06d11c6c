"""What a way adds to a request: time beyond that of a request straight to an engine, and computing of the way's own processes.

Engines answer at once and publish nothing meanwhile, so that what is measured is the way alone. Requests are of prompts that were asked before, one after the
other, by turns straight to an engine and on the way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from chats import Chats
from memory import TICKS, numbers, settle, ticks
from processes import Prompt
from vllm_fleet import ENGINES, SIZE, Caches, sites
from ways import Way

WARM_REQUESTS = 200
# The first ones open connections.
UNCOUNTED = 20


def timed(ask: Callable[[Prompt], object], prompt: Prompt) -> float:
    """Milliseconds that a request takes."""
    began = time.perf_counter()
    ask(prompt)
    return 1000 * (time.perf_counter() - began)


def figures(milliseconds: list[float]) -> dict[str, float]:
    """The middle and the worst of a hundred."""
    hundredths = statistics.quantiles(milliseconds, n=100)
    return {"p50": round(hundredths[49], 3), "p99": round(hundredths[98], 3)}


def measure(seed: int, way: type[Way], requests: int) -> dict[str, Any]:
    """What a way adds to so many requests."""
    chats = Chats(seed, SIZE, [None], [None])
    with sites(seed, way, Caches()) as site:
        site.drive(chats, WARM_REQUESTS)
        prompts = [prompt for prompt in chats.probes(4 * requests) if len(prompt[0]) >= SIZE][: requests + UNCOUNTED]
        settle(site.way)
        site.fleet.rest()
        straight, through = [], []
        before = 0
        for number, prompt in enumerate(prompts):
            if number == UNCOUNTED:
                before = ticks(numbers(site.way.processes()))
            straight.append(timed(lambda prompt, place=number % ENGINES: site.ask_aside(place, prompt), prompt))
            through.append(timed(site.ask, prompt))
        computed = ticks(numbers(site.way.processes())) - before
    straight, through = straight[UNCOUNTED:], through[UNCOUNTED:]
    blocks = statistics.fmean(len(tokens) // SIZE for tokens, *_ in prompts[UNCOUNTED:])
    added = [one - other for one, other in zip(through, straight, strict=True)]
    return {
        "requests": len(added),
        "blocks": round(blocks, 1),
        "straight_ms": figures(straight),
        "through_ms": figures(through),
        "added_ms": figures(added),
        "computing_ms": round(1000 * computed / TICKS / len(added), 3),
    }
