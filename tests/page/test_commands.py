"""The same facts from the shell: `kvatlas status`, `kvatlas top`, `kvatlas doctor`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from site_of_tests import PATIENCE, Broker, Daemon, Fleet, environment, eventually, kvatlas_binary

UNUSED = "127.0.0.1:9"


def run(*words: str, **variables: str) -> tuple[int, str, str]:
    """The exit code, and what was printed."""
    done = subprocess.run(
        [kvatlas_binary(), *words], capture_output=True, text=True, env=environment() | variables, timeout=PATIENCE
    )
    return done.returncode, done.stdout, done.stderr


def holders_and_reasons(daemon: Daemon) -> list[tuple[int, dict[str, int]]]:
    """Of each namespace: how many holders are known, and why how many are degraded."""
    said = json.loads(run("status", "--admin", daemon.admin, "--json")[1])
    return [(namespace["holders"], namespace["reasons"]) for namespace in said["namespaces"]]


def test_status_is_one_screen_and_an_exit_code(daemon: Daemon, fleet: Fleet) -> None:
    eventually("all is applied", lambda: holders_and_reasons(daemon) == [(1000, {"gap": 2})])

    def said_while_nobody_is_asked() -> tuple[int, str, str] | None:
        # Those that are broken are asked now and then, and are «resyncing» while they are. What they cost is known after a look each second.
        said = run("status", "--admin", daemon.admin)
        has_costs = said[1].count("of answers inexact") >= len(fleet.broken)
        return said if has_costs and "resyncing" not in said[1] else None

    code, said, failure = eventually("nobody is asked", said_while_nobody_is_asked)
    lines = said.splitlines()
    assert code == 1 and f"2 of {len(fleet.workers)} holders are degraded" in failure
    assert lines[0].startswith(f"{daemon.admin.removeprefix('http://')}: ready")
    assert lines[2].split()[:3] == ["llama", "1000", "2"]
    assert lines[3] == "degraded in llama: gap 2"
    told = [re.sub(r" since .*", "", line) for line in lines[4:]]
    for name in fleet.broken:
        place = told.index(f"  {name}/0 gap")
        assert told[place + 1] == "    expected batch 2, got 3" and told[place + 2].endswith("of answers inexact"), lines
    # What to do about a reason is a sentence.
    assert max(len(line) for line in lines if not line.startswith("  mend ")) <= 60
    assert run("status", "--admin", UNUSED)[0] == 69
    assert run("status", KVATLAS_ADMIN_LISTEN="a b")[0] == 64


def test_a_sound_daemon_exits_with_zero() -> None:
    sound = Daemon()
    try:
        eventually("it is ready", lambda: run("status", "--admin", sound.admin)[0] == 0)
        assert "no worker has been heard of" in run("status", "--admin", sound.admin)[1]
    finally:
        sound.kill()


# With CI set, a missing terminal is a failure.
needs_tmux = pytest.mark.skipif(not shutil.which("tmux") and not os.environ.get("CI"), reason="there is no tmux; install it")


class Terminal:
    """A terminal of 60 columns in which a command runs."""

    def __init__(self, directory: Path, *words: str, variables: str = "") -> None:
        self._tmux = ["tmux", "-S", str(directory / "tmux"), "-f", "/dev/null"]
        command = f"env {variables} {shlex.join([kvatlas_binary(), *words])}; echo ended with $?; exec cat"
        self._run("new-session", "-d", "-x", "60", "-y", "20", command)

    def _run(self, *words: str) -> str:
        ran = subprocess.run([*self._tmux, *words], capture_output=True, text=True, check=True, env=environment())
        return ran.stdout

    def lines(self, *flags: str) -> list[str]:
        return self._run("capture-pane", "-p", "-t", ":", *flags).splitlines()

    def press(self, *keys: str) -> None:
        self._run("send-keys", "-t", ":", *keys)

    def strike(self, number: signal.Signals) -> None:
        """Sends a signal to the command alone."""
        shell = self._run("list-panes", "-F", "#{pane_pid}").strip()
        command = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()[0]
        os.kill(int(command), number)

    def is_taken(self) -> bool:
        """Whether a command has the whole screen."""
        return self._run("display-message", "-p", "-t", ":", "#{alternate_on}").strip() == "1"

    def close(self) -> None:
        self._run("kill-server")


@pytest.fixture
def top(tmp_path: Path, daemon: Daemon, fleet: Fleet) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path, "top", "--admin", daemon.admin)
    yield terminal
    terminal.close()


@needs_tmux
def test_top_shows_the_fleet_and_obeys_keys(top: Terminal, fleet: Fleet) -> None:
    eventually("the fleet is shown", lambda: "998 exact  2 degraded" in "\n".join(top.lines()))
    eventually("rates are shown", lambda: any(line.startswith("queries ") for line in top.lines()))
    shown = "\n".join(top.lines())
    assert " ready" in shown and shown.index(f"{fleet.broken[0]} ") < shown.index("gpu-0 ")
    assert "gap" in shown and "q quit" in shown
    assert any("\x1b[38;5;" in line for line in top.lines("-e")), "with colours"
    top.press("d")
    eventually("only the degraded", lambda: "gpu-0 " not in "\n".join(top.lines()))
    top.press("d")
    top.press("/", *"gpu-77", "Enter")
    eventually("only these", lambda: "gpu-770" in "\n".join(top.lines()) and "gpu-0 " not in "\n".join(top.lines()))
    top.press("q")
    eventually("it ends", lambda: "ended with 0" in "\n".join(top.lines()))


@needs_tmux
def test_top_without_colours_or_a_terminal(tmp_path: Path, daemon: Daemon, fleet: Fleet) -> None:
    terminal = Terminal(tmp_path, "top", "--admin", daemon.admin, variables="NO_COLOR=1")
    eventually("the fleet is shown", lambda: "998 exact  2 degraded" in "\n".join(terminal.lines()))
    with_escapes = "\n".join(terminal.lines("-e"))
    # 39 and 49 are the terminal's own.
    assert re.findall(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8])[;m]", with_escapes) == []
    terminal.close()
    code, _, failure = run("top", "--admin", daemon.admin)
    assert code == 64 and "kvatlas status" in failure
    assert run("top", "--admin", UNUSED)[0] == 69


@needs_tmux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_top_gives_the_terminal_back_at_a_signal(tmp_path: Path, daemon: Daemon, number: signal.Signals) -> None:
    terminal = Terminal(tmp_path, "top", "--admin", daemon.admin)
    eventually("the screen is taken", terminal.is_taken)
    terminal.strike(number)
    eventually("it ends", lambda: f"ended by {number.name}" in "\n".join(terminal.lines()))
    assert not terminal.is_taken()
    terminal.close()


@needs_tmux
def test_top_says_that_a_daemon_hangs(tmp_path: Path) -> None:
    daemon = Daemon()
    terminal = Terminal(tmp_path, "top", "--admin", daemon.admin)
    try:
        eventually("it is ready", lambda: " ready" in "\n".join(terminal.lines()))
        daemon.hang()
        eventually("it notices", lambda: "NO CONNECTION" in "\n".join(terminal.lines()).upper())
        daemon.go_on()
        eventually("it is ready again", lambda: " ready" in "\n".join(terminal.lines()))
    finally:
        daemon.go_on()
        terminal.close()
        daemon.kill()


def checks(*words: str, **variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code of the doctor, and its checks by name."""
    code, said, failure = run("doctor", "--json", *words, **variables)
    assert said, failure
    return code, {check["name"]: check for check in json.loads(said)["checks"]}


