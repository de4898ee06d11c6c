#!/usr/bin/env python3
"""Breaks a running deployment in fourteen ways, and shows for each who names the culprit: alert, log, `kvatlas status`, `kvatlas doctor`, page.

    deploy/drill.py            runs the services of deploy/compose as processes, and writes deploy/drill.md. Beside them are two shards with
                               their gateway, and a bridge with an engine (deploy/compose/extras.yaml, deploy/compose/engine.py)
    deploy/drill.py --print    prints the page and writes nothing; KVATLAS_DRILL_ONLY has a pattern of the titles of what is to be broken

It fails where an alert does not fire or one of the others does not name the culprit within a minute, where an alert fires that the fault
does not explain, or where the deployment does not recover. The waits of the alert rules are shortened, so that it takes minutes and not hours. See deploy/compose/processes.py for
what it needs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import yaml

DEPLOY = Path(__file__).resolve().parent
sys.path.insert(0, str(DEPLOY / "compose"))
from processes import NETWORK, Service, Stack, can_run, enter_namespaces, get, read_env, wait_until  # noqa: E402
from trouble import publish_raw  # noqa: E402

KVATLAS = "/usr/local/bin/kvatlas"
# Within which each of them names the culprit. All that the fault has left behind may take longer to go.
PATIENCE_S = 60.0
RECOVERY_S = 240.0
# The engine of the drill: where it publishes and replays. Its worker falls to the first of the shards.
ENGINE, ENGINE_PORTS = "engine-1", ("5557", "5558")
# The epoch of a publisher whose clock is an hour ahead.
AHEAD_EPOCH = str(int((time.time() + 3600) * 1e6))
# What the doctor is told: the two daemons, or the others, which have a NATS server without passwords.
DAEMONS = ["--role", "router", "--admin", "kvatlas-1:9464", "--admin", "kvatlas-2:9464"]
OTHERS = ["--nats-url", "nats://nats-other:4222", *(part for name in ("gateway", "shard-0", "shard-1", "bridge") for part in ("--admin", f"{name}:9464"))]
# What the drill's deployment has otherwise than that of compose.yaml: faults show sooner.
OVERRIDES = {
    "KVATLAS_NAMESPACE_DEFAULTS_STALE_AFTER_MS": "5000",
    "KVATLAS_SNAPSHOTS_INTERVAL_SECONDS": "3",
    "NO_COLOR": "1",
}
# Alerts that tell what a holder in doubt brings with it, where there are as few holders as here; and what shows while a daemon restarts, where
# alerts wait for five seconds only.
DOUBT = frozenset({"KvatlasHoldersDegraded", "KvatlasHoldersStale", "KvatlasAnswersInexact"})
RESTART = frozenset({"KvatlasDown", "KvatlasNotReady"})
# All of it runs on one machine, which may be slow.
ALWAYS = frozenset({"KvatlasQueriesSlow"})


@dataclass
class Fault:
    """One way to break the deployment."""

    title: str
    # What is done, in words.
    what: str
    alert: str
    # Labels that the alert has to have.
    labels: dict[str, str]
    # What a warning or an error in a daemon's log has to say.
    names: str
    do: Callable[[Stack], None]
    mend: Callable[[Stack], None]
    # What a line of `kvatlas doctor` says, with what mends it; what one of `kvatlas status` does, and a row of the page's trouble. None where the
    # one that is asked is the culprit, or is not asked about it.
    doctor: str
    status: str | None
    page: str | None
    # The daemon that is asked, and whose log is looked at unless another one's is.
    told_by: str = "kvatlas-1"
    log_of: str | None = None
    # Alerts that may fire beside it, because the fault has such consequences.
    also: frozenset[str] = frozenset()


def hastened_rules(directory: Path) -> Path:
    """The alert rules with shorter waits."""
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = "5s"
            rule["expr"] = re.sub(r"\[\d+m\]", "[30s]", rule["expr"]).replace("> 3600", "> 20")
    path = directory / "alerts.yml"
    path.write_text(yaml.safe_dump(rules))
    return path


def compose_override(directory: Path) -> Path:
    """A compose file to lay over compose.yaml."""
    daemon = {"environment": dict(OVERRIDES)}
    prometheus = {"volumes": [f"{hastened_rules(directory)}:/etc/prometheus/alerts.yml:ro"]}
    bridge = {"command": ["bridge", *followed(ENGINE, ENGINE_PORTS)]}
    # Enough to see, so that the machine is not what falls ill.
    fleet = {"command": ["fleet", "--transport", "jetstream", "--workers", "16", "--rate", "10"]}
    services = {"fleet": fleet, "kvatlas-1": daemon, "kvatlas-2": daemon, "prometheus": prometheus, "bridge": bridge}
    path = directory / "drill.yaml"
    path.write_text(yaml.safe_dump({"services": services}))
    return path


def operator(stack: Stack) -> dict[str, str]:
    return {"user": "operator", "password": read_env(DEPLOY / "compose/.env")["NATS_OPERATOR_PASSWORD"]}


def start_engine(directory: Path, ports: tuple[str, str]) -> subprocess.Popen[bytes]:
    """An engine beside the services, which a bridge follows."""
    with (directory / f"engine-{ports[0]}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, DEPLOY / "compose/engine.py", f"{NETWORK}1", *ports], stdout=log, stderr=log)


def followed(name: str, ports: tuple[str, str]) -> list[str]:
    """Flags for a process that follows an engine beside the services."""
    publishes, replays = (f"tcp://{NETWORK}1:{port}" for port in ports)
    return ["--engine", f"{name}={publishes},replay={replays}", "--model", "llama", "--admin-listen", "0.0.0.0:9464"]


def run(stack: Stack, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command of kvatlas beside the fleet, as the operator."""
    who = operator(stack)
    environment = {"KVATLAS_NATS_USER": who["user"], "KVATLAS_NATS_PASSWORD": who["password"], "KVATLAS_NATS_INBOX_PREFIX": "_INBOX_OPERATOR"}
    arguments = [f"{key}={value}" for key, value in environment.items()]
    return stack.execute("fleet", ["/usr/bin/env", *arguments, KVATLAS, *command], text=text)


