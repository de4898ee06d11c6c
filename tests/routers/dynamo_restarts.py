"""What Dynamo's router is told while kvatlas, a worker or the router itself restarts, over NATS with two replicas of kvatlas."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from dynamo_site import Replica, Site, new_site, start_bridge
from lines import Lines, router_of

BLOCKS = 1000
# From so many seconds behind the moment on at which all is there again, every answer has to be right.
BOUND = 5.0
# The same where only one of two replicas is gone, from the moment on at which it is killed: a question may be on its way to it.
BOUND_OF_REPLICAS = 1.0


class Restarts:
    """Two workers, two replicas, and a bridge that finds the workers."""

    def __init__(self, site: Site, seed: int, prompts: int) -> None:
        self.site, self._seed, self._prompts = site, seed, prompts
        self.mockers = [site.start_mocker(f"mocker-{number}", BLOCKS)[0] for number in range(2)]
        self.replicas = [Replica(site, number) for number in range(2)]
        for replica in self.replicas:
            replica.start()
        start_bridge(site, "--discover", f"dynamo:{site.discovery.place},component=dynamo.backend")
        for replica in self.replicas:
            replica.wait()
        self.router: Lines = router_of(site, seed)
        self.router.ask(serve=prompts)

    def one_replica(self, end: Callable[[Replica], None]) -> float:
        """One replica ends, and comes back."""
        begun = time.monotonic()
        end(self.replicas[0])
        time.sleep(2)
        self.replicas[0].start()
        self.replicas[0].wait()
        # The other one has answered all the time.
        return begun

    def both_replicas(self) -> float:
        """kvatlas is gone for a moment."""
        for replica in self.replicas:
            replica.kill()
        for replica in self.replicas:
            replica.start()
        for replica in self.replicas:
            replica.wait()
        return time.monotonic()

    def worker(self) -> float:
        """A worker ends, and another one, which has nothing, comes in its place."""
        gone = self.site.workers()
        self.mockers[0].terminate()
        self.mockers[0].wait()
        self.site.wait_until("the record of the worker is gone", lambda: self.site.workers() < gone)
        begun = time.monotonic()
        self.mockers[0] = self.site.start_mocker("mocker-2", BLOCKS)[0]
        return begun

    def own_router(self) -> float:
        """The router ends, and another one begins."""
        self.router.close()
        self.router = router_of(self.site, self._seed)
        self.router.ask(recall=self._prompts)
        return time.monotonic()


def judge(name: str, watched: dict[str, Any], since: float, bound: float = BOUND) -> bool:
    """Prints the line of a restart. Returns whether no answer beyond the bound was wrong."""
    wrong = [(when - since, kind) for when, kind in watched["wrong"]]
    late = Counter(kind for when, kind in wrong if when > bound)
    early = Counter(kind for when, kind in wrong if when <= bound)
    last = max((when for when, _ in wrong), default=0.0)
    counted = ", ".join(f"{count} {kind}" for kind, count in early.items())
    within = f"{counted} before, the last after {last:.1f} s" if early else "none wrong"
    print(f"| Dynamo, {name} | {bound:.0f} s | {watched['warm']} of {watched['questions']} | {late['blind'] + late['failed']} | {late['stale']} | {within} |", flush=True)
    return not late.total() and watched["warm"] > 0


def restarts(seed: int, is_short: bool) -> bool:
    """Plays all of them. Returns whether no answer was wrong beyond the bound."""
    print("\n| restarts | beyond | warm questions | blind | stale | |\n|---|---|---|---|---|---|")
    outcomes = []
    with new_site("nats") as site:
        own = Restarts(site, seed, 40 if is_short else 200)
        # Those that leave the workers as they are, are watched all the time.
        around: list[tuple[str, Callable[[], float], float]] = [
            ("one of two replicas stops", lambda: own.one_replica(Replica.stop), 0),
            ("one of two replicas is killed", lambda: own.one_replica(Replica.kill), BOUND_OF_REPLICAS),
            ("both replicas", own.both_replicas, BOUND),
        ]
        for name, restart, bound in around:
            own.router.ask(watch=True)
            since = restart()
            time.sleep(BOUND + 3)
            outcomes.append(judge(name, own.router.ask(end=True), since, bound))
        after: dict[str, Callable[[], float]] = {"a worker": own.worker, "the router": own.own_router}
        for name, restart in after.items():
            since = restart()
            own.router.ask(watch=True)
            time.sleep(BOUND + 3)
            outcomes.append(judge(name, own.router.ask(end=True), since))
        own.router.ask(serve=20)
        outcomes.append(own.router.ask(compare=100)["wrong"] == 0)
    return all(outcomes)
