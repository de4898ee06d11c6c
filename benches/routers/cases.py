"""What routers go through, in front of the same engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from chats import Chats
from vllm_fleet import ADAPTERS, SIZE, Caches, Site, Tally, sites
from ways import Way

CLIENTS = 4
# Engines with few blocks evict all the time.
SMALL = 420
# Batches that an engine can send again where that is not enough.
FEW_STEPS = 20
# What a request of one of several clients takes, so that they overlap.
SERVING_SECONDS = 0.025
LOST = 0.2
# Batches by which an engine that was not heard is ahead.
AHEAD = 3


@dataclass
class Scenario:
    """How requests come, and what happens meanwhile."""

    play: Callable[[Site, Chats, int], Tally]
    caches: Caches = field(default_factory=Caches)
    salts: tuple[str | None, ...] = (None,)
    adapters: tuple[str | None, ...] = (None,)
    routers: int = 1
    # How many times as many requests as others get, until the caches are full.
    times: int = 1
    # Played only by ways that can keep what they know.
    keeps_state: bool = False

    def run(self, seed: int, way: type[Way], requests: int) -> Tally:
        """Plays it with new engines."""
        chats = Chats(seed, SIZE, list(self.salts), list(self.adapters))
        with sites(seed, way, self.caches, self.routers) as site:
            return self.play(site, chats, self.times * requests)

    def needs(self) -> set[str]:
        """What requests say that not every router takes."""
        return {name for name, values in (("salts", self.salts), ("adapters", self.adapters)) if values != (None,)}


def spaced(site: Site, chats: Chats, requests: int) -> Tally:
    """Requests 25 ms apart."""
    return site.drive(chats, requests)


def back_to_back(site: Site, chats: Chats, requests: int) -> Tally:
    """Each request as soon as the last one is answered."""
    return site.drive(chats, requests, spacing=0)


def all_through(site: Site, chats: Chats, requests: int) -> Tally:
    """The same, and none of them past the router, which then knows of all."""
    return site.drive(chats, requests, spacing=0, aside=0)


def crowd(site: Site, chats: Chats, requests: int) -> Tally:
    """Several clients at once, with conversations of their own, all through the router."""
    return site.crowd([chats.of_another(site.seed * CLIENTS + number) for number in range(CLIENTS)], requests)


def engine_restarts(site: Site, chats: Chats, requests: int) -> Tally:
    """The engine with most requests restarts with what is in its process, and begins with nothing."""
    site.drive(chats, requests)
    site.restart_engine(site.busiest())
    site.way.rest()
    return site.drive(chats, requests // 2)


def unheard_restart(site: Site, chats: Chats, requests: int) -> Tally:
    """The same while nothing of the engine is heard. When it is heard again, its numbers are beyond where they were."""
    site.drive(chats, requests)
    place = site.busiest()
    site.lose(1, place)
    before = site.fleet.counts[place]
    site.restart_engine(place)
    for _ in range(before + AHEAD):
        site.ask_aside(place, chats.stranger())
    site.lose(0, place)
    site.way.rest()
    return site.drive(chats, requests // 2)


def routers_restart(site: Site, chats: Chats, requests: int) -> Tally:
    """The router restarts, and nothing else."""
    site.drive(chats, requests)
    site.way.restart_routers()
    return site.drive(chats, requests // 2)


def all_restart(site: Site, chats: Chats, requests: int) -> Tally:
    """All but the engines restarts."""
    site.drive(chats, requests)
    site.way.restart_all()
    return site.drive(chats, requests // 2)


def lost(site: Site, chats: Chats, requests: int) -> Tally:
    """A fifth of the messages of a while is lost, and nothing replays them."""
    site.drive(chats, requests)
    site.lose(LOST)
    site.drive(chats, requests // 4)
    site.lose(0)
    return site.drive(chats, requests // 2)


SCENARIOS = {
    "25 ms apart": Scenario(spaced, Caches(blocks=SMALL)),
    "back to back": Scenario(back_to_back),
    "back to back, none past the router": Scenario(all_through),
    "four clients at once": Scenario(crowd, Caches(seconds=SERVING_SECONDS)),
    "two routers": Scenario(spaced, routers=2),
    "gpt-oss, 1,600 blocks": Scenario(spaced, Caches("gpt-oss", 1600), times=2),
    "Gemma 3, 1,600 blocks": Scenario(spaced, Caches("gemma-3", 1600), times=2),
    "salts": Scenario(spaced, salts=(None, "red", "blue")),
    "adapters": Scenario(spaced, adapters=(None, *ADAPTERS)),
    "engines name equal blocks apart": Scenario(spaced, Caches(blocks=SMALL, own_names=True)),
    "an engine restarts": Scenario(engine_restarts),
    "an engine restarts unheard": Scenario(unheard_restart, Caches(can_lose=True)),
    "the router restarts": Scenario(routers_restart),
    "all but the engines restarts, replays reach": Scenario(all_restart),
    "all but the engines restarts, replays out of reach": Scenario(all_restart, Caches(buffer_steps=FEW_STEPS)),
    "the same, with what is known kept in a directory": Scenario(all_restart, Caches(buffer_steps=FEW_STEPS), keeps_state=True),
    "messages lost, no replay": Scenario(lost, Caches(has_replay=False)),
}