def publish(stack: Stack, worker: str, *options: str) -> None:
    """Publishes one stored block of a worker."""
    command = ["publish", "--namespace", "demo", "--worker", worker, *options]
    said = run(stack, *command, text='{"type":"stored","sequence_hashes":["ea06fc71a5ee6e88"]}\n')
    if said.returncode != 0:
        raise SystemExit(f"{command}: {said.stderr}")


def command(stack: Stack, *words: str) -> None:
    """Carries out what the doctor advises."""
    said = run(stack, *words)
    if said.returncode != 0:
        raise SystemExit(f"kvatlas {' '.join(words)}: {said.stdout}{said.stderr}")


def say_goodbye(stack: Stack, worker: str, *options: str) -> None:
    run(stack, "publish", "--namespace", "demo", "--worker", worker, *options, text='{"type":"goodbye"}\n')


def damage(stack: Stack, worker: str) -> None:
    publish(stack, worker)
    who = operator(stack)
    for _ in range(20):
        publish_raw(stack.services["nats-1"].address, who["user"], who["password"], f"kvatlas.v1.events.demo.{worker}", b"not MessagePack")
        time.sleep(0.5)


def lose_batches(stack: Stack, worker: str) -> None:
    publish(stack, worker, "--epoch", "7", "--seq", "1")
    publish(stack, worker, "--epoch", "7", "--seq", "5")


def widen(stack: Stack, worker: str) -> None:
    """Publishes, again and again, blocks of another size than the namespace's."""
    for _ in range(10):
        publish(stack, worker, "--block-size", "32")
        time.sleep(0.5)


def without(stack: Stack, name: str, variable: str) -> None:
    """Starts a daemon again without a variable that it was given."""
    stack.services[name].environment.pop(variable, None)
    restart(stack, name)


def stop_brokers(stack: Stack) -> None:
    for name in ("nats-1", "nats-2", "nats-3"):
        stack.stop(name, signal.SIGKILL)


