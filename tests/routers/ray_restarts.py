"""Restarts beside Ray Serve: kvatlas, an engine, a replica with its engine, and the process that the router is in.

Engines have the same prompts in different depths, so that each choice tells what it was made by. Of a wrong one, another engine would have reused more. It
is stale where the chosen engine had more before the restart than it has now, and blind otherwise.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from judging import Restart
from ray import serve
from ray_fleet import ENGINES, PATIENCE, SIZE, Fleet, Front, Marked, Replica

from processes import Prompt

PROMPTS = 60
# Blocks of a prompt that its two engines have: no prompt is only where something restarts.
DEEP, SHALLOW = 8, 3
# What the engine that restarts is called.
PLACE = 1

# What the engines would reuse of a prompt before a restart, and now.
Truth = tuple[list[int], list[int]]


def kinds_of(place: int, truth: Truth) -> list[str]:
    """What is wrong with the choice of an engine."""
    before, now = truth
    if now[place] == max(now):
        return []
    return ["stale" if before[place] > now[place] else "blind"]


class Restarts:
    """A site whose parts restart, and prompts that its engines have."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        application = serve.deployment(ray_actor_options={"num_cpus": 0.1}, health_check_period_s=1)(Front)
        server = fleet.server("KvatlasRequestRouter")
        self._front = serve.run(application.bind(str(fleet.folder), server), name="restarts", route_prefix=None)
        self._prompts: list[Prompt] = [([fleet.random.randrange(128_000) for _ in range(DEEP * SIZE + 1)], None, None) for _ in range(PROMPTS)]
        # With its first request, a router comes to know replicas, and registers their engines.
        self._ask(([1], None, None))
        self.warm()

    def _ask(self, prompt: Prompt) -> int:
        place: int = self._front.remote(prompt).result(timeout_s=PATIENCE)
        return place

    def warm(self) -> None:
        """Has engines serve the prompts, and waits until kvatlas knows."""
        orders: list[tuple[int, Prompt]] = []
        for number, (tokens, salt, adapter) in enumerate(self._prompts):
            deep = number % ENGINES
            shallow = (deep + 1 + number // ENGINES % (ENGINES - 1)) % ENGINES
            orders += [(deep, (tokens, salt, adapter)), (shallow, (tokens[: SHALLOW * SIZE], salt, adapter))]
        self._fleet.engines.serve(orders)
        self._fleet.settle(self._prompts)

    def play(self, name: str, restart: Callable[[], None]) -> bool:
        """Restarts something, and judges choices from then on; then all is warm again, and every choice has to be right at once."""
        before = self._fleet.engines.truth(self._prompts)
        restart()
        now = self._fleet.engines.truth(self._prompts)
        truths = list(zip(before, now, strict=True))
        cold = sum(was != is_now for was, is_now in truths)
        is_right = Restart(f"{name} beside Ray Serve: {cold} of {PROMPTS} prompts are no longer where they were").watch(self._ask, list(zip(self._prompts, truths, strict=True)), kinds_of)
        self.warm()
        again = self._fleet.engines.truth(self._prompts)
        wrong = sum(bool(kinds_of(self._ask(prompt), (truth, truth))) for prompt, truth in zip(self._prompts, again, strict=True))
        print(f"  warm again: {PROMPTS} requests, sent to a worse engine: {wrong}", flush=True)
        return is_right and wrong == 0

    def kvatlas(self) -> None:
        """kvatlas is killed, and starts again; requests are served meanwhile."""
        self._fleet.kvatlas.kill()
        for prompt in self._prompts:
            self._ask(prompt)
        self._fleet.kvatlas.start()

    def engine(self) -> None:
        """An engine begins anew at its address, behind the same replica."""
        self._fleet.engines.restart(PLACE)

    def replica(self) -> None:
        """A replica is killed with its engine, and Ray puts another one in its place, with an engine elsewhere."""
        self._fleet.engines.replace(PLACE)
        self._kill(Replica, PLACE, self._all_run)

    def router(self) -> None:
        """The process of the router is killed, and Ray starts another one."""
        self._kill(Front, 0, self._is_served)

    def _kill(self, part: type[Marked], place: int, is_there: Callable[[], bool]) -> None:
        gone = self._fleet.process(part, place)
        os.kill(gone, signal.SIGKILL)
        self._fleet.wait_for_another(part, place, gone, is_there)

    @staticmethod
    def _all_run() -> bool:
        deployments = serve.status().applications["restarts"].deployments
        states = {name: deployment.replica_states for name, deployment in deployments.items()}
        return states == {"Front": {"RUNNING": 1}, "Replica": {"RUNNING": ENGINES}}

    def _is_served(self) -> bool:
        with contextlib.suppress(Exception):
            return self._ask(([1], None, None)) in range(ENGINES)
        return False


def restarts(seed: int) -> bool:
    """Plays all of them. Returns whether nothing was wrong beyond the bound."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Fleet(seed, folder, {"state": folder / "state"}) as fleet:
            own = Restarts(fleet)
            plays = {
                "kvatlas": own.kvatlas,
                "an engine": own.engine,
                "a replica, with another engine in its place": own.replica,
                "the router's process": own.router,
            }
            return all([own.play(what, restart) for what, restart in plays.items()])
