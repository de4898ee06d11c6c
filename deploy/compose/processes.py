#!/usr/bin/env python3
"""Runs the services of compose.yaml as processes of this machine, without Docker, until Ctrl-C.

Every service gets a network of its own on a private bridge, its name in /etc/hosts, a root directory with nothing but its program and
its volumes (read-only where the file says so; a new one is root's, unless the image has a directory for the user there), its user without
capabilities, and its health check. So the configuration files are
exercised as they are. Needs Linux with unshare, ip and mount; root, or user namespaces for everybody; PyYAML; and the programs:

    kvatlas       KVATLAS_BIN, or target/debug/kvatlas
    nats-server   NATS_SERVER_BIN, PATH, or .tools/nats-server
    prometheus    PATH

A service whose program is missing (Grafana) is left out, and that is said. Differences from Docker: no images are pulled or built, users
are mapped only where this runs as root, and published ports are those of one loopback address in a network of its own, which is why
the addresses printed at the start are reached through `nsenter`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, TypeVar

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NETWORK = "10.77.0."
# What a program that is linked dynamically needs of this machine; read-only.
SYSTEM = ["usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "usr/share", "etc/ssl", "etc/passwd", "etc/group", "etc/ld.so.cache", "dev", "proc"]
# Directories that images which are not built here have for a user, who gets the volumes over them.
PREPARED = {"prom/prometheus": {"/prometheus": (65534, 65534)}}
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}

T = TypeVar("T")


class StackError(Exception):
    """Something about the stack is not as it has to be."""


def wait_until(what: str, look: Callable[[], T | None], seconds: float = 60.0) -> T:
    """The first result of `look` that is not None or False; an error that names `what` when it takes too long."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found is not None and found is not False:
            return found
        if time.monotonic() > deadline:
            raise StackError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.1)


def get(url: str, timeout: float = 5.0) -> tuple[int, str]:
    """Status and text of an answer, whatever the status; 0 and the error where there is none."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return 0, str(error)


def programs() -> dict[str, tuple[Path | None, str]]:
    """For each image the program on this machine and its path in the image."""

    def first(*candidates: str | os.PathLike[str] | None) -> Path | None:
        found = (shutil.which(candidate) for candidate in candidates if candidate)
        return next((Path(path).resolve() for path in found if path), None)

    kvatlas = first(os.environ.get("KVATLAS_BIN"), ROOT / "target/debug/kvatlas")
    nats = first(os.environ.get("NATS_SERVER_BIN"), "nats-server", ROOT / ".tools/nats-server")
    return {
        "kvatlas": (kvatlas, "/usr/local/bin/kvatlas"),
        "nats": (nats, "/usr/local/bin/nats-server"),
        "kvatlas-nats": (nats, "/usr/local/bin/nats-server"),
        "prom/prometheus": (first("prometheus"), "/usr/local/bin/prometheus"),
    }


def prepared(spec: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The directories that a service's image has for a user, with user and group. A new volume over another one is root's."""
    build = spec.get("build")
    if build is None:
        return PREPARED.get(spec["image"].rpartition(":")[0], {})
    text = (HERE / build["context"] / build["dockerfile"]).read_text()
    made = re.findall(r"install -d -o (\d+) -g (\d+) (\S+)|^COPY .*--chown=(\d+):(\d+) \S+ (\S+)", text, re.MULTILINE)
    return {path: (int(user), int(group)) for user, group, path in (found[:3] if found[0] else found[3:] for found in made)}