def start_brokers(stack: Stack) -> None:
    for name in ("nats-1", "nats-2", "nats-3"):
        stack.start(name)


def stop(stack: Stack, name: str) -> None:
    stack.stop(name, signal.SIGKILL)


def restart(stack: Stack, name: str, **environment: str) -> None:
    service: Service = stack.services[name]
    stack.stop(name)
    service.environment.update(environment)
    stack.start(name)


def protect(stack: Stack, name: str, mode: int) -> None:
    """Lets nobody write to a daemon's snapshot directory, or its user again."""
    directory = stack.state / "volumes" / name
    directory.chmod(mode)


def faults(engine: subprocess.Popen[bytes]) -> list[Fault]:
    right = read_env(DEPLOY / "compose/.env")["NATS_DAEMON_PASSWORD"]
    return [
        Fault(
            "A publisher sends what is no batch",
            "The worker `broken` publishes one batch and then bytes that are no MessagePack, and answers no questions.",
            "KvatlasBatchesDropped", {"reason": "undecodable"}, r"broken",
            lambda stack: damage(stack, "broken"), lambda stack: say_goodbye(stack, "broken"),
            r"holder broken/0 of demo: undecodable.* since .*mend: .*kvatlas admin resync demo broken 0", r"broken/0 undecodable.* since ",
            r"undecodable broken/0 of demo", also=DOUBT,
        ),
        Fault(
            "Batches are lost, and the publisher is gone",
            "The worker `lossy` publishes the batches 1 and 5 of an epoch, and nobody answers for it.",
            "KvatlasHoldersDegraded", {"namespace": "demo"}, r"lossy",
            lambda stack: lose_batches(stack, "lossy"), lambda stack: say_goodbye(stack, "lossy"),
            r"holder lossy/0 of demo: .*gap.* since .*mend: .*kvatlas admin resync demo lossy 0", r"lossy/0 .*gap.* since ", r"gap lossy/0 of demo",
            # A daemon may ask while the publisher's program is ending, which refuses. The shortened alert fires at one refusal.
            also=DOUBT | {"KvatlasResyncsFail"},
        ),
        Fault(
            "A worker falls silent",
            "The worker `silent` publishes one batch, and no heartbeat after it. What mends it is what the doctor says: `kvatlas admin forget demo silent 0`.",
            "KvatlasHoldersStale", {"namespace": "demo"}, r"silent",
            lambda stack: publish(stack, "silent"), lambda stack: command(stack, "admin", "forget", "demo", "silent", "0"),
            r"holder silent/0 of demo: .*stale.* since .*mend: .*kvatlas admin forget demo silent 0", r"silent/0 .*stale.* since ",
            r"stale silent/0 of demo", also=DOUBT,
        ),
        Fault(
            "Two publishers claim one worker",
            "Somebody publishes as `worker-03`, which the fleet publishes for, in a newer epoch.",
            "KvatlasContested", {"namespace": "demo"}, r"worker-03",
            lambda stack: publish(stack, "worker-03"), lambda stack: restart(stack, "fleet"),
            r"holder worker-03/0 of demo: .*contested.* since .*mend: .*kvatlas admin forget demo worker-03 0", r"worker-03/0 .*contested.* since ",
            r"contested worker-03/0 of demo", also=DOUBT,
        ),
        Fault(
            "All NATS servers are gone",
            "`nats-1`, `nats-2` and `nats-3` are killed; later they start with their stores.",
            "KvatlasBrokerAway", {"instance": "kvatlas-1:9464"}, r"cannot connect to nats-1:4222",
            stop_brokers, start_brokers,
            r"FAIL broker: .*mend: check that (a NATS server|it) runs there", r"cannot connect to nats-1:4222", r"not ready .*cannot connect to nats-1:4222",
        ),
        Fault(
            "A daemon is cut off",
            "The network of `kvatlas-2` is taken down, and comes back.",
            "KvatlasDown", {"instance": "kvatlas-2:9464"}, r"disconnected|cannot connect to",
            lambda stack: stack.cut("kvatlas-2"), lambda stack: stack.mend("kvatlas-2"),
            r"replica kvatlas-2:9464: .*mend: ", None, None, told_by="kvatlas-2",
        ),
        Fault(
            "Snapshots cannot be written",
            "The snapshot directory of `kvatlas-1` becomes one that nobody may write to.",
            "KvatlasSnapshotsFail", {"instance": "kvatlas-1:9464", "reason": "directory"}, r"snapshot.*/var/lib/kvatlas",
            lambda stack: protect(stack, "kvatlas-1", 0o500), lambda stack: protect(stack, "kvatlas-1", 0o700),
            r"snapshots of kvatlas-1:9464: .*/var/lib/kvatlas.*mend: see to the snapshot directory", r"snapshots are not written: .*/var/lib/kvatlas",
            r"snapshots fail .*/var/lib/kvatlas", also=frozenset({"KvatlasSnapshotOld"}),
        ),
        Fault(
            "A daemon has the wrong password",
            "`kvatlas-2` is started again with another password for NATS.",
            "KvatlasBrokerAway", {"instance": "kvatlas-2:9464"}, r"[Aa]uthori[sz]ation",
            lambda stack: restart(stack, "kvatlas-2", KVATLAS_NATS_PASSWORD="wrong"),
            lambda stack: restart(stack, "kvatlas-2", KVATLAS_NATS_PASSWORD=right),
            r"replica kvatlas-2:9464: .*credentials.*mend: .*NATS", r"the server refuses the credentials", r"not ready .*credentials",
            told_by="kvatlas-2", also=RESTART,
        ),
        Fault(
            "A publisher has blocks of another size",
            "The worker `wide` publishes blocks of 32 tokens, and those of its namespace have 16.",
            "KvatlasBatchesDropped", {"reason": "other_settings"}, r"wide",
            lambda stack: widen(stack, "wide"), lambda stack: say_goodbye(stack, "wide"),
            r"publisher wide of demo: all its batches are dropped \(other_settings\).*mend: give the engine the namespace's block size", r"all batches are dropped of wide \(other_settings\)",
            r"all batches dropped wide \(other_settings\) of demo", also=frozenset({"KvatlasAnswersInexact"}),
        ),
        Fault(
            "A bound is reached",
            "`kvatlas-1` is started again with room for 100 blocks.",
            "KvatlasIndexFull", {"instance": "kvatlas-1:9464"}, r"capacity",
            lambda stack: restart(stack, "kvatlas-1", KVATLAS_LIMITS_MAX_BLOCKS_TOTAL="100"), lambda stack: without(stack, "kvatlas-1", "KVATLAS_LIMITS_MAX_BLOCKS_TOTAL"),
            r"holder worker-\d+/0 of demo: .*capacity.*mend: .*raise limits.max_blocks_per_holder", r"worker-\d+/0 .*capacity",
            r"capacity worker-\d+/0.* of demo", also=DOUBT | RESTART,
        ),
        Fault(
            "A publisher's clock is ahead",
            "The worker `early` begins an epoch of a clock that is an hour ahead.",
            "KvatlasClockAhead", {"namespace": "demo"}, r"epoch lies ahead of the clock.*early",
            lambda stack: publish(stack, "early", "--epoch", AHEAD_EPOCH),
            lambda stack: say_goodbye(stack, "early", "--epoch", AHEAD_EPOCH, "--seq", "2"),
            r"publishers: .*ahead of the clock .* in demo \(early/0\).*mend: run an NTP client", r"clocks in demo: .*: early/0",
            r"clock ahead early/0 of demo", also=DOUBT,
        ),
        Fault(
            "An engine hangs",
            f"The engine `{ENGINE}` is stopped (SIGSTOP): its connections stay open, and nothing comes on them. Its bridge goes on.",
            "KvatlasEngineInexact", {"engine": f"{ENGINE}/0"}, rf"engine out of sight.*{ENGINE}/0",
            lambda stack: engine.send_signal(signal.SIGSTOP), lambda stack: engine.send_signal(signal.SIGCONT),
            rf"holder {ENGINE}/0 of llama: .*upstream_lost.* since .*mend: .*see whether the engine lives", rf"{ENGINE}/0 .*upstream_lost.* since ",
            rf"upstream_lost {ENGINE}/0 of llama",
            told_by="shard-0", log_of="bridge", also=frozenset({"KvatlasHoldersStale"}),
        ),
        Fault(
            "A shard is missing",
            "The daemon of the shard 1/2 is killed, and routers ask the gateway.",
            "KvatlasShardMissing", {"instance": "gateway:9464", "shard": "1"}, r"a shard did not answer in time.*shard=1",
            lambda stack: stop(stack, "shard-1"), lambda stack: stack.start("shard-1"),
            r"shard 1/2 does not answer since .*mend: start a daemon with that sharding.shard", r"shard 1/2 does not answer since ",
            r"shard missing shard 1/2", told_by="gateway", also=frozenset({"KvatlasDown", "KvatlasAnswersInexact"}),
        ),
        Fault(
            "Two daemons have different settings",
            "`kvatlas-2` is started again with `namespace_defaults.hashing` = `recompute`: `kvatlas-1` believes the hashes that publishers send.",
            "KvatlasHoldersDegraded", {"instance": "kvatlas-2:9464"}, r"rejected",
            lambda stack: restart(stack, "kvatlas-2", KVATLAS_NAMESPACE_DEFAULTS_HASHING="recompute"),
            lambda stack: without(stack, "kvatlas-2", "KVATLAS_NAMESPACE_DEFAULTS_HASHING"),
            r"namespaces: .*demo has .* at kvatlas-1:9464, and .*recompute.* at kvatlas-2:9464.*mend: give all daemons the same",
            r"worker-\d+/0 .*rejected", r"rejected worker-\d+/0.* of demo", told_by="kvatlas-2",
            also=DOUBT | RESTART | {"KvatlasResyncsFail", "KvatlasBatchesDropped"},
        ),
    ]


