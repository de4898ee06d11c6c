"""A broker, a daemon, and a bridge that finds pods; and what they say."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import Cluster
from engines import MODEL, Engine
from processes import Broker, Daemon, Process, Prompt, free_ports, kvatlas, wait_until
from proxy import Loop, Proxy
from report import demand

SELECTOR = "app=vllm"
# Engines are found, and gone, within this time, in seconds.
LIMIT = 2.0


class Site:
    """All processes beside the API and the engines. The bridge reaches the API by a proxy that can be cut."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        nats_port, port, self._admin_port, proxy_port = free_ports(4)
        self.nats_url = f"nats://127.0.0.1:{nats_port}"
        self.broker = Broker(folder, nats_port)
        self._nats_port, self._http_port = nats_port, port
        self.daemon = self.client()
        self.way = Proxy(Loop(), proxy_port, cluster.port, 0)
        self._token, config = folder / "token", folder / "bridge-kubeconfig"
        cluster.kubeconfig(config, proxy_port, self._token)
        # Of all processes that are started here, only the bridge reads it: the others are told theirs.
        os.environ["KUBECONFIG"] = str(config)
        self.bridge_log = folder / "bridge.log"
        command = [kvatlas(), "bridge", "--nats-url", self.nats_url, "--admin-listen", f"127.0.0.1:{self._admin_port}"]
        self.bridge = Process([*command, "--discover", f"kubernetes:{SELECTOR}"], self.bridge_log)

    def client(self) -> Daemon:
        """The daemon, over a connection of its own."""
        return Daemon(self.folder, self._nats_port, self._http_port, {}, ["serve"])

    def start(self) -> None:
        """Starts broker and daemon."""
        self.broker.start()
        self.daemon.start()

    def write_token(self, token: str) -> None:
        """Gives bridges a token of a service account."""
        self._token.write_text(token)

    def start_bridge(self, token: str) -> None:
        """Starts the bridge with a token of a service account, and waits until it shows its sources."""
        self.write_token(token)
        self.bridge.start()
        wait_until("the bridge shows its sources", lambda: bool(self.shown().get("sources")))

    def stop(self) -> None:
        """Ends all."""
        for process in (self.bridge, self.daemon, self.broker):
            process.kill()

    def shown(self) -> Any:
        """What the bridge shows of sources, servers and engines; empty while it does not listen."""
        connection = http.client.HTTPConnection("127.0.0.1", self._admin_port, timeout=10)
        try:
            connection.request("GET", "/workers?limit=10000")
            return json.loads(connection.getresponse().read())
        except OSError:
            return {}
        finally:
            connection.close()

    def source(self) -> Any:
        """The state of the source of pods."""
        return self.shown()["sources"][0]

    def kvatlas(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command, and what it said."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVATLAS_")}
        return subprocess.run([kvatlas(), *arguments], capture_output=True, text=True, check=False, env=environment)

    def admin(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command of an operator."""
        return self.kvatlas("admin", *command, "--nats-url", self.nats_url)

    def doctor(self) -> str:
        """What the doctor says, who is told where the bridge is."""
        return self.kvatlas("doctor", "--nats-url", self.nats_url, "--admin", f"127.0.0.1:{self._admin_port}").stdout

    def holders(self) -> dict[str, bool]:
        """The holders that the daemon knows, and which are exact."""
        answer = self.daemon.ask(f"/v1/status?model={MODEL.replace('/', '%2F')}")
        return {holder["worker"]: holder["exact"] for holder in answer["holders"]} if answer else {}

    def matched(self, prompt: Prompt, client: Daemon | None = None) -> dict[str, int]:
        """How many blocks of a prompt holders are told exactly to have."""
        answer = (client or self.daemon).ask("/v1/query", {"model": MODEL, "tokens": prompt[0]})
        holders = answer["holders"] if answer else []
        return {one["worker"]: one["matched_blocks"] for one in holders if one["exact"] and one["matched_blocks"]}

    def compare(self, engines: dict[str, Engine]) -> int:
        """Compares answers with what the caches of these workers have. They share no prompts, so that nobody else may be told to have any of
        it. Returns how many were compared."""
        compared = 0
        for name, engine in engines.items():
            for prompt, (held, _) in zip(engine.prompts, engine.depths(), strict=True):
                exact = self.matched(prompt)
                demand(exact == ({name: held} if held else {}), f"{name} has {held} blocks, and the answer says {exact}")
                compared += 1
        return compared

    def follows(self, name: str) -> bool:
        """Whether a worker is known and exact."""
        return self.holders().get(name) is True

    def time_until(self, what: str, since: float, condition: Callable[[], bool], patience: float = 30.0) -> float:
        """Waits until the condition holds. Returns how long that was since a moment, in seconds."""
        wait_until(what, condition, patience)
        return time.monotonic() - since


class Watch:
    """Asks about the prompts of an engine all the time, and notes how many blocks of them a worker is told exactly to have that never had any."""

    def __init__(self, site: Site, engine: Engine, worker: str) -> None:
        self._site, self._prompts, self._worker = site, engine.prompts, worker
        self._client, self._stop = site.client(), threading.Event()
        self.asked, self.wrong, self.blocks = 0, 0, 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            prompt = self._prompts[self.asked % len(self._prompts)]
            blocks = self._site.matched(prompt, self._client).get(self._worker, 0)
            self.asked += 1
            self.wrong += blocks > 0
            self.blocks = max(self.blocks, blocks)
            time.sleep(0.002)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def judge(self) -> str:
        """What to note; a failure where there was any such block."""
        demand(not self.wrong, f"{self.wrong} of {self.asked} answers gave {self._worker} up to {self.blocks} blocks of another engine, exactly")
        demand(self.asked, "nothing was asked")
        return f"{self.asked} answers, none of them exact about blocks of another engine"