def interpolate(text: str, variables: dict[str, str]) -> str:
    """Replaces ${NAME}, ${NAME:-default} and ${NAME:?error}; $$ is a dollar."""

    def value(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        name, kind, rest = match.group("name"), match.group("kind"), match.group("rest")
        if variables.get(name):
            return variables[name]
        if kind == ":?":
            raise StackError(f"{name} is not set: {rest}")
        return rest or ""

    return re.sub(r"\$\$|\$\{(?P<name>\w+)(?:(?P<kind>:[-?])(?P<rest>[^}]*))?\}", value, text)


def resolved(node: Any, variables: dict[str, str]) -> Any:
    if isinstance(node, str):
        return interpolate(node, variables)
    if isinstance(node, list):
        return [resolved(item, variables) for item in node]
    if isinstance(node, dict):
        return {key: resolved(item, variables) for key, item in node.items()}
    return node


def merged(below: Any, above: Any) -> Any:
    """Mappings one over the other, lists one after the other, as compose merges its files; commands are replaced."""
    if isinstance(below, dict) and isinstance(above, dict):
        both = {**below, **above}
        shared = below.keys() & above.keys()
        return {**both, **{key: above[key] if key in ("command", "test") else merged(below[key], above[key]) for key in shared}}
    if isinstance(below, list) and isinstance(above, list):
        return below + above
    return above


def read_env(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return {name: text for name, text in pairs}


def enter_namespaces() -> None:
    """Runs this script again in a network and mounts of its own; returns in the new one."""
    if os.environ.get("KVATLAS_STACK_INSIDE") == str(os.getppid()):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        subprocess.run(["ip", "link", "add", "stack0", "type", "bridge"], check=True)
        subprocess.run(["ip", "address", "add", f"{NETWORK}1/24", "dev", "stack0"], check=True)
        subprocess.run(["ip", "link", "set", "stack0", "up"], check=True)
        return
    map_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    os.environ["KVATLAS_STACK_INSIDE"] = str(os.getpid())
    os.environ["KVATLAS_STACK_IS_ROOT"] = "" if map_root else "1"
    command = ["unshare", "--mount", "--net", *map_root, "--", sys.executable, *sys.argv]
    child = subprocess.Popen(command)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: child.send_signal(received))
    sys.exit(child.wait())


def can_run() -> str | None:
    """Why the stack cannot run here; None where it can."""
    for tool in ("unshare", "ip", "mount", "nsenter"):
        if not shutil.which(tool):
            return f"{tool} is missing; on Debian: apt-get install util-linux iproute2 mount"
    for image, (program, _) in programs().items():
        if program is None:
            return f"the program of the image {image} is missing"
    map_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    tried = subprocess.run(
        ["unshare", "--mount", "--net", *map_root, "ip", "link", "add", "stack0", "type", "bridge"], capture_output=True, text=True
    )
    return None if tried.returncode == 0 else f"no namespaces can be made here: {tried.stderr.strip()}"


@dataclass
class Service:
    """One service of the compose file."""

    name: str
    spec: dict[str, Any]
    address: str
    program: Path
    inside: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        if self.process is None:
            raise StackError(f"{self.name} does not run")
        return self.process.pid

    @property
    def device(self) -> str:
        return "stack" + self.address.rpartition(".")[2]


class Stack:
    """The services of compose files, as processes. Call `enter_namespaces` first."""

    def __init__(self, files: list[Path], state: Path, images: dict[str, Path] | None = None) -> None:
        """`images` gives the root directories of images that are there; others get what this machine has."""
        self.state = state
        self.images = images or {}
        variables = {**read_env(HERE / ".env"), **os.environ}
        document: dict[str, Any] = {}
        for path in files:
            document = merged(document, resolved(yaml.safe_load(path.read_text()), variables))
        known = programs()
        self.services: dict[str, Service] = {}
        self.left_out: list[str] = []
        for number, (name, spec) in enumerate(document["services"].items(), 10):
            image = spec["image"].rpartition(":")[0]
            program, inside = known.get(image, (None, ""))
            if program is None:
                self.left_out.append(f"{name} (there is no program for {spec['image']})")
                continue
            environment = {key: str(value) for key, value in spec.get("environment", {}).items()}
            log = state / f"{name}.log"
            self.services[name] = Service(name, spec, f"{NETWORK}{number}", program, inside, log, environment=environment)
        self.hosts = "127.0.0.1 localhost\n" + "".join(f"{s.address} {s.name}\n" for s in self.services.values())

    def up(self) -> None:
        """Starts every service when those that it depends on are healthy."""
        for service in self.services.values():
            for other, how in service.spec.get("depends_on", {}).items():
                if how.get("condition") == "service_healthy" and other in self.services:
                    self.wait_healthy(other)
            self.start(service.name)

    def down(self) -> None:
        """Stops every service: those last that the others depend on."""
        for name in reversed(list(self.services)):
            self.stop(name, patience=10.0)

    def kill(self) -> None:
        """Ends every service at once."""
        for service in self.services.values():
            if service.process is not None:
                service.process.kill()
                service.process.wait()
                service.process = None

    def start(self, name: str) -> None:
        """Starts a service, with what its volumes have."""
        service = self.services[name]
        ready, release = os.pipe()
        plan = json.dumps(self._plan(service))
        with service.log.open("ab") as log:
            service.process = subprocess.Popen(
                ["unshare", "--mount", "--net", "--", sys.executable, __file__, "--inside", str(ready), plan],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(ready,),
                start_new_session=True,
            )
        os.close(ready)
        own = os.stat("/proc/self/ns/net").st_ino
        wait_until(f"the network of {name}", lambda: os.stat(f"/proc/{service.pid}/ns/net").st_ino != own)
        peer = ["peer", "name", "eth0", "netns", str(service.pid)]
        # That of the process before goes away with its network, which the kernel takes its time for.
        subprocess.run(["ip", "link", "delete", service.device], check=False, stderr=subprocess.DEVNULL)
        self._ip("link", "add", service.device, "type", "veth", *peer)
        self._ip("link", "set", service.device, "master", "stack0", "up")
        os.write(release, b"go")
        os.close(release)

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    def _plan(self, service: Service) -> dict[str, Any]:
        spec = service.spec
        volumes: list[list[Any]] = []
        for text in spec.get("volumes", []):
            source, target, *options = text.split(":")
            is_named = not source.startswith((".", "/"))
            host = self.state / "volumes" / source if is_named else (HERE / source).resolve()
            if is_named:
                host.mkdir(parents=True, exist_ok=True)
            # As in compose, a later file's volume takes the place of an earlier one's.
            volumes = [volume for volume in volumes if volume[1] != target]
            volumes.append([str(host), target, "ro" in options, prepared(spec).get(target) if is_named else None])
        command = spec.get("command", [])
        return {
            "address": service.address,
            "hosts": self.hosts,
            "root": str(self.images.get(service.spec["image"].rpartition(":")[0], "")),
            "program": str(service.program),
            "inside": service.inside,
            "volumes": volumes,
            "tmpfs": spec.get("tmpfs", []),
            "read_only": bool(spec.get("read_only")),
            "user": spec.get("user") if os.environ.get("KVATLAS_STACK_IS_ROOT") else None,
            "command": [service.inside, *command],
            "environment": {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/", **service.environment},
        }

    def stop(self, name: str, number: int = signal.SIGTERM, patience: float = 30.0) -> int:
        """Ends a service, and returns its exit status."""
        service = self.services[name]
        if service.process is None:
            return 0
        service.process.send_signal(signal.SIGCONT)
        service.process.send_signal(number)
        try:
            status = service.process.wait(patience)
        except subprocess.TimeoutExpired:
            service.process.kill()
            status = service.process.wait()
        service.process = None
        return status

    def signal(self, name: str, number: int) -> None:
        os.kill(self.services[name].pid, number)

    def cut(self, name: str) -> None:
        """Takes a service off the network."""
        self._ip("link", "set", self.services[name].device, "down")

    def mend(self, name: str) -> None:
        self._ip("link", "set", self.services[name].device, "up")

    def execute(self, name: str, command: list[str], timeout: float = 30.0, text: str = "") -> subprocess.CompletedProcess[str]:
        """Runs a command as `docker compose exec` would: in the namespaces, the root directory and the environment of a service."""
        pid = self.services[name].pid
        environment = self._plan(self.services[name])["environment"]
        enter = [str(shutil.which("nsenter")), f"--target={pid}", "--mount", "--net", "--root", "--wd", "--", *command]
        return subprocess.run(enter, capture_output=True, text=True, timeout=timeout, input=text, env=environment)

    def is_healthy(self, name: str) -> bool:
        """Whether the service's health check succeeds; without one, whether it runs."""
        service = self.services[name]
        if service.process is None or service.process.poll() is not None:
            raise StackError(f"{name} has ended: see {service.log}:\n{service.log.read_text()[-2000:]}")
        check = service.spec.get("healthcheck", {}).get("test")
        if not check:
            return True
        try:
            return self.execute(name, check[1:], timeout=5.0).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def wait_healthy(self, name: str, seconds: float = 90.0) -> None:
        wait_until(f"{name} to be healthy: see {self.services[name].log}", lambda: self.is_healthy(name), seconds)

    def url(self, name: str, port: int, path: str = "/") -> str:
        return f"http://{self.services[name].address}:{port}{path}"


def run_inside(ready: int, plan: dict[str, Any]) -> None:
    """In the new namespaces of a service: makes its network and its root directory, and becomes its program."""
    os.read(ready, 2)
    # Ends with the stack, however that ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    def run(*command: str) -> None:
        subprocess.run(command, check=True)

    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"{plan['address']}/24", "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")
    run("mount", "--make-rprivate", "/")
    root = Path(tempfile.mkdtemp(prefix="kvatlas-root-"))
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root))

    def bind(source: Path, target: str, read_only: bool) -> None:
        place = root / target.lstrip("/")
        if source.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        run("mount", "--rbind" if source.is_dir() else "--bind", str(source), str(place))
        if read_only:
            run("mount", "-o", "remount,bind,ro", str(place))

    if plan["root"]:
        run("cp", "--archive", f"{plan['root']}/.", str(root))
    for path in ["dev", "proc"] if plan["root"] else SYSTEM:
        source = Path("/") / path
        if source.exists() and not source.is_symlink():
            bind(source, path, read_only=path not in ("dev", "proc"))
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/hosts").write_text(plan["hosts"])
    if not plan["root"]:
        for link, target in LINKS.items():
            (root / link).symlink_to(target)
        bind(Path(plan["program"]), plan["inside"], read_only=True)
    user = plan["user"]
    numbers = [int(part) for part in user.split(":")] if user else None
    for source, target, read_only, owner in plan["volumes"]:
        if numbers and owner:
            os.chown(source, *owner)
        bind(Path(source), target, read_only)
    for path in plan["tmpfs"]:
        place = root / path.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(place))
    if plan["read_only"]:
        run("mount", "-o", "remount,ro", str(root))
    os.chroot(root)
    os.chdir("/")
    drop_rights(numbers)
    os.execvpe(plan["command"][0], plan["command"], plan["environment"])