def firing(stack: Stack, fault: Fault) -> dict[str, Any] | None:
    """The fault's alert, while it fires."""
    status, text = get(stack.url("prometheus", 9090, "/api/v1/alerts"))
    alerts = json.loads(text)["data"]["alerts"] if status == 200 else []
    for alert in alerts:
        labels = {**alert["labels"]}
        if labels["alertname"] == fault.alert and alert["state"] == "firing" and fault.labels.items() <= labels.items():
            return dict(alert)
    return None


def fired_beside(stack: Stack, fault: Fault, seconds: float) -> list[str]:
    """The other alerts that have fired in the last so many seconds."""
    query = f'count by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{int(seconds)}s]))'
    status, text = get(stack.url("prometheus", 9090, f"/api/v1/query?{urllib.parse.urlencode({'query': query})}"))
    if status != 200:
        raise SystemExit(f"Prometheus refuses {query}: {text}")
    names = {series["metric"]["alertname"] for series in json.loads(text)["data"]["result"]}
    return sorted(names - {fault.alert} - ALWAYS)


def telling_line(log: Path, since: int, pattern: str) -> str | None:
    """The first warning or error after a position in a log that names the culprit, without colours."""
    text = log.read_bytes()[since:].decode(errors="replace")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    return next((line for line in lines if re.search(r" (WARN|ERROR) ", line) and re.search(pattern, line)), None)


