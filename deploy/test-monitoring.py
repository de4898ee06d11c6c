#!/usr/bin/env python3
"""Checks what is shown of a deployment, with a real Prometheus that scrapes the services of deploy/compose under load and faults.

- Every query of the dashboard has data, after a worker's batch was damaged and a replica was killed. Counters that stay at zero count.
- Every alert rule can be evaluated.
- Every metric that the dashboard and the alerts name is exported, and panels with one number show the present one.
- `promtool check metrics` finds nothing in a scrape of each kind of process.
- The users of NATS may do what their roles in deploy/nats may, and an operator commands a daemon.
- The dashboard's data source and files are where Grafana is told to look for them.

Exits with 2, and says why, where the stack cannot run: see deploy/compose/processes.py.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parent
sys.path.insert(0, str(DEPLOY / "compose"))
from processes import Stack, can_run, enter_namespaces, get, read_env, wait_until  # noqa: E402
from trouble import publish_raw  # noqa: E402

DASHBOARD = DEPLOY / "grafana/dashboards/kvatlas.json"
# Rates over a few scrapes. Grafana takes four scrapes at least.
VARIABLES = {"$__rate_interval": "20s", "$__interval": "5s", "$instance": ".*", "$namespace": ".*"}
# How long the panels may take to fill.
PATIENCE_S = 90.0


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels, those in collapsed rows too."""
    return [panel for outer in dashboard["panels"] for panel in (outer.get("panels", []) if outer["type"] == "row" else [outer])]


def substituted(query: str) -> str:
    for name, text in VARIABLES.items():
        query = query.replace(name, text)
    if "$" in query:
        raise SystemExit(f"a variable that the test does not know: {query}")
    return query


