"""`deploy/go-example`: builds with the module in `src/go`, and works with a real daemon. Only where Go is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from processes import PATIENCE, REPOSITORY, Broker, Daemon
from world import eventually, world

SOURCE = REPOSITORY / "deploy/go-example"
DEBIAN = Path("/usr/share/gocode")


def environment(gopath: Path) -> dict[str, str]:
    """Go with the modules that there are: those of Debian, or what has been fetched before. Never the network."""
    if (DEBIAN / "src/github.com/nats-io/nats.go").exists():
        # Without go.mod, the module of this repository is found by its place.
        place = gopath / "src/github.com/kvatlas/kvatlas"
        place.parent.mkdir(parents=True)
        place.symlink_to(REPOSITORY)
        return dict(os.environ) | {"GO111MODULE": "off", "GOPATH": f"{gopath}:{DEBIAN}", "GOFLAGS": ""}
    return dict(os.environ) | {"GOFLAGS": "-mod=readonly", "GOPROXY": "off", "GOTOOLCHAIN": "local"}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("go") is None:
        pytest.skip(
            "NOT BUILT, there is no Go: on Debian, apt-get install golang-go golang-github-nats-io-go-nats-dev "
            "golang-github-vmihailenco-msgpack.v5-dev"
        )
    with_modules = environment(tmp_path_factory.mktemp("gopath"))

    def go(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["go", *arguments], cwd=SOURCE, env=with_modules, capture_output=True, text=True, check=False
        )

    if go("list", "-deps", ".").returncode:
        pytest.skip(
            "NOT BUILT, its modules are missing: run go mod download in deploy/go-example, or install Debian's"
        )
    built = tmp_path_factory.mktemp("go") / "example"
    built_by = go("build", "-o", str(built), ".")
    assert built_by.returncode == 0, built_by.stderr
    return built


async def test_it_publishes_asks_and_gives_its_state(program: Path, broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url) as here:
        running = subprocess.Popen(  # noqa: ASYNC220
            [program, "-url", broker.url, "-address", "10.0.0.7:8000", "-stay"], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        try:
            assert running.stdout is not None
            lines = [running.stdout.readline().rstrip() for _ in range(9)]
            assert lines == [
                "after the store:",
                "  gpu-0 holds 4 of 4 blocks, 3 of them usable, exact: true []",
                "    at 10.0.0.7:8000 map[]",
                "  a request goes to gpu-0, which has to compute 1 blocks",
                "after the removal:",
                "  gpu-0 holds 3 of 4 blocks, 3 of them usable, exact: true []",
                "    at 10.0.0.7:8000 map[]",
                "  a request goes to gpu-0, which has to compute 1 blocks",
                "staying until interrupted",
            ]
            status = await here.holder()
            assert status is not None
            # A daemon that knows nothing is given the state at the next heartbeat.
            daemon.kill()
            daemon.start()

            async def is_exact() -> bool:
                found = await here.holder()
                return found is not None and found.exact and found.blocks == 3 and found.address == "10.0.0.7:8000"

            await eventually("the state was given", is_exact)
            running.send_signal(signal.SIGINT)
            assert running.wait(PATIENCE) == 0

            async def is_gone() -> bool:
                return await here.answers() and await here.holder() is None

            await eventually("the goodbye was heard", is_gone)
        finally:
            running.kill()
            running.communicate()