def said(stack: Stack, *command: str) -> str:
    """What a command says; nothing where it takes too long."""
    try:
        done = run(stack, *command)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout + done.stderr


def examined(stack: Stack, fault: Fault) -> str:
    """What the doctor of the fault's deployment says."""
    return said(stack, "doctor", *(DAEMONS if fault.told_by.startswith("kvatlas") else OTHERS))


def line_of(text: str, pattern: str) -> str | None:
    """The first line that names the culprit, with those below it that belong to it: they stand further in."""
    lines = re.sub(r"\n {4,}", "\t", text).splitlines()
    return next((line.strip().replace("\t", "\n     ") for line in lines if re.search(pattern, line)), None)


def page_rows(stack: Stack, name: str) -> str:
    """The rows of the page's trouble, as its script makes them of a frame: what is wrong and who it is."""
    hello: dict[str, Any] = {}
    event = ""
    with urllib.request.urlopen(stack.url(name, 9464, "/page/frames"), timeout=5.0) as stream:
        for raw in stream:
            key, _, value = raw.decode().strip().partition(": ")
            if key == "event":
                event = value
            elif key == "data" and event == "hello":
                hello = json.loads(value)
            elif key == "data" and event == "frame":
                return "\n".join(rows_of(hello, json.loads(value)))
    return ""


