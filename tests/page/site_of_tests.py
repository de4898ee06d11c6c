"""A daemon with a fleet that publishes and routers that ask, and a page of strangers' names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import Request, urlopen

import kvatlas
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select

REPOSITORY = Path(__file__).parents[2]
PATIENCE = 60.0
NAMESPACE = "llama"
# The sizes of the pictures: of a desk, and of a phone.
DESK, PHONE = 1400, 390
_T = TypeVar("_T")


def eventually(what: str, look: Callable[[], _T | None]) -> _T:
    """Waits until `look` has an answer that counts. What the page has replaced meanwhile, or has not made yet, has none."""
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(NoSuchElementException, StaleElementReferenceException):
            if found := look():
                return found
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}"
        time.sleep(0.1)


def eventually_there(look: Callable[[], _T]) -> _T:
    """What `look` sees, once nothing of it is replaced meanwhile."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return look()
        except StaleElementReferenceException:
            assert time.monotonic() < deadline, "the page replaces it all the time"


def text(browser: Chrome, selector: str) -> str:
    """What an element shows. The page may replace it between the search and the look."""
    return eventually_there(lambda: browser.find_element(By.CSS_SELECTOR, selector).text)


def opened(browser: Chrome, daemon: Daemon, fleet: Fleet) -> Chrome:
    """The page, once it shows the whole fleet."""
    browser.get(daemon.admin + "/")
    wanted = f"{len(fleet.workers):,} holders"
    eventually("the fleet is shown", lambda: text(browser, "#fleet-count") == wanted)
    return browser


def resize(browser: Chrome, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def require_in_reach(browser: Chrome, width: int) -> None:
    """Fails where the rules of axe find something, in both colour schemes, or where something is wider than the screen."""
    browser.execute_script(files("axe_core_python").joinpath("axe.min.js").read_text())
    for theme in ("light", "dark"):
        Select(browser.find_element(By.ID, "theme")).select_by_value(theme)
        found = browser.execute_async_script("axe.run({resultTypes: ['violations']}).then(arguments[0])")
        faults = [(fault["id"], [node["html"][:120] for node in fault["nodes"]][:3]) for fault in found["violations"]]
        assert faults == [], (theme, faults)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def binary(variable: str, *places: str | None) -> str:
    named = os.environ.get(variable)
    for place in (named, *places):
        if place and Path(place).exists():
            return place
    raise FileNotFoundError(f"nothing to test against: name a binary in {variable}")


def kvatlas_binary() -> str:
    return binary("KVATLAS_BIN", str(REPOSITORY / "target/debug/kvatlas"))


def nats_server() -> str:
    return binary("NATS_SERVER_BIN", shutil.which("nats-server"), str(REPOSITORY / ".tools/nats-server"))


def environment() -> dict[str, str]:
    """What a test's processes see: nothing of the settings of this one."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVATLAS_")}


class Broker:
    """A nats-server with a configuration of the test's."""

    def __init__(self, directory: Path, configuration: str) -> None:
        directory.mkdir()
        file = directory / "nats.conf"
        file.write_text(configuration)
        ports = ["-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", str(directory), "-l", str(directory / "log")]
        self._child = subprocess.Popen([nats_server(), "-c", str(file), *ports], stdin=subprocess.DEVNULL)
        self.address = eventually("the broker tells its port", lambda: self._read(directory))

    def _read(self, directory: Path) -> str | None:
        for ports in directory.glob("*.ports"):
            with contextlib.suppress(ValueError):
                return json.loads(ports.read_text())["nats"][0].rsplit("/", 1)[1]
        return None

    def stop(self) -> None:
        self._child.terminate()
        self._child.wait(PATIENCE)


class Daemon:
    """`kvatlas serve`, with a broker of its own unless one is given."""

    def __init__(self, *flags: str, nats: str | None = None) -> None:
        server = nats_server()
        command = [
            kvatlas_binary(),
            *["serve", *(["--nats-url", nats] if nats else ["--embedded"])],
            *["--admin-listen", "127.0.0.1:0", "--logging-format", "json"],
            *["--namespace-defaults-stale-after-ms", "0", *flags],
        ]
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment() | {"NATS_SERVER_BIN": server},
            text=True,
        )
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.admin = self._find(r"metrics and probes are at (http://[0-9.:]+)/")
        self.nats = "nats://" + self._find(r'"nats":"([0-9.:]+)"')
        eventually("the daemon is ready", self._is_ready)

    def _read(self) -> None:
        assert self._child.stderr is not None
        for line in self._child.stderr:
            self._log.append(line)

    def _find(self, pattern: str) -> str:
        def look() -> str | None:
            assert self._child.poll() is None, "".join(self._log)
            found = (re.search(pattern, line) for line in list(self._log))
            return next((match[1] for match in found if match), None)

        return eventually(pattern, look)

    def _is_ready(self) -> bool:
        assert self._child.poll() is None, "".join(self._log)
        with contextlib.suppress(OSError), urlopen(f"{self.admin}/readyz") as reply:
            return bool(reply.status == 200)
        return False

    def stop(self) -> float:
        """Stops it in good order, and says how many seconds that took."""
        begun = time.monotonic()
        self._child.send_signal(signal.SIGTERM)
        assert self._child.wait(PATIENCE) == 0, "".join(self._log[-20:])
        return time.monotonic() - begun

    def hang(self) -> None:
        """Keeps the process from running, until `go_on`. Its connections stay open."""
        self._child.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._child.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._child.poll() is None:
            # The embedded broker must not outlive its daemon.
            self._child.terminate()
            self._child.wait(PATIENCE)


