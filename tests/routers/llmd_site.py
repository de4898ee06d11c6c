"""llm-d's own index, which asks kvatlas and a real Redis alike. llm-d's event pool fills the latter."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engines"))

from processes import Bridge, Broker, Daemon, Process, free_ports, wait_until

SIZE = 16
MODEL = "o/m"

Extras = list[list[str]]


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what tells its blocks from others with the same tokens."""

    tokens: tuple[int, ...]
    adapter: str = ""
    salt: str = ""
    # Blocks, and the images in them.
    images: tuple[tuple[int, str], ...] = ()

    def blocks(self) -> int:
        """The full blocks."""
        return len(self.tokens) // SIZE

    def extras(self) -> Extras:
        """The texts of each block, as llm-d's request side has them."""
        texts: Extras = [[] for _ in range(self.blocks())]
        for block, image in self.images:
            texts[block].append(image)
        if self.salt:
            texts[0].append(self.salt)
        return texts


@dataclass(frozen=True)
class Pod:
    """An engine: what llm-d calls it, and the ports of its events and replays."""

    name: str
    events: int
    replay: int

    @property
    def topic(self) -> str:
        """The topic of its messages."""
        return f"kv@{self.name}@{MODEL}"


class Driver:
    """llm-d's code, in a process of its own; `idle` is called while it works."""

    def __init__(self, process: subprocess.Popen[str], daemon: Daemon, redis: Process, idle: Callable[[], None]) -> None:
        self._process, self._idle, self.daemon, self.redis = process, idle, daemon, redis

    def do(self, **request: object) -> dict[str, dict[str, object]]:
        """What it answers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        while not select.select([self._process.stdout], [], [], 0.005)[0]:
            self._idle()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("llm-d's process has ended")
        answered: dict[str, dict[str, object]] = json.loads(line)
        return answered

    def tell(self, pod: Pod, payload: bytes) -> None:
        """Gives llm-d's pool what an engine has published."""
        self.do(op="event", topic=pod.topic, payload=base64.b64encode(payload).decode())


def is_listening(port: int) -> bool:
    """Whether somebody listens on a port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextlib.contextmanager
def site(algorithm: str, seed: str, pods: Sequence[Pod], idle: Callable[[], None] = lambda: None) -> Iterator[Driver]:
    """A broker, kvatlas with a bridge, a real Redis, and llm-d's code."""
    nats, http, redis, own = free_ports(4)
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        broker = Broker(folder, nats)
        real = Process(["redis-server", "--port", str(redis), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"], folder / "redis.log")
        daemon = Daemon(folder, nats, http, {"redis-listen": f"127.0.0.1:{own}"}, ["serve"])
        scheme = f"llm-d-{algorithm}" + (f":{seed}" if seed else "")
        flags = ["--model", MODEL, "--block-size", str(SIZE)]
        for number, pod in enumerate(pods):
            # llm-d calls a pod by its address. Every other engine has a name of its own.
            name, address = (f"vllm-{number}", f",address=http://{pod.name}") if number % 2 else (pod.name, "")
            sockets = f"tcp://127.0.0.1:{pod.events},replay=tcp://127.0.0.1:{pod.replay}"
            flags += ["--engine", f"{name}={sockets},scheme={scheme}{address}"]
        for process in (broker, real, daemon, Bridge(folder, nats, flags)):
            stack.callback(process.kill)
            process.start()
        for port in (redis, own):
            wait_until(f"port {port} answers", lambda port=port: is_listening(port))  # type: ignore[misc]
        addresses = [f"redis://127.0.0.1:{port}" for port in (redis, own)]
        command = [os.environ["LLMD_BIN"], *addresses, algorithm, seed, MODEL, str(SIZE)]
        log = stack.enter_context(open(folder / "llmd.log", "wb"))
        llmd = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        stack.callback(llmd.wait)
        stack.callback(llmd.kill)
        try:
            yield Driver(llmd, daemon, real, idle)
        except Exception:
            for path in folder.glob("*.log"):
                print(path.name, path.read_text(errors="replace")[-1500:], file=sys.stderr)
            raise