def rows_of(hello: dict[str, Any], frame: dict[str, Any]) -> list[str]:
    rows = [] if frame["ready"] else ["not ready " + "; ".join(frame["reasons"])]
    names = {number: f"{worker}/{rank} of {namespace}" for number, namespace, worker, rank in frame["fleet"]["added"]}
    costs = {number: f" Cost: {cost}." for number, cost in frame["costs"]}
    for number, _, bits, *_ in frame["fleet"]["facts"]:
        rows += [f"{word} {names.get(number)}{costs.get(number, '')}" for bit, word in hello["reasons"] if bits & bit]
    rows += [f"shard missing shard {missing['shard']}/{missing['shards']}" for missing in frame["missing_shards"]]
    rows += [f"snapshots fail {frame['snapshots']['error']}"] if frame["snapshots"] else []
    for namespace in frame["namespaces"]:
        rows += [f"all batches dropped {known['worker']} ({known['reason']}) of {namespace['name']}" for known in namespace["refused"]]
        rows += [f"clock ahead {holder} of {namespace['name']}" for holder in namespace["ahead"]]
    return rows


def told(stack: Stack, fault: Fault) -> list[tuple[str, str]]:
    """What the doctor, the status and the page say of the culprit: each is waited for."""
    at = f"{fault.told_by}:9464"
    lines = []

    def wait(who: str, pattern: str, ask: Callable[[], str]) -> None:
        line = wait_until(f"{who} to say {pattern}: {fault.title}", lambda: line_of(ask(), pattern), PATIENCE_S)
        lines.append((who, line))

    wait("kvatlas doctor", fault.doctor, lambda: examined(stack, fault))
    if fault.status is not None:
        wait("kvatlas status", fault.status, lambda: said(stack, "status", "--admin", at))
    if fault.page is not None:
        wait("The page", fault.page, lambda: page_rows(stack, fault.told_by))
    return lines


def is_watched(stack: Stack) -> bool:
    """Whether Prometheus has seen all processes some times: a counter that has moved before looks as if it stood still."""
    query = urllib.parse.urlencode({"query": "min(count_over_time(up[1m]))"})
    status, text = get(stack.url("prometheus", 9090, f"/api/v1/query?{query}"))
    seen = json.loads(text)["data"]["result"] if status == 200 else []
    return bool(seen) and float(seen[0]["value"][1]) >= 3


def are_exact(workers: str) -> bool:
    """Whether a daemon knows some holders, and all for certain."""
    holders = json.loads(workers)["holders"]
    return bool(holders) and all(holder["exact"] for holder in holders)


def is_well(stack: Stack) -> bool:
    """Whether both daemons are ready, every holder is exact and no alert of the drill fires."""
    for name in ("kvatlas-1", "kvatlas-2"):
        if get(stack.url(name, 9464, "/readyz"))[0] != 200:
            return False
        _, text = get(stack.url(name, 9464, "/workers?namespace=demo"))
        if not are_exact(text):
            return False
    if get(stack.url("gateway", 9464, "/readyz"))[0] != 200:
        return False
    # The engine's holder is among those of the first.
    _, text = get(stack.url("shard-0", 9464, "/workers"))
    if ENGINE not in text or not are_exact(text):
        return False
    status, text = get(stack.url("prometheus", 9090, "/api/v1/alerts"))
    names = {alert["labels"]["alertname"] for alert in json.loads(text)["data"]["alerts"]} if status == 200 else {""}
    return names <= ALWAYS