def drop_rights(user: list[int] | None) -> None:
    """Becomes the user, without capabilities and without a way to get any; ends with the stack."""
    libc = ctypes.CDLL(None)
    for capability in range(64):
        # PR_CAPBSET_DROP; fails behind the last one that the kernel knows.
        libc.prctl(24, capability, 0, 0, 0)
    if user:
        os.setgroups([])
        os.setresgid(user[1], user[1], user[1])
        os.setresuid(user[0], user[0], user[0])
    # PR_SET_NO_NEW_PRIVS and PR_SET_PDEATHSIG.
    libc.prctl(38, 1, 0, 0, 0)
    libc.prctl(1, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", action="append", type=Path, help="a compose file; several are laid one over the other")
    parser.add_argument("--state", type=Path, help="directory for volumes and logs; a new one unless given")
    parser.add_argument("--seconds", type=float, help="end after so long")
    arguments = parser.parse_args()
    if why := can_run():
        sys.exit(f"processes.py: {why}")
    enter_namespaces()
    state = (arguments.state or Path(tempfile.mkdtemp(prefix="kvatlas-stack-"))).resolve()
    state.mkdir(parents=True, exist_ok=True)
    stack = Stack(arguments.file or [HERE / "compose.yaml"], state)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"volumes and logs are in {state}", flush=True)
    for reason in stack.left_out:
        print(f"left out: {reason}", flush=True)
    try:
        stack.up()
        print(f"all services run; to reach them: nsenter --target {os.getpid()} --net --user --preserve-credentials" if os.geteuid() else
              f"all services run; to reach them: nsenter --target {os.getpid()} --net curl -s {stack.url('kvatlas-1', 9464)}", flush=True)
        time.sleep(arguments.seconds or 10**9)
    except KeyboardInterrupt:
        pass
    finally:
        stack.down()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        run_inside(int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main()
