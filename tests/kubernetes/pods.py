"""Pods that come, go and change, and what becomes of their engines."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cluster import NAMESPACE, Cluster
from engines import Engine
from processes import free_ports, wait_until
from report import Report, demand
from site_of_pods import LIMIT, Site, Watch

PODS = 50
GENUINE = 4
BURST = 1000
REQUESTS = 40
# The bridge's longest pause between two attempts to reach the API.
PAUSE = 5.0
# In which it sees that a connection to an engine has broken, and is made again.
REACTION = 3.0


def address_of(number: int) -> str:
    """An address of its own for each pod."""
    return f"127.0.{1 + number // 200}.{1 + number % 200}"


class Pods:
    """The pods of the scenario, and the engines behind some of them."""

    def __init__(self, report: Report, cluster: Cluster, site: Site, folder: Path, account: str, away: float) -> None:
        self._report, self._cluster, self._site, self._folder = report, cluster, site, folder
        self._account, self._away = account, away
        [self._port] = free_ports(1)
        self._engines: dict[str, Engine] = {}
        self._seed = 0

    def play(self) -> None:
        """All checks, each on what the one before has left."""
        self._without_rights()
        self._site.start_bridge(self._cluster.token_of(self._account))
        try:
            self._found()
            self._gone()
            self._renamed()
            self._restarted()
            self._reset()
            self._reused_after_the_end()
            self._reused_unseen("the API is cut off", self._site.way.cut)
            self._reused_unseen("the API is silent", self._site.way.silence)
            self._watch_cut()
            self._api_away()
            self._burst()
        finally:
            for engine in self._engines.values():
                engine.kill()

    def _engine(self, address: str, like: Engine | None = None) -> Engine:
        self._seed += 1
        if like:
            engine = like.as_another(self._seed, self._folder)
        else:
            engine = Engine(address, self._port, self._seed, self._folder)
        engine.serve(REQUESTS)
        return engine

    def _put(self, name: str, engine: Engine) -> float:
        return self._cluster.put_pod(name, engine.address, engine.port)

    def _follow(self, name: str, since: float, limit: float = LIMIT) -> str:
        """Waits until a worker is exact; a failure where that takes longer than the limit."""
        took = self._site.time_until(f"{name} is exact", since, lambda: self._site.follows(name))
        demand(took <= limit, f"{name} was exact after {took:.2f} s")
        return f"{name} exact after {took:.2f} s"

    def _forget(self, name: str, since: float, limit: float = LIMIT) -> str:
        took = self._site.time_until(f"{name} is forgotten", since, lambda: name not in self._site.holders())
        demand(took <= limit, f"{name} was forgotten after {took:.2f} s")
        return f"{name} forgotten after {took:.2f} s"

    def _right(self, *names: str) -> str:
        engines = {name: self._engines[name] for name in names or self._engines}
        return f"{self._site.compare(engines)} answers as the caches have it"

    def _without_rights(self) -> None:
        """A bridge whose account may not read pods says what it lacks; and so where the token is none."""
        for what, token, words in (
            ("the account has no Role", self._token_without_rights(), ("Role", "verbs: [get, list, watch]", NAMESPACE)),
            ("the token is none", "none", ("does not accept the token",)),
        ):
            with self._report.check(f"rights, {what}") as notes:
                began = time.monotonic()
                self._site.start_bridge(token)
                took = self._site.time_until("it says so", began, lambda: bool(self._site.source()["last_error"]))
                said = {"/workers": self._site.source()["last_error"], "log": self._site.bridge_log.read_text(), "doctor": self._site.doctor()}
                for where, text in said.items():
                    demand(all(word in text for word in words), f"{where} does not say {words}: {text[-600:]}")
                notes.append(f"named in /workers, the log and the doctor after {took:.2f} s")
            self._site.bridge.kill()

    def _token_without_rights(self) -> str:
        self._cluster.ask("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": "nobody"}})
        return self._cluster.token_of("nobody")

    def _found(self) -> None:
        with self._report.check(f"found, {PODS} pods, {GENUINE} with genuine engines") as notes:
            for number in range(GENUINE):
                self._engines[f"vllm-{number}"] = self._engine(address_of(number))
            others = [(f"vllm-{number}", address_of(number), self._port) for number in range(GENUINE, PODS)]
            self._cluster.put_pods(others, "silent")
            at = {name: self._put(name, engine) for name, engine in self._engines.items()}
            took = self._site.time_until("all are known", max(at.values()), lambda: self._site.source()["engines"] == PODS)
            demand(took <= LIMIT, f"all were known after {took:.2f} s")
            notes.append(f"all known {max(took, 0):.2f} s after the last; " + ", ".join(self._follow(*one) for one in at.items()))
            notes.append(self._right())
            shown = {server["instance"]: server for server in self._site.shown()["servers"]}
            demand(shown["vllm-0"]["identity"] == self._cluster.uid_of("vllm-0"), "the identity is not the pod's UID")

    def _gone(self) -> None:
        with self._report.check("gone, at the deletion of a pod that takes its time to end, and of one that is away at once") as notes:
            at = self._cluster.delete_pod("vllm-2", grace_seconds=30)
            notes.append(self._forget("vllm-2", at))
            self._cluster.delete_pod("vllm-2")
            notes.append(self._forget("vllm-3", self._cluster.delete_pod("vllm-3")))
            for name in ("vllm-2", "vllm-3"):
                self._engines.pop(name).kill()
            notes.append(self._right())

    def _renamed(self) -> None:
        with self._report.check("renamed, the same engine under another name") as notes:
            engine = self._engines.pop("vllm-1")
            self._cluster.delete_pod("vllm-1")
            self._engines["vllm-new"] = engine
            at = self._put("vllm-new", engine)
            notes.append(self._follow("vllm-new", at))
            notes.append(self._forget("vllm-1", at))
            notes.append(self._right())

    def _restarted(self) -> None:
        with self._report.check("restarted, another process in the same pod") as notes:
            before = self._engines["vllm-new"]
            before.kill()
            engine = self._engine(before.address, before)
            at = time.monotonic()
            self._engines["vllm-new"] = engine
            took = self._site.time_until(
                "its blocks are told", at, lambda: self._site.matched(engine.prompts[-1]).get("vllm-new", 0) > 0
            )
            demand(took <= LIMIT + PAUSE, f"its blocks were told after {took:.2f} s")
            notes.append(f"exact after {took:.2f} s; {self._right()}")
            left = sum(self._site.matched(prompt).get("vllm-new", 0) for prompt in before.prompts)
            demand(left == 0, f"{left} blocks of the process before are left")

    def _reset(self) -> None:
        with self._report.check("reset, by kvatlas admin") as notes:
            engine = self._engines["vllm-new"]
            engine.is_dev = False
            refused = self._site.admin("reset", "vllm-new")
            demand(refused.returncode == 1 and "VLLM_SERVER_DEV_MODE=1" in refused.stdout, refused)
            engine.is_dev = True
            done = self._site.admin("reset", "vllm-new")
            demand(done.returncode == 0, done)
            took = self._site.time_until("nothing is left", time.monotonic(), lambda: not self._has_any("vllm-new"))
            notes.append(f"nothing left {took:.2f} s after the reply; {self._right()}")
            engine.serve(REQUESTS)

    def _has_any(self, name: str) -> bool:
        return any(name in self._site.matched(prompt) for prompt in self._engines[name].prompts)

    def _reused_after_the_end(self) -> None:
        with self._report.check("reused, the address of a pod that has failed") as notes:
            dead = self._engines.pop("vllm-new")
            dead.kill()
            self._cluster.fail_pod("vllm-new")
            stranger = self._engines["stranger"] = self._engine(dead.address, dead)
            with Watch(self._site, stranger, "vllm-new") as watch:
                notes.append(self._follow("stranger", self._put("stranger", stranger)))
            notes += [watch.judge(), self._right()]
            demand("vllm-new" not in self._site.holders(), "vllm-new is still a holder")

    def _reused_unseen(self, what: str, hide: Callable[[], None]) -> None:
        """The bridge cannot see that another pod has the address by now: it must not take its blocks for the old one's."""
        with self._report.check(f"reused, an address while {what}") as notes:
            name, dead = f"old-{self._seed}", self._engine(address_of(PODS + self._seed))
            notes.append(self._follow(name, self._put(name, dead)))
            hide()
            try:
                dead.kill()
                stranger = self._engine(dead.address, dead)
                self._cluster.delete_pod(name)
                new = f"new-{self._seed}"
                self._put(new, stranger)
                with Watch(self._site, stranger, name) as watch:
                    time.sleep(REACTION + PAUSE)
                notes.append(watch.judge())
            finally:
                self._site.way.heal()
                at = time.monotonic()
            self._engines[new] = stranger
            notes.append(self._follow(new, at, 2 * PAUSE + LIMIT))
            notes += [self._forget(name, at, 2 * PAUSE + LIMIT), self._right()]
            self._engines.pop(new).kill()
            self._forget(new, self._cluster.delete_pod(new))

    def _watch_cut(self) -> None:
        with self._report.check("watch cut, and a pod that comes then") as notes:
            self._site.way.cut()
            self._site.way.heal()
            engine = self._engines["vllm-cut"] = self._engine(address_of(PODS + self._seed))
            notes.append(self._follow("vllm-cut", self._put("vllm-cut", engine)))
            notes.append(self._right())

    def _api_away(self) -> None:
        with self._report.check(f"API away, its server killed for {self._away:.0f} s") as notes:
            names = set(self._engines)
            self._cluster.kill_server()
            began = time.monotonic()
            took = self._site.time_until("the bridge says so", began, lambda: bool(self._site.source()["last_error"]))
            notes.append(f"said after {took:.2f} s")
            compared = 0
            while time.monotonic() < began + self._away:
                self._engines["vllm-0"].serve(1)
                wait_until("the new blocks are told", lambda: self._told("vllm-0"), 2)
                compared += self._site.compare({"vllm-0": self._engines["vllm-0"]})
            demand(names <= {name for name, exact in self._site.holders().items() if exact}, "not all that were known stay exact")
            notes.append(f"{compared} answers right meanwhile")
            self._cluster.start_server()
            at = time.monotonic()
            engine = self._engines["vllm-after"] = self._engine(address_of(PODS + self._seed))
            self._put("vllm-after", engine)
            notes.append(self._follow("vllm-after", at, PAUSE + LIMIT + REACTION))
            demand(not self._site.source()["last_error"], "the error is still shown")
            notes.append(self._right())

    def _told(self, name: str) -> bool:
        engine = self._engines[name]
        held, _ = engine.depths()[-1]
        return self._site.matched(engine.prompts[-1]) == {name: held}

    def _burst(self) -> None:
        with self._report.check(f"burst, {BURST} pods at once") as notes:
            known = int(self._site.source()["engines"])
            began = time.monotonic()
            burst = range(BURST - known)
            self._cluster.put_pods([(f"burst-{one}", address_of(PODS + 100 + one), self._port) for one in burst], "burst")
            made = time.monotonic()
            took = self._site.time_until("all are known", made, lambda: self._site.source()["engines"] == BURST)
            demand(took <= LIMIT, f"all were known {took:.2f} s after the last")
            notes.append(f"made in {made - began:.1f} s, all known {took:.2f} s after the last")
            demand(all(self._site.follows(name) for name in self._engines), "an engine is in doubt beside the burst")
            notes.append(self._right())
            at = self._cluster.delete_pods("burst")
            took = self._site.time_until("they are gone", at, lambda: self._site.source()["engines"] == known)
            demand(took <= LIMIT, f"they were gone after {took:.2f} s")
            notes.append(f"gone {took:.2f} s after their deletion")
