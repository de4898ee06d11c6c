#!/usr/bin/env python3
"""Runs every kind of process in good health under load, with Prometheus and the shipped alert rules, and fails where an alert fires.

    deploy/scenario-healthy.py            for as long as the longest alert waits, and a minute more: about seventeen minutes
    deploy/scenario-healthy.py --short    all waits and windows are an eighth as long: about three minutes. Slow queries are the machine's, then

The services are those of deploy/compose and deploy/compose/extras.yaml: two daemons on a NATS cluster, two shards with their gateway, and
fleets that publish and ask. A bridge and `kvatlas up` follow an engine each (deploy/compose/engine.py). See deploy/compose/processes.py for
what it needs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parent
sys.path[:0] = [str(DEPLOY), str(DEPLOY / "compose")]
from drill import ALWAYS, followed, start_engine  # noqa: E402
from processes import Stack, StackError, can_run, enter_namespaces, get, programs, wait_until  # noqa: E402

# By which all waits and windows are shortened.
SHORTENED = 8
BRIDGE_PORTS, UP_PORTS = ("5557", "5558"), ("5567", "5568")
UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
PATIENCE_S = 240.0
# What a healthy deployment is, so that silence means something: each query has this value.
HEALTHY = {
    "count(up == 1)": 7.0,
    "count(kvatlas_ready == 1)": 7.0,
    "count(kvatlas_bridge_engine_exact == 1)": 2.0,
    'sum(kvatlas_holders{state="degraded"})': 0.0,
    'count(sum by (instance) (rate(kvatlas_query_answers_total{state="exact"}[1m])) > 0) >= bool 2': 1.0,
    'sum(rate(kvatlas_gathers_total{outcome="complete"}[1m])) > bool 0': 1.0,
}


def milliseconds(duration: str) -> int:
    return int(duration[:-1]) * UNITS_MS[duration[-1]]


def scaled(rules: dict[str, Any], factor: int) -> dict[str, Any]:
    """The rules with waits and windows that are so many times shorter."""
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = f"{milliseconds(rule['for']) // factor}ms"
            rule["expr"] = re.sub(r"\[(\d+[smhd])\]", lambda found: f"[{milliseconds(found[1]) // factor}ms]", rule["expr"])
    return rules


def override(directory: Path, rules: dict[str, Any], is_short: bool) -> Path:
    """A compose file to lay over the others: bridge and `kvatlas up` with an engine, and what Prometheus reads."""

    def file(name: str, content: Any) -> str:
        (directory / name).write_text(yaml.safe_dump(content))
        return f"{directory / name}:/etc/prometheus/{name}:ro"

    targets = yaml.safe_load((DEPLOY / "compose/targets-extras.yml").read_text())
    targets[0]["targets"].append("up:9464")
    config = yaml.safe_load((DEPLOY / "compose/prometheus.yml").read_text())
    if is_short:
        # Of short windows, too, there are to be some numbers.
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    nats, inside = programs()["nats"]
    up = {
        "image": "kvatlas:local",
        "read_only": True,
        "user": "65532:65532",
        "command": ["up", *followed("engine-2", UP_PORTS)],
        "volumes": [f"{nats}:{inside}:ro"],
        "tmpfs": ["/tmp"],
    }
    services = {
        "prometheus": {"volumes": [file("alerts.yml", rules), file("targets.yml", targets), file("prometheus.yml", config)]},
        "bridge": {"command": ["bridge", *followed("engine-1", BRIDGE_PORTS)]},
        # Enough to see, so that the machine is not what falls ill.
        "fleet": {"command": ["fleet", "--transport", "jetstream", "--workers", "4", "--rate", "10"]},
        "up": up,
    }
    path = directory / "healthy.yaml"
    path.write_text(yaml.safe_dump({"services": services}))
    return path


def ask(stack: Stack, path: str, **parameters: str) -> Any:
    status, text = get(stack.url("prometheus", 9090, f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
    if status != 200:
        raise SystemExit(f"Prometheus does not answer {path} {parameters}: {text}")
    return json.loads(text)["data"]


def unhealthy(stack: Stack) -> list[str]:
    """What is not as in a healthy deployment."""
    found = []
    for query, value in HEALTHY.items():
        result = ask(stack, "query", query=query)["result"]
        values = [float(series["value"][1]) for series in result]
        if values != [value]:
            found.append(f"{query} is {values}, and not {value}")
    return found


def alerts(stack: Stack, ignored: frozenset[str]) -> list[dict[str, Any]]:
    """The alerts that fire, or wait."""
    return [alert for alert in ask(stack, "alerts")["alerts"] if alert["labels"]["alertname"] not in ignored]


def wait_until_healthy(stack: Stack, ignored: frozenset[str]) -> None:
    try:
        wait_until("a healthy deployment without alerts", lambda: not unhealthy(stack) and not alerts(stack, ignored), PATIENCE_S)
    except StackError as error:
        said = unhealthy(stack) + [f"{alert['state']}: {alert['annotations']['summary']} ({alert['labels']})" for alert in alerts(stack, ignored)]
        raise SystemExit("\n  ".join([f"{error}; the machine may be too slow:", *said])) from error


def watch(stack: Stack, seconds: float, ignored: frozenset[str]) -> None:
    """Fails as soon as an alert fires."""
    until = time.monotonic() + seconds
    waiting: set[str] = set()
    while time.monotonic() < until:
        for alert in alerts(stack, ignored):
            if alert["state"] == "firing":
                doubts = [series["metric"] | {"holders": series["value"][1]} for series in ask(stack, "query", query="kvatlas_degraded_holders > 0")["result"]]
                raise SystemExit(f"fires in a healthy deployment: {alert['labels']}: {alert['annotations']['summary']}; in doubt are {doubts}")
            waiting.add(alert["labels"]["alertname"])
        time.sleep(1.0)
    print(f"{seconds:.0f} s without an alert; true for moments: {', '.join(sorted(waiting)) or 'none'}")


def main() -> None:
    if why := can_run():
        print(why)
        sys.exit(2)
    factor = SHORTENED if "--short" in sys.argv else 1
    subprocess.run([DEPLOY / "compose/env.sh"], check=True, stderr=subprocess.DEVNULL)
    enter_namespaces()
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    waits = [milliseconds(rule["for"]) for group in rules["groups"] for rule in group["rules"] if "for" in rule]
    ignored = frozenset[str]()
    if factor > 1:
        rules, ignored = scaled(rules, factor), ALWAYS
    with tempfile.TemporaryDirectory(prefix="kvatlas-healthy-") as directory:
        state = Path(directory)
        compose = [DEPLOY / "compose/compose.yaml", DEPLOY / "compose/extras.yaml", override(state, rules, factor > 1)]
        stack = Stack(compose, state)
        engines = [start_engine(state, ports) for ports in (BRIDGE_PORTS, UP_PORTS)]
        try:
            stack.up()
            wait_until("Prometheus", lambda: get(stack.url("prometheus", 9090, "/-/ready"))[0] == 200)
            wait_until_healthy(stack, ignored)
            watch(stack, max(waits) / 1000 / factor + 60, ignored)
            wait_until_healthy(stack, ignored)
        finally:
            for engine in engines:
                engine.kill()
            stack.kill()


if __name__ == "__main__":
    main()
