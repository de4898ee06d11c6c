#!/usr/bin/env python3
"""Follows "On one machine, with systemd" of deploy/README.md as it is typed, without systemd, in a network and a folder of its own.

- `nats-server` takes its configuration, with the roles of deploy/nats.
- Both daemons and the bridge run beside each other, each by the command of its unit. Prometheus is told of all three, and each is ready.
- Only root may read the bridge's password. No unit is given up for failing a few times.

Exits with 2, and says why, where it cannot run: see deploy/compose/processes.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parent
sys.path.insert(0, str(DEPLOY / "compose"))
from processes import StackError, can_run, enter_namespaces, get, programs, wait_until  # noqa: E402

PASSWORD = "made-up"
# What the page leaves to its reader: an engine of rack-1, at which nobody answers.
ENGINE = '[[engine]]\nname = "gpu-1"\nendpoint = "tcp://127.0.0.1:1"\nmodel = "m"\n'


class Machine:
    """A folder in the place of a machine's root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes: list[subprocess.Popen[bytes]] = []
        self.tools = root / "tools"
        self.tools.mkdir()
        kvatlas, _ = programs()["kvatlas"]
        (self.tools / "kvatlas").symlink_to(str(kvatlas))
        for name in ("chgrp", "systemctl"):
            (self.tools / name).write_text("#!/bin/sh\n")
            (self.tools / name).chmod(0o755)

    def placed(self, text: str) -> str:
        """The text with its paths below the folder, and the made-up password."""
        inside = re.sub(r"(?<![\w./])/(?=(?:etc|lib/systemd|usr/share|var/lib)/)", f"{self.root}/", text)
        return inside.replace("…", PASSWORD)

    def write(self, path: str, text: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(self.placed(text))

    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.tools}:{os.environ['PATH']}"}

    def start(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        with (self.root / f"{name}.log").open("wb") as log:
            self.processes.append(subprocess.Popen(command, env=self.environment() | environment, stdout=log, stderr=log))

    def start_unit(self, name: str) -> None:
        """Starts what the unit says, with its environment; there is no user and no sandbox."""
        places = [self.root / folder / f"{name}.service" for folder in ("etc/systemd/system", "lib/systemd/system")]
        unit = next(place for place in places if place.exists()).read_text()
        assert re.search(r"^\[Unit\][^\[]*^StartLimitIntervalSec=0$", unit, re.MULTILINE), f"{name} is given up for good"
        settings = dict(pair.split("=", 1) for pair in re.findall(r"^Environment=(.*)$", unit, re.MULTILINE))
        for file in re.findall(r"^EnvironmentFile=-(.*)$", unit, re.MULTILINE):
            assert Path(file).stat().st_mode & 0o777 == 0o600, f"others may read {file}"
            settings |= dict(line.split("=", 1) for line in Path(file).read_text().splitlines())
        [state] = re.findall(r"^StateDirectory=(.*)$", unit, re.MULTILINE)
        (self.root / "var/lib" / state).mkdir(parents=True)
        [command] = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
        self.start(name, shlex.split(command), settings)

    def logs(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-1500:]}" for log in self.root.glob("*.log"))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def blocks() -> list[tuple[str, str]]:
    """Language and text of each block of code of the section, behind the one that installs the package."""
    section = (DEPLOY / "README.md").read_text().partition("### On one machine, with systemd")[2].partition("\n### ")[0]
    found = re.findall(r"^```(\w+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert "apt-get install" in found[0][1], found[0]
    return found[1:]


def follow(machine: Machine) -> None:
    for path in DEPLOY.glob("nats/*.conf"):
        machine.write(f"usr/share/doc/kvatlas/nats/{path.name}", path.read_text())
    for path in DEPLOY.glob("systemd/*.service"):
        machine.write(f"lib/systemd/system/{path.name}", path.read_text())
    machine.write("etc/kvatlas/engines.toml", ENGINE)
    (machine.root / "etc/systemd/system").mkdir(parents=True)
    names = {"text": "etc/nats-server.conf", "toml": "etc/kvatlas/kvatlas.toml", "yaml": "etc/prometheus/prometheus.yml"}
    for language, text in blocks():
        if language != "sh":
            machine.write(names[language], text)
        if language == "text":
            start_nats(machine)
        if language == "sh":
            run_script(machine, text)


def start_nats(machine: Machine) -> None:
    """Starts the NATS server, whose service has the roles' passwords in its environment."""
    server, _ = programs()["nats"]
    roles = re.findall(r"\$(NATS_\w+)", (DEPLOY / "nats/users.conf").read_text())
    config = machine.root / "etc/nats-server.conf"
    tried = subprocess.run([str(server), "-c", config, "-t"], env=dict.fromkeys(roles, PASSWORD), capture_output=True, text=True)
    assert tried.returncode == 0, tried.stderr
    machine.start("nats", [str(server), "-c", str(config)], dict.fromkeys(roles, PASSWORD))


def run_script(machine: Machine, text: str) -> None:
    """Runs what is typed up to where it starts a unit; starts that as systemd would, which waits until it is ready; and so on."""
    parts = re.split(r"systemctl (?:daemon-reload && systemctl )?enable --now (\S+)\n", text)
    for script, unit in zip(parts[::2], [*parts[1::2], None]):
        done = subprocess.run(["sh", "-eu", "-c", machine.placed(script)], env=machine.environment(), capture_output=True, text=True)
        assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
        if unit is not None:
            machine.start_unit(unit)
            wait_until(f"{unit} to be ready", lambda: ready_and_running(machine), 30)


def ready_and_running(machine: Machine) -> bool:
    """Whether as many processes are ready as have been started, beside NATS; an error where one has ended."""
    if any(process.poll() is not None for process in machine.processes):
        raise StackError("one has ended")
    ready = [port for port in range(9464, 9470) if get(f"http://127.0.0.1:{port}/readyz")[0] == 200]
    return len(ready) == len(machine.processes) - 1


def check_targets(machine: Machine) -> None:
    """Prometheus scrapes every process."""
    [job] = yaml.safe_load((machine.root / "etc/prometheus/prometheus.yml").read_text())["scrape_configs"]
    targets = [target for entry in job["static_configs"] for target in entry["targets"]]
    assert len(targets) == len(set(targets)) == len(machine.processes) - 1, targets
    for target in targets:
        assert get(f"http://{target}/readyz")[0] == 200 and get(f"http://{target}/metrics")[0] == 200, target


def main() -> None:
    if why := can_run():
        print(why)
        sys.exit(2)
    enter_namespaces()
    os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="kvatlas-systemd-") as folder:
        machine = Machine(Path(folder))
        try:
            follow(machine)
            check_targets(machine)
        except BaseException:
            print(machine.logs(), file=sys.stderr)
            raise
        finally:
            machine.kill()
    print("the guide to systemd, as it is typed: NATS takes its configuration; two daemons and a bridge are ready beside each other, and are scraped")


if __name__ == "__main__":
    main()
