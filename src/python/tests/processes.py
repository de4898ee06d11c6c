"""The broker and the daemon as processes that can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

REPOSITORY = Path(__file__).parents[3]
PATIENCE = 30.0


def _find(variable: str, *places: str | None) -> str:
    named = os.environ.get(variable)
    if named:
        return named
    for place in places:
        if place and Path(place).exists():
            return place
    raise FileNotFoundError(f"nothing to test against: name a binary in {variable}")


def nats_server() -> str:
    """The broker's binary."""
    return _find("NATS_SERVER_BIN", shutil.which("nats-server"), str(REPOSITORY / ".tools/nats-server"))


def kvatlas() -> str:
    """The daemon's binary."""
    return _find("KVATLAS_BIN", str(REPOSITORY / "target/debug/kvatlas"))


def wait_until(what: str, condition: object) -> None:
    """Waits until the condition, a function, holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}"
        time.sleep(0.005)


class _Process:
    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def _spawn(self, command: list[str]) -> None:
        # A daemon refuses settings that it does not know, and takes no others than a test's own.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVATLAS_")}
        self._child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment
        )

    def stop(self) -> None:
        """Asks the process to end, and waits."""
        if self._child is not None:
            self._child.terminate()
            self._child.wait(PATIENCE)
            self._child = None

    def pause(self) -> None:
        """Does nothing any more, and keeps its connections."""
        assert self._child is not None
        self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Goes on after a pause."""
        assert self._child is not None
        self._child.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: no drain."""
        if self._child is not None:
            self._child.kill()
            self._child.wait(PATIENCE)
            self._child = None

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.kill()


class Broker(_Process):
    """A nats-server on a port of its own, which stays the same when it is started again."""

    def __init__(self, directory: Path, **configuration: object) -> None:
        super().__init__()
        self._directory = directory
        self._port = -1
        self._configuration = configuration

    def start(self) -> None:
        """Starts it, where it was before if it was."""
        self._directory.mkdir(exist_ok=True)
        configuration = self._configure()
        for stale in self._directory.glob("*.ports"):
            stale.unlink()
        self._spawn(
            [
                nats_server(),
                "-a",
                "127.0.0.1",
                "-p",
                str(self._port),
                "-c",
                str(configuration),
                "--ports_file_dir",
                str(self._directory),
                "-l",
                str(self._directory / "log"),
            ]
        )
        wait_until("the broker tells its port", self._read_port)

    def _configure(self) -> Path:
        configuration = self._directory / "nats.conf"
        lines = [f"{key} = {value}" for key, value in {"debug": "false", **self._configuration}.items()]
        configuration.write_text("\n".join(lines) + "\n")
        return configuration

    def reload(self, **configuration: object) -> None:
        """Has it take another configuration; its links stay, as far as that allows them."""
        assert self._child is not None
        self._configuration = configuration
        self._configure()
        before = self._reloads()
        self._child.send_signal(signal.SIGHUP)
        wait_until("the broker has taken its configuration", lambda: self._reloads() > before)

    def _reloads(self) -> int:
        return (self._directory / "log").read_text().count("Reloaded server configuration")

    def _read_port(self) -> bool:
        for ports in self._directory.glob("*.ports"):
            with contextlib.suppress(ValueError):
                [url] = json.loads(ports.read_text())["nats"]
                self._port = int(url.rsplit(":", 1)[1])
                return True
        return False

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def __enter__(self) -> Broker:
        self.start()
        return self


# Settings with which a daemon asks soon again, and does not count a busy machine as a slow broker or a silent publisher.
SETTINGS = {
    "resync-retry-min-ms": 10,
    "resync-retry-max-ms": 200,
    "resync-timeout-ms": 2000,
    "events-behind-after-ms": 30000,
    "namespace-defaults-stale-after-ms": 30000,
}


class Daemon(_Process):
    """`kvatlas serve`."""

    def __init__(self, url: str, **settings: object) -> None:
        super().__init__()
        self._url = url
        self._settings = SETTINGS | {key.replace("_", "-"): value for key, value in settings.items()}

    def start(self) -> None:
        """Starts it; what it knew before it has forgotten."""
        command = [kvatlas(), "serve", "--nats-url", self._url, "--admin-listen", "off"]
        for key, value in self._settings.items():
            command += [f"--{key}", str(value)]
        self._spawn([*command, "--logging-level", "error"])

    def __enter__(self) -> Daemon:
        self.start()
        return self


@contextlib.contextmanager
def running(url: str, **settings: object) -> Iterator[Daemon]:
    """A daemon with other settings."""
    with Daemon(url, **settings) as started:
        yield started