def outcomes(found: dict[str, dict[str, str]]) -> dict[str, str]:
    return {name: check["outcome"] for name, check in found.items()}


def test_the_doctor_finds_a_sound_deployment_well(tmp_path: Path) -> None:
    sound = Daemon()
    try:
        eventually("it is ready", lambda: run("status", "--admin", sound.admin)[0] == 0)
        # What the doctor's own settings say is not the daemon's.
        others = {"KVATLAS_SNAPSHOTS_DIRECTORY": str(tmp_path), "KVATLAS_EVENTS_TRANSPORT": "jetstream"}
        code, found = checks("--nats-url", sound.nats, "--admin", sound.admin, "--admin", sound.admin, **others)
        assert code == 0, found
        disk = f"disk of {sound.admin.removeprefix('http://')}"
        assert "there is no snapshots.directory" in found[disk]["found"] and "disk" not in found
        assert found["JetStream"]["outcome"] == "skipped"
        assert all(outcome in ("fine", "skipped") for name, outcome in outcomes(found).items() if name != disk), found
        assert outcomes(found)["round trip"] == outcomes(found)["clock"] == outcomes(found)["replicas"] == "fine"
        assert all(check["mend"] for check in found.values() if check["outcome"] in ("failed", "warning"))
        # Nothing of the probe stays.
        eventually("the probe has gone", lambda: not json.loads(run("status", "--admin", sound.admin, "--json")[1])["namespaces"])
        said = run("doctor", "--nats-url", sound.nats, "--admin", sound.admin)[1]
        assert "ok   round trip: a probe event was found" in said and f"WARN {disk}: there is no snapshots.directory" in said
        # What it tries is not taken for a request.
        with urlopen(sound.admin + "/metrics") as answer:
            assert 'kvatlas_query_replies_dropped_total{reason="no_reply_subject"} 0' in answer.read().decode().splitlines()
        # There is nothing to compare a single replica with.
        assert "replicas:" not in said
    finally:
        sound.kill()


