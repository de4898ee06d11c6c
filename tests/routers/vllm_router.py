"""Runs vLLM's own router behind `kvatlas bridge --republish`, and beside it the same router on the engines' own sockets.

    python3 tests/routers/vllm_router.py [--seed N] [--short | --choices N]

Wants VLLM_ROUTER, KVATLAS_BIN and NATS_SERVER_BIN, KVATLAS_ENGINES (see tests/engines/fetch.py), and a Python with msgspec, pyzmq, cbor2, xxhash,
numpy and pydantic. Prints a line a scenario; with --choices only that of so many choices behind kvatlas, each compared with what the caches have. Ends with 1 where the router
behind kvatlas has chosen worse than it may.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable

from vllm_fleet import ADAPTERS, ENGINES, SIZE, SPACING, Caches, Tally, plain_chats, sites
from ways import Direct, Kept, Leased, Republished, Way


ALL_RESTART = "the router and kvatlas with its state restart, replays out of reach"
OTHER_SPEAKS = "the bridge that speaks is killed, and another one goes on, replays out of reach"


def undisturbed(seed: int, way: type[Way], requests: int) -> Tally:
    """Requests one after the other."""
    with sites(seed, way) as site:
        return site.drive(plain_chats(seed), 2 * requests)


def many(seed: int, choices: int) -> bool:
    """So many choices behind kvatlas, in front of caches that evict, and prints what came of them. Returns whether all were right, or nearly so."""
    with sites(seed, Republished, Caches(blocks=300)) as site:
        # Events have more time than elsewhere: in so many choices, a machine is busy now and then.
        tally = site.drive(plain_chats(seed), 3 * choices, 2 * SPACING, choices=choices)
    return judge("many choices, caches that evict", tally, tally.requests // 1000)


def judge(name: str, behind: Tally, most: int, without: Tally | None = None) -> bool:
    """Prints a line. Returns whether no more choices were wrong than these, and none was blind."""
    is_right = behind.requests > 0 and behind.blind == 0 and behind.missed <= most
    print(f"{'ok' if is_right else 'WRONG'}: vllm-router, {name}: {behind}" + (f"; without kvatlas {without}" if without else ""), flush=True)
    return is_right


def router_restarts(seed: int, way: type[Way], requests: int) -> Tally:
    """The router restarts, when the engines can replay a few of their batches only."""
    with sites(seed, way, Caches(buffer_steps=20)) as site:
        chats = plain_chats(seed)
        site.drive(chats, 2 * requests)
        site.way.restart_routers()
        return site.drive(chats, requests)


def kvatlas_restarts(seed: int, way: type[Way], requests: int) -> Tally:
    """kvatlas is killed, and the router goes on."""
    with sites(seed, way) as site:
        chats = plain_chats(seed)
        site.drive(chats, requests)
        if isinstance(site.way, Republished):
            site.way.kvatlas.kill()
            site.drive(chats, 20)
            site.way.restart_kvatlas()
        return site.drive(chats, requests)


def all_restart(seed: int, way: type[Way], requests: int) -> Tally:
    """All but the engines restart, when the engines can replay a few of their batches only."""
    with sites(seed, way, Caches(buffer_steps=20)) as site:
        chats = plain_chats(seed)
        site.drive(chats, 2 * requests)
        if isinstance(site.way, Republished):
            site.way.kvatlas.stop()
            site.drive(chats, 5)
            site.way.restart_kvatlas()
        site.way.restart_routers()
        return site.drive(chats, requests)


def other_speaks(seed: int, way: type[Way], requests: int) -> Tally:
    """One of two bridges is killed, when the engines can replay a few of their batches only; without kvatlas, nothing happens."""
    with sites(seed, way, Caches(buffer_steps=20)) as site:
        chats = plain_chats(seed)
        site.drive(chats, 2 * requests)
        if isinstance(site.way, Leased):
            site.way.kill_first()
        return site.drive(chats, requests)


def special(seed: int, way: type[Way], requests: int, salt: str | None, adapter: str | None) -> Tally:
    """One engine has a prompt, and another one more of it with a salt or an adapter, which is of no use to the prompt without."""
    with sites(seed, way) as site:
        choice, tally = random.Random(seed), Tally()
        prompts = [[choice.randrange(128_000) for _ in range(10 * SIZE + 1)] for _ in range(requests // 4)]
        for tokens in prompts:
            own, others = choice.sample(range(ENGINES), 2)
            site.ask_aside(own, (tokens[: 8 * SIZE], None, None))
            site.ask_aside(others, (tokens, salt, adapter))
        time.sleep(1)
        for tokens in prompts:
            tally.add(site.ask((tokens, None, None)))
            time.sleep(SPACING)
        return tally


def main() -> int:
    """Plays all scenarios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="fewer requests")
    parser.add_argument("--choices", type=int, default=0, help="so many choices behind kvatlas, and nothing else: 10000 take about twenty minutes")
    arguments = parser.parse_args()
    if arguments.choices:
        return int(not many(arguments.seed, arguments.choices))
    seed, requests = arguments.seed, 60 if arguments.short else 200
    scenarios: dict[str, Callable[[type[Way]], Tally]] = {
        "undisturbed": lambda way: undisturbed(seed, way, requests),
        "the router restarts, replays out of reach": lambda way: router_restarts(seed, way, requests),
        "kvatlas restarts": lambda way: kvatlas_restarts(seed, way, requests),
        ALL_RESTART: lambda way: all_restart(seed, way, requests),
        OTHER_SPEAKS: lambda way: other_speaks(seed, way, requests),
        "salts, plain prompts": lambda way: special(seed, way, requests, "red", None),
        "adapters, plain prompts": lambda way: special(seed, way, requests, None, ADAPTERS[0]),
    }
    ways: dict[str, type[Way]] = {ALL_RESTART: Kept, OTHER_SPEAKS: Leased}
    is_wrong = False
    for name, play in scenarios.items():
        without, behind = play(Direct), play(ways.get(name, Republished))
        # A request may come before the events of the last one.
        is_wrong |= not judge(name, behind, max(without.missed, behind.requests // 100), without)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
