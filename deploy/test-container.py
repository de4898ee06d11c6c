#!/usr/bin/env python3
"""Carries out the steps of deploy/container/Dockerfile without Docker, as far as that can be done, and runs what comes out.

- The files that .dockerignore lets through are a workspace that cargo takes.
- The program needs no library that the base image lacks. The root directory gets these libraries of this machine in its place.
- In that root directory, read-only, as the image's user, without capabilities: the program starts with the image's command, its health
  check fails while there is no NATS and succeeds when there is, it keeps a snapshot, and it ends in good order at SIGTERM.
- With the command `bridge` in place of the image's the health check succeeds, too.

Not done: pulling base images, the layers, and BuildKit's own reading of the file. The program is the one that KVATLAS_BIN names.
Exits with 2, and says why, where it cannot run: see deploy/compose/processes.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parent
ROOT = DEPLOY.parent
sys.path.insert(0, str(DEPLOY / "compose"))
from processes import Stack, can_run, enter_namespaces, wait_until  # noqa: E402

# What gcr.io/distroless/cc-debian12 has: the packages libc6, libgcc-s1, libgomp1 and libstdc++6.
BASE_LIBRARIES = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libstdc++.so.6"}


class Image:
    """The last stage of the file: its instructions, and what they say of how to run the image."""

    def __init__(self, dockerfile: Path) -> None:
        text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
        instructions = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
        last = max(number for number, (word, _) in enumerate(instructions) if word == "FROM")
        self.build = [rest for word, rest in instructions[:last] if word == "RUN"]
        self.copies = [shlex.split(rest) for word, rest in instructions[last:] if word == "COPY"]
        self.base = instructions[last][1]
        final = dict(instructions[last:])
        self.user = final["USER"]
        self.entrypoint: list[str] = json.loads(final["ENTRYPOINT"])
        self.command: list[str] = json.loads(final["CMD"])
        self.health: list[str] = json.loads(final["HEALTHCHECK"].partition("CMD ")[2])
        self.environment = dict(pair.split("=", 1) for pair in shlex.split(final["ENV"]))
        self.volumes: list[str] = json.loads(final["VOLUME"])


def check_context(directory: Path) -> None:
    """Cargo takes the files that the build is given."""
    rules = [line for line in (DEPLOY / "container/Dockerfile.dockerignore").read_text().splitlines() if line and line[0] != "#"]
    tracked = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in tracked.stdout.splitlines():
        kept = any(name == rule[1:] or name.startswith(rule[1:] + "/") for rule in rules if rule[0] == "!")
        if kept and not any(fnmatch(name, "*" + rule.removeprefix("**")) for rule in rules if rule.startswith("**")):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name, follow_symlinks=False)
    subprocess.run(["cargo", "tree", "--locked", "--offline", "--workspace"], cwd=directory, check=True, stdout=subprocess.DEVNULL)
    assert (directory / "deploy/container/build.sh").exists()
    # The compiler's files, too.
    for source in (directory / "src").rglob("*.rs"):
        for included in re.findall(r'^[^/\n]*include_(?:str|bytes)!\("([^"]+)"\)', source.read_text(), re.MULTILINE):
            assert (source.parent / included).exists(), f"{source.relative_to(directory)} includes {included}"


def build(image: Image, directory: Path) -> Path:
    """The root directory that the last stage makes."""
    [step] = image.build
    built = directory / "image"
    script, target = step.split()
    assert target == "/image", step
    subprocess.run([ROOT / script, built], check=True)
    root = directory / "root"
    for options in image.copies:
        source, destination = [word for word in options if not word.startswith("--")]
        place = root / destination.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(built / source.removeprefix("/image/"), place, dirs_exist_ok=True)
    needed = subprocess.run(["ldd", root / image.entrypoint[0].lstrip("/")], capture_output=True, text=True, check=True).stdout
    for line in needed.splitlines():
        found = re.match(r"\s*(?:(\S+) => )?(/\S+)", line)
        if found:
            name, path = found.group(1) or Path(found.group(2)).name, Path(found.group(2))
            assert name in BASE_LIBRARIES or name.startswith("ld-linux"), f"{image.base} has no {name}"
            place = root / str(path).lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)
    return root


def run(image: Image, root: Path, state: Path) -> None:
    service = {
        "image": "kvatlas:test",
        "build": {"context": str(ROOT), "dockerfile": "deploy/container/Dockerfile"},
        "command": image.command,
        "user": image.user,
        "read_only": True,
        "environment": {
            **image.environment,
            "KVATLAS_NATS_URL": "nats://nats:4222",
            "KVATLAS_SNAPSHOTS_DIRECTORY": image.volumes[0],
        },
        "volumes": [f"data:{image.volumes[0]}"],
        "healthcheck": {"test": ["CMD", *image.health]},
    }
    # Nobody is there to be followed: the bridge goes on trying.
    bridge = {
        **{key: service[key] for key in ("image", "user", "read_only", "healthcheck")},
        "command": ["bridge", "--model=m", "--engine=gpu-0=tcp://127.0.0.1:1"],
        "environment": {**image.environment, "KVATLAS_NATS_URL": "nats://nats:4222"},
    }
    nats = {"image": "nats:test", "command": ["-a", "0.0.0.0"]}
    document = state / "compose.yaml"
    document.write_text(yaml.safe_dump({"services": {"nats": nats, "kvatlas": service, "bridge": bridge}}))
    stack = Stack([document], state, images={"kvatlas": root})
    assert stack.services["kvatlas"].inside == image.entrypoint[0]
    try:
        stack.start("kvatlas")
        said = wait_until("an answer of the health check", lambda: not_ready(stack, image))
        assert "NATS server" in said, said
        stack.start("nats")
        stack.start("bridge")
        stack.wait_healthy("kvatlas")
        stack.wait_healthy("bridge")
        status = Path(f"/proc/{stack.services['kvatlas'].pid}/status").read_text()
        rights = dict(line.split(":\t", 1) for line in status.splitlines())
        assert rights["CapBnd"] == "0000000000000000" and rights["NoNewPrivs"] == "1", status
        if os.environ.get("KVATLAS_STACK_IS_ROOT"):
            assert rights["Uid"].split() == [image.user.split(":")[0]] * 4, rights["Uid"]
        status_of_stop = stack.stop("kvatlas")
        assert status_of_stop == 0, f"SIGTERM ends the container with {status_of_stop}: {stack.services['kvatlas'].log.read_text()}"
        assert stack.stop("bridge") == 0, stack.services["bridge"].log.read_text()
        assert list((state / "volumes/data").glob("snapshot-*.kvs")), "there is no snapshot"
    finally:
        stack.kill()
    print("the image's steps, run as a script: unhealthy without NATS, healthy with it, read-only, no rights, a snapshot, a clean end; a bridge too")


def not_ready(stack: Stack, image: Image) -> str | None:
    """What the health check says while the daemon is not ready; None while it does not listen."""
    checked = stack.execute("kvatlas", image.health)
    assert checked.returncode != 0, "healthy without NATS"
    return checked.stderr if checked.returncode == 1 else None


def main() -> None:
    image = Image(DEPLOY / "container/Dockerfile")
    if why := can_run():
        print(why)
        sys.exit(2)
    enter_namespaces()
    with tempfile.TemporaryDirectory(prefix="kvatlas-container-") as directory:
        place = Path(directory)
        check_context(place / "context")
        run(image, build(image, place), place)


if __name__ == "__main__":
    main()