def test_the_doctor_says_what_to_mend(tmp_path: Path) -> None:
    code, found = checks("--nats-url", f"nats://{UNUSED}", "--admin", UNUSED)
    assert code == 69 and outcomes(found)["broker"] == "failed" and outcomes(found)["round trip"] == "skipped"
    assert "credentials" not in found["broker"]["found"] + found["broker"]["mend"]

    users = """
        max_payload: 65536
        authorization { users: [
            { user: all, password: p }
            { user: router, password: p, permissions: {
                publish: ["kvatlas.v1.query.>", "kvatlas.v1.status.>"], subscribe: ["_INBOX.>"] } }
        ] }
    """
    broker = Broker(tmp_path / "broker", users)
    nowhere = tmp_path / "file"
    nowhere.touch()
    nats = ["--nats-url", f"nats://{broker.address}", "--timeout", "1"]
    everything, router = ({"KVATLAS_NATS_USER": user, "KVATLAS_NATS_PASSWORD": "p"} for user in ("all", "router"))
    faults = {
        "KVATLAS_EVENTS_TRANSPORT": "jetstream",
        "KVATLAS_SNAPSHOTS_DIRECTORY": str(nowhere / "snapshots"),
    }
    code, found = checks(*nats, "--admin", UNUSED, **everything | {"KVATLAS_NATS_PASSWORD": "wrong"})
    assert code == 69 and "refuses the credentials" in found["broker"]["found"] and "KVATLAS_NATS_" in found["broker"]["mend"]
    code, found = checks(*nats, "--admin", UNUSED, **everything, **faults)
    assert code == 1
    expected = {
        "broker": "fine",
        "max_payload": "warning",
        "permissions of a daemon": "fine",
        "JetStream": "failed",
        "round trip": "failed",
        "disk": "failed",
        f"replica {UNUSED}": "failed",
    }
    assert expected.items() <= outcomes(found).items(), found
    assert "65536 bytes" in found["max_payload"]["found"]

    _, found = checks(*nats, "--admin", UNUSED, **router)
    assert outcomes(found)["permissions of a router"] == "fine"
    assert "to subscribe to kvatlas.v1.events.>" in found["permissions of a daemon"]["found"]
    assert "to publish to kvatlas.v1.resync." in found["permissions of a daemon"]["found"]
    assert outcomes(found)["permissions of a publisher"] == "failed"
    assert "permissions of a daemon" not in checks(*nats, "--admin", UNUSED, "--role", "router", **router)[1]

    # A daemon is there, and these credentials may not publish: their role needs no more.
    daemon = Daemon("--nats-user", "all", "--nats-password", "p", nats=f"nats://{broker.address}")
    try:
        eventually("it is ready", lambda: run("status", "--admin", daemon.admin)[0] == 0)
        _, found = checks(*nats, "--admin", UNUSED, "--role", "router", **router)
        assert outcomes(found)["round trip"] == "skipped" and "kvatlas.v1.events" in found["round trip"]["found"], found
        code, found = checks(*nats, "--admin", daemon.admin, **everything)
        assert outcomes(found)["round trip"] == "fine", found
    finally:
        daemon.kill()
        broker.stop()
