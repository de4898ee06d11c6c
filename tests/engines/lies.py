"""An engine that drops blocks and tells nobody: exact answers go on to promise them. What routers report has to give it away, and nobody else."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from processes import REPOSITORY, Process, free_ports, kvatlas, wait_until
from world import World

ALERT = "KvatlasPromisesBroken"
# How long it may take until the liar is named, and how long all are honest before and are watched behind it, in seconds.
NAMED_WITHIN = 60.0
HONEST, WATCHED = 20.0, 15.0
REQUESTS_AT_ONCE = 3

_CONFIGURATION = """
global: {{ scrape_interval: 5s, scrape_timeout: 4s, evaluation_interval: 5s }}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: kvatlas
    static_configs: [{{ targets: ["{target}"] }}]
"""


class Prometheus(Process):
    """A Prometheus that scrapes the daemon, and evaluates the alerts that are shipped."""

    def __init__(self, binary: str, folder: Path, target: str) -> None:
        [self._port] = free_ports(1)
        configuration = folder / "prometheus.yml"
        configuration.write_text(_CONFIGURATION.format(rules=REPOSITORY / "deploy/prometheus/alerts.yml", target=target))
        listen = f"--web.listen-address=127.0.0.1:{self._port}"
        super().__init__(
            [binary, f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'prometheus'}", listen], folder / "prometheus.log"
        )

    def start(self) -> None:
        super().start()
        wait_until("Prometheus scrapes", lambda: self._value("up") == "1")

    def _ask(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/{path}", timeout=5) as answer:
                return json.loads(answer.read())["data"]
        except OSError:
            return {}

    def _value(self, query: str) -> str | None:
        result = self._ask(f"query?query={query}").get("result")
        return result[0]["value"][1] if result else None

    def fires_for(self) -> set[str]:
        """The holders for which the alert fires."""
        alerts = self._ask("alerts").get("alerts", [])
        firing = [alert["labels"] for alert in alerts if alert["state"] == "firing"]
        return {labels["holder"] for labels in firing if labels["alertname"] == ALERT}


class Witnesses:
    """Who may name a liar: the daemon's `/index`, `kvatlas status`, and the alert where there is a Prometheus."""

    def __init__(self, world: World) -> None:
        self._world, self._authority = world, f"127.0.0.1:{world.admin_port}"
        binary = shutil.which("prometheus")
        self._prometheus = Prometheus(binary, world.folder, self._authority) if binary else None
        if not binary:
            print(f"SKIPPED: the alert {ALERT}: there is no prometheus here", file=sys.stderr)
            world.counts.notes.append("without the alert: no prometheus")

    def __enter__(self) -> Witnesses:
        if self._prometheus:
            try:
                self._prometheus.start()
            except BaseException:
                self._prometheus.kill()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._prometheus:
            self._prometheus.kill()

    def named(self) -> dict[str, set[str]]:
        """Whom each of them names."""
        with urllib.request.urlopen(f"http://{self._authority}/index", timeout=10) as answer:
            named = {"/index": _broken(json.loads(answer.read()))}
        status = subprocess.run([kvatlas(), "status", "--admin", self._authority, "--json"], capture_output=True, text=True)
        named["kvatlas status"] = _broken(json.loads(status.stdout))
        # Nothing else is wrong here.
        assert (status.returncode != 0) == bool(named["kvatlas status"]), status.stderr
        if self._prometheus:
            named["the alert"] = self._prometheus.fires_for()
        return named


def _broken(told: Any) -> set[str]:
    lists = [namespace["broken_promises"] for namespace in told["namespaces"]]
    return {f"{broken['worker']}/{broken['rank']}" for of_one in lists for broken in of_one}


def lied(world: World, seeded: random.Random, _: int) -> None:
    """An engine begins to hide what it drops: it is named within a minute, and no other one, neither before nor behind that."""
    world.serve(200)
    world.settles(10)
    with Witnesses(world) as witnesses:
        honest_until = time.monotonic() + HONEST
        while time.monotonic() < honest_until:
            world.serve_as_promised(REQUESTS_AT_ONCE)
            named = witnesses.named()
            assert not any(named.values()), f"all are honest, and named are {named}"
        liar = seeded.choice(world.holders)
        world.hide_removals(liar)
        begun, seconds, name = time.monotonic(), dict.fromkeys(named, 0.0), f"{liar.worker}/{liar.rank}"
        while not all(seconds.values()) or time.monotonic() < begun + max(seconds.values()) + WATCHED:
            world.serve_as_promised(REQUESTS_AT_ONCE)
            after = time.monotonic() - begun
            for witness, holders in witnesses.named().items():
                assert holders <= {name}, f"{witness} names {holders} for {name}"
                seconds[witness] = seconds[witness] or after * (name in holders)
            late = [witness for witness, named_after in seconds.items() if not named_after]
            assert not late or after < NAMED_WITHIN, f"{name} is not named within {NAMED_WITHIN:.0f} s: {late}"
    world.promises_are_kept()
    world.counts.notes.append(f"{name} lies: " + ", ".join(f"{witness} after {after:.0f} s" for witness, after in seconds.items()))
