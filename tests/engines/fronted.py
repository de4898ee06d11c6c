"""Engines that are followed by the servers before them: late starts, holes, and restarts of servers and engines."""

from __future__ import annotations

import random
import time

from processes import wait_until
from servers import SERVICERS
from world import World

# How long an answer may be called exact after its server or its engine has gone, in seconds.
BEHIND = 5.0
# For how long nothing comes, in seconds.
IDLE = 8.0


def fronted(world: World, seeded: random.Random, rounds: int) -> None:
    """Servers that name the engines' sockets end, alone and with their engines."""
    for number in range(2 * rounds):
        world.serve(60)
        world.compare(10)
        world.serve_as_promised(5)
        place = seeded.randrange(len(world.servers))
        server, holders = world.servers[place], [holder for holder in world.holders if holder.worker.endswith(f"-{place}")]
        server.kill()
        if number % 2:
            holders[0].host.kill()
            world.compare(10, behind=BEHIND)
            holders[0].host.start()
        else:
            world.serve(40)
            world.compare(10, behind=BEHIND)
        server.start()
        world.serve(20)
        world.compare(10, behind=BEHIND)
        world.settles(20)
    world.promises_are_kept()


def relayed(world: World, seeded: random.Random, rounds: int) -> None:
    """Servicers hand on what engines publish. The bridge, a servicer, and an engine with its servicer end and begin late."""
    world.serve(60)
    _knows_again(world)
    # A stream stands while nothing comes, and nothing is said that a server in Python would not bear.
    time.sleep(IDLE)
    assert world.are_exact(), world.status()
    for _ in range(rounds):
        world.serve_as_promised(10)
        world.bridge.kill()
        world.serve(60)
        world.bridge.start()
        _knows_again(world)
        place = seeded.randrange(len(world.servers))
        server, host = world.servers[place], world.hosts[place]
        server.kill()
        world.serve(40)
        world.compare(10, behind=BEHIND)
        server.start()
        _knows_again(world)
        # Together, as they are one server: behind a servicer that lives on, nobody can know it before the new engine's batches reach it.
        server.kill()
        host.kill()
        world.compare(10, behind=BEHIND)
        host.start()
        server.start()
        host.serve([(0, world.chats.stranger())])
        _knows_again(world)
        world.serve_as_promised(5)
    world.promises_are_kept()


def holed(world: World, seeded: random.Random, rounds: int) -> None:
    """Messages are lost before the servicers, which have no replay sockets: they say DATA_LOSS, and nothing stays wrong that is called exact."""
    for _ in range(rounds):
        world.serve(60)
        _clear(world)
        world.settles(10)
        for proxy in world.proxies:
            proxy.lose(0.2)
        world.serve(80)
        world.compare(10, behind=BEHIND)
        for proxy in world.proxies:
            proxy.heal()
        assert sum(proxy.lost for proxy in world.proxies)
        world.serve(40)
        world.compare(10, behind=BEHIND)
        for host in world.hosts:
            world.none_exact(host, 10)
        _clear(world)
        world.compare(20, behind=BEHIND)
        world.settles(20)


def _knows_again(world: World) -> None:
    """Waits until all is known again: what a servicer in Python may have handed on before, only a clear ends."""
    world.compare(20, behind=BEHIND)
    if world.layout.server == SERVICERS[0]:
        _clear(world)
    world.settles(20)


def _clear(world: World) -> None:
    """All engines clear their caches, and again, until somebody has heard it."""

    def clears() -> bool:
        for number in range(len(world.holders)):
            world.reset(number)
        return world.are_exact()

    wait_until("all engines have cleared", clears)
    world.serve(30)