def ask(stack: Stack, path: str, **parameters: str) -> Any:
    status, text = get(stack.url("prometheus", 9090, f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
    answer = json.loads(text) if status in (200, 400, 422) else {"error": text}
    if status != 200:
        raise SystemExit(f"Prometheus refuses {parameters}: {answer.get('error')}")
    return answer["data"]


def has_data(stack: Stack, query: str) -> bool:
    """Whether the query has a number at the present time."""
    result = ask(stack, "query", query=query)["result"]
    return any(math.isfinite(float(series["value"][1])) for series in result)


def queries() -> list[tuple[str, str]]:
    """The title of a panel and a query of it, for each query of the dashboard."""
    dashboard = json.loads(DASHBOARD.read_text())
    return [(panel["title"], target["expr"]) for panel in panels(dashboard) for target in panel["targets"]]


def check_provisioning() -> None:
    """The files that Grafana reads name each other rightly."""
    compose = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
    grafana = compose["services"]["grafana"]
    mounts = {target: source for source, target, *_ in (volume.split(":") for volume in grafana["volumes"])}
    providers = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/kvatlas.yaml").read_text())["providers"]
    for provider in providers:
        directory = DEPLOY / "compose" / mounts[provider["options"]["path"]]
        assert (directory / "kvatlas.json").exists(), f"no dashboard in {directory}"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{providers[0]['options']['path']}/kvatlas.json", home
    [source] = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    name, port = source["url"].removeprefix("http://").split(":")
    assert name in compose["services"] and f"127.0.0.1:{port}:{port}" in compose["services"][name]["ports"], source["url"]
    ids = [panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(ids) == len(set(ids)), "two panels have one id"


def roles(path: Path) -> dict[str, dict[str, set[str]]]:
    """What each user of a configuration of NATS may publish and subscribe to."""
    users = re.split(r"^ +user: ", path.read_text(), flags=re.MULTILINE)[1:]
    return {user.split()[0]: {verb: set(re.findall(r'"([^"]+)"', allowed)) for verb, allowed in re.findall(r"(publish|subscribe): \{ allow: \[([^\]]*)\]", user)} for user in users}


def check_roles() -> None:
    """The users of compose have the rights of their roles, but for those of routers that are not there."""
    ours, meant = roles(DEPLOY / "compose/nats.conf"), roles(DEPLOY / "nats/users.conf")
    for user in ("daemon", "operator"):
        for verb, subjects in meant[user].items():
            lacking = {subject for subject in subjects - ours[user][verb] if not subject.startswith("dynamo_")}
            assert subjects and not lacking, f"{user} may not {verb} {lacking}"


def check_queries() -> None:
    """Every metric that the dashboard and the alerts name is exported. Panels with one number show the present one: of a range, the last
    number would stay when everything is gone."""
    exported = set(re.findall(r"^\| `(kvatlas_\w+)` \|", (DEPLOY / "metrics.md").read_text(), re.MULTILINE))
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    asked = [query for _, query in queries()] + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    named = {name for query in asked for name in re.findall(r"\bkvatlas_\w+", query)}
    unknown = {name for name in named if not {name, re.sub(r"_(bucket|sum|count)$", "", name)} & exported}
    assert not unknown, f"nobody exports {unknown}"
    stats = [panel for panel in panels(json.loads(DASHBOARD.read_text())) if panel["type"] == "stat"]
    lasting = [panel["title"] for panel in stats if not all(target.get("instant") for target in panel["targets"])]
    assert stats and not lasting, f"panels that keep their last number: {lasting}"


def check_dashboard_schema() -> None:
    """The dashboard has the form of Grafana's own model, where its package is installed: nothing is lost on the way through it."""
    from grafana_foundation_sdk.models.dashboard import Dashboard

    given = json.loads(DASHBOARD.read_text())
    kept: dict[str, Any] = dict(Dashboard.from_json(given).to_json())
    lost = given.keys() - kept.keys()
    assert not lost, f"Grafana's model does not know {lost}"
    assert len(kept["panels"]) == len(given["panels"])


def make_trouble(stack: Stack, turn: int) -> None:
    """Damages a batch every few turns, and keeps a shard away for the first turns; asks over HTTP."""
    if turn == 0:
        stack.stop("kvatlas-2", signal.SIGKILL)
        stack.start("kvatlas-2")
        stack.signal("shard-1", signal.SIGSTOP)
    if turn == 12:
        stack.signal("shard-1", signal.SIGCONT)
    if turn % 4 == 0:
        password = read_env(DEPLOY / "compose/.env")["NATS_OPERATOR_PASSWORD"]
        subject = f"kvatlas.v1.events.demo.worker-{turn % 16:02}"
        publish_raw(stack.services["nats-1"].address, "operator", password, subject, b"not MessagePack")
    get(stack.url("kvatlas-1", 8090, "/v1/status?namespace=demo"))


def run(stack: Stack) -> None:
    stack.up()
    for name in ("kvatlas-1", "kvatlas-2", "gateway"):
        stack.wait_healthy(name)
    # It has no health check, and is started last.
    wait_until("Prometheus", lambda: get(stack.url("prometheus", 9090, "/-/ready"))[0] == 200)
    wait_until("the fleet's blocks", lambda: '"distinct_blocks":' in get(stack.url("kvatlas-1", 9464, "/index"))[1])
    started = time.monotonic()
    empty = queries()
    for turn in itertools.count():
        make_trouble(stack, turn)
        empty = [(title, query) for title, query in empty if not has_data(stack, substituted(query))]
        if not empty or time.monotonic() - started > PATIENCE_S:
            break
        time.sleep(1)
    if empty:
        raise SystemExit("queries without data:\n  " + "\n  ".join(f"{title}: {query}" for title, query in empty))
    print(f"all {len(queries())} queries of the dashboard had data within {time.monotonic() - started:.0f} s")

    rules = [rule for group in ask(stack, "rules")["groups"] for rule in group["rules"]]
    unhealthy = [rule["name"] for rule in rules if rule["health"] != "ok"]
    assert rules and not unhealthy, f"rules that cannot be evaluated: {unhealthy}"
    print(f"all {len(rules)} alert rules can be evaluated; firing: {[rule['name'] for rule in rules if rule['state'] == 'firing']}")

    password = read_env(DEPLOY / "compose/.env")["NATS_OPERATOR_PASSWORD"]
    operator = ["KVATLAS_NATS_USER=operator", f"KVATLAS_NATS_PASSWORD={password}", "KVATLAS_NATS_INBOX_PREFIX=_INBOX_OPERATOR"]
    command = ["/usr/bin/env", *operator, "/usr/local/bin/kvatlas", "admin", "forget", "demo", "worker-00", "0"]
    commanded = stack.execute("fleet", command)
    assert commanded.returncode == 0, f"an operator's command: {commanded.stdout}{commanded.stderr}"
    print("an operator commands the daemons")

    for name in ("kvatlas-1", "gateway", "bridge"):
        status, text = get(stack.url(name, 9464, "/metrics"))
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        said = checked.stdout + checked.stderr
        assert status == 200 and checked.returncode == 0, f"promtool check metrics, {name}: {said}"
    print("promtool finds nothing in the metrics of a daemon, a gateway and a bridge")


def main() -> None:
    subprocess.run([DEPLOY / "compose/env.sh"], check=True, stderr=subprocess.DEVNULL)
    check_provisioning()
    check_roles()
    check_queries()
    check_dashboard_schema()
    if why := can_run():
        print(why)
        sys.exit(2)
    enter_namespaces()
    with tempfile.TemporaryDirectory(prefix="kvatlas-monitoring-") as state:
        stack = Stack([DEPLOY / "compose/compose.yaml", DEPLOY / "compose/extras.yaml"], Path(state))
        try:
            run(stack)
        finally:
            stack.kill()


if __name__ == "__main__":
    main()