def drill(stack: Stack, fault: Fault) -> str:
    """Breaks, looks, mends; the section of the page."""
    logging = fault.log_of or fault.told_by
    log = stack.services[logging].log
    since = log.stat().st_size
    begun = time.monotonic()
    fault.do(stack)
    alert = wait_until(f"{fault.alert} to fire: {fault.title}", lambda: firing(stack, fault), PATIENCE_S)
    fired_after = time.monotonic() - begun
    line = wait_until(f"a line in {log} that names {fault.names}: {fault.title}", lambda: telling_line(log, since, fault.names), PATIENCE_S)
    others = told(stack, fault)
    beside = fired_beside(stack, fault, time.monotonic() - begun)
    if unexplained := set(beside) - fault.also:
        raise SystemExit(f"{fault.title}: {', '.join(sorted(unexplained))} fired, too")
    mended = time.monotonic()
    fault.mend(stack)
    wait_until(f"all to be well again: {fault.title}", lambda: is_well(stack), RECOVERY_S)
    labels = ", ".join(f'{key}="{value}"' for key, value in sorted(alert["labels"].items()) if key not in ("alertname", "job"))
    linked = ", ".join(f"[{name}](operating.md#{name.lower()})" for name in beside)
    print(f"{fault.title}: {fault.alert} after {fired_after:.0f} s; beside it: {', '.join(beside) or 'none'}", file=sys.stderr, flush=True)
    return "\n".join([
        f"## {fault.title}", "", fault.what, "",
        f"Alert: [{fault.alert}](operating.md#{fault.alert.lower()}) `{{{labels}}}`: {alert['annotations']['summary']}.", "",
        f"Log of `{logging}`:", "", "```text", line, "```", "",
        *(part for who, said in others for part in (f"{who}:", "", "```text", said, "```", "")),
        f"The alert fired {fired_after:.0f} s after the fault; beside it {linked or 'none'}. {time.monotonic() - mended:.0f} s after the repair, no alert was left and every holder was exact.", "",
    ])


HEAD = """# What a bad hour looks like

`deploy/drill.py` has written this page. It runs the deployment of [compose](compose), beside it two
shards with their gateway and a bridge with an engine, breaks it in fourteen ways, one after the other, and
waits each time until all is well again. It fails where no alert fires, or where log, `kvatlas doctor`, `kvatlas status` or page do not name
the culprit within a minute. It fails, too, where an alert fires beside it that is no consequence. The alerts' waits are
shortened to five seconds, their windows to thirty, the age of a snapshot to twenty; those of [alerts.yml](prometheus/alerts.yml) are for
the real thing. Addresses and times are those of the run.
"""


def main() -> None:
    if why := can_run():
        print(why)
        sys.exit(2)
    subprocess.run([DEPLOY / "compose/env.sh"], check=True, stderr=subprocess.DEVNULL)
    enter_namespaces()
    state = Path(tempfile.mkdtemp(prefix="kvatlas-drill-"))
    files = [DEPLOY / "compose/compose.yaml", DEPLOY / "compose/extras.yaml", compose_override(state)]
    stack = Stack(files, state)
    sections = []
    engine = start_engine(state, ENGINE_PORTS)
    try:
        stack.up()
        wait_until("all to be well", lambda: is_well(stack) and is_watched(stack), RECOVERY_S)
        only = os.environ.get("KVATLAS_DRILL_ONLY", "")
        for fault in faults(engine):
            if re.search(only, fault.title):
                sections.append(drill(stack, fault))
    except BaseException:
        print(f"the logs are in {state}; alerts: {get(stack.url('prometheus', 9090, '/api/v1/alerts'))[1]}", file=sys.stderr)
        raise
    finally:
        engine.kill()
        stack.kill()
    page = "\n".join([HEAD, *sections])
    if "--print" in sys.argv:
        print(page)
    else:
        (DEPLOY / "drill.md").write_text(page)
    shutil.rmtree(state)


if __name__ == "__main__":
    main()