class Fleet:
    """Workers that hold parts of a few families of prompts; publishes and asks on a thread of its own."""

    def __init__(self, nats: str, workers: int) -> None:
        self.workers = [f"gpu-{number}" for number in range(workers)]
        # Two holders that stay degraded for want of a batch: nobody answers for them.
        self.broken = self.workers[3::500]
        self._nats = nats
        self._stop = threading.Event()
        self._published = threading.Event()
        self._failure: BaseException | None = None
        self._random = random.Random(13)
        self.families = [self._chain(24 + 8 * family) for family in range(6)]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        eventually("the fleet is published", lambda: self._published.is_set() or self._failure)
        assert self._failure is None, self._failure

    def _chain(self, blocks: int, parent: list[int] | None = None) -> list[int]:
        return [*(parent or []), *(self._random.getrandbits(64) for _ in range(blocks))]

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as failure:
            self._failure = failure

    def prompt(self) -> list[int]:
        """A prompt of a family, the first ones more often than the last."""
        family = min(int(self._random.expovariate(0.9)), len(self.families) - 1)
        return self._prompts[family][min(int(self._random.expovariate(0.5)), 11)]

    async def _live(self) -> None:
        # Twelve users of each family, with a conversation each that goes on from the system's prompt or from half of another.
        self._prompts = []
        for family in self.families:
            users = []
            for user in range(12):
                base = users[user // 3][: len(family) + 6] if user >= 3 else family
                users.append(self._chain(6 + user % 5 * 4, base))
            self._prompts.append(users)
        connection = await kvatlas.connect(self._nats)
        asking = kvatlas.QueryClient(connection)
        # A sequence hash names its whole prefix, so random ones will do.
        seqs = dict.fromkeys(self.workers, 0)
        for worker in self.workers:
            rare = self._prompts[-1][0]
            await self._store(connection, worker, seqs, rare if worker in self.broken else self.prompt())
        for worker in self.broken:
            seqs[worker] += 1
            await self._store(connection, worker, seqs, self._prompts[-1][0])
        healthy = [worker for worker in self.workers if worker not in self.broken]
        await connection.flush()
        await self._known(asking)
        self._published.set()
        while not self._stop.is_set():
            for _ in range(8):
                worker = self._random.choice(healthy)
                await self._store(connection, worker, seqs, self.prompt())
            for _ in range(8):
                await asking.query(NAMESPACE, kvatlas.Query.by_sequence_hashes(self.prompt()))
            await asyncio.sleep(0.2)
        await connection.close()

    async def _known(self, asking: kvatlas.QueryClient) -> None:
        """Waits until the daemon has applied something: until then it refuses questions."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                await asking.query(NAMESPACE, kvatlas.Query.by_sequence_hashes(self.prompt()))
                return
            except (kvatlas.UnavailableError, kvatlas.UnknownNamespaceError):
                assert time.monotonic() < deadline, "the namespace is not known in time"
                await asyncio.sleep(0.02)

    async def _store(self, connection: Any, worker: str, seqs: dict[str, int], prompt: list[int]) -> None:
        seqs[worker] += 1
        cursor = kvatlas.Cursor(epoch=1, seq=seqs[worker])
        batch = kvatlas.encode_batch(cursor, 0, [kvatlas.Stored(prompt)], time_us=int(time.time() * 1e6))
        await connection.publish(f"kvatlas.v1.events.{NAMESPACE}.{worker}", batch)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        assert self._failure is None, self._failure


class Stub:
    """The page's own files, and streams that say whatever a test wants: more than the contract lets through."""

    def __init__(
        self,
        daemon: Daemon,
        frames: Callable[[], Iterator[dict[str, Any]]],
        atlas: dict[str, Any] | None = None,
        before: dict[str, Any] | None = None,
        answers: dict[str, tuple[int, dict[str, Any]]] | None = None,
    ) -> None:
        """`answers` has statuses and bodies by path."""
        atlas = atlas or {"total": 0, "seconds": 0, "partial": False, "left_out": 0, "block_size": 16, "nodes": []}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802
                path = self.path.partition("?")[0]
                if path in (answers or {}):
                    status, body = (answers or {})[path]
                    self._answer(json.dumps(body).encode(), {"content-type": "application/json"}, status)
                elif self.path == "/page/frames":
                    self._stream("frame", frames())
                elif self.path.startswith("/page/atlas?"):
                    self._stream("atlas", iter([atlas]))
                elif self.path.startswith("/page/explain?"):
                    self._answer(b'{"error": "<img src=x onerror=pwned()>"}', {"content-type": "application/json"}, 410)
                else:
                    request = Request(daemon.admin + self.path, headers={"accept": "text/html"})
                    with urlopen(request, timeout=PATIENCE) as file:
                        self._answer(file.read(), dict(file.headers), 200)

            def _answer(self, body: bytes, headers: dict[str, str], status: int) -> None:
                self.send_response(status)
                for name in ("content-type", "content-security-policy"):
                    if name in headers:
                        self.send_header(name, headers[name])
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _stream(self, event: str, frames: Iterator[dict[str, Any]]) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    reasons = [[1, "gap"], [2, "undecodable"], [4, "unknown_parent"], [8, "upstream_gap"], [128, "<b>stale</b>"], [256, "behind"]]
                    again = "kvatlas admin resync NAMESPACE WORKER RANK"
                    drops = [["other_settings", "give it the size"], ["stale_epoch", "name it anew; kvatlas admin forget NAMESPACE WORKER RANK"],
                        ["undecodable", "correct it"]]  # fmt: skip
                    mends = [["gap", f"ask again: {again}"], ["undecodable", f"correct it, then {again}"],
                        ["KvatlasClockAhead", "run an NTP client"], ["KvatlasPromisesBroken", f"compare its flags; {again}"]]  # fmt: skip
                    hello = {"version": "<i>0</i>", "commit": "c", "reasons": reasons, "mends": mends, "drop_mends": drops}
                    self._say("hello", hello)
                    for name, data in (before or {}).items():
                        self._say(name, data)
                    for frame in frames:
                        self._say(event, frame)
                    # Open until the page is left.
                    while True:
                        time.sleep(0.2)
                        self._say("hello", hello)

            def _say(self, event: str, data: object) -> None:
                self.wfile.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())
                self.wfile.flush()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def namespace(name: str, exact: int, degraded: int = 0, **more: Any) -> dict[str, Any]:
    """A namespace of a frame."""
    sizes = {"exact": exact, "degraded": degraded, "distinct_blocks": 1, "held_blocks": 1, "bytes": 1}
    totals = {"refused_total": 0, "epochs_ahead": 0, "broken_promises_total": 0}
    return {"name": name, **sizes, **totals, **more}


def frame(change: dict[str, Any], holders: int, namespaces: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    """A frame, as the daemon sends it: of one namespace, unless others are given."""
    whole = {"whole": True, "added": [], "facts": [], "gone": [], "shown": holders, "total": holders}
    return {
        "now_us": int(time.time() * 1e6),
        "ready": False,
        "reasons": ["<script>pwned()</script>"],
        "awaited": None,
        "namespaces": namespaces or [namespace("n", holders)],
        "rates": None,
        "fleet": whole | change,
        **more,
    }
