"""Runs kvatlas beside released routers that ask it, and compares their answers with what the workers hold.

    python3 tests/routers [--seed N] [--short]

Wants a Python with ai-dynamo (DYNAMO_PYTHON), and KVATLAS_BIN and NATS_SERVER_BIN. Prints a line a scenario. Ends with 1 where an answer
was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from words import words_model

HERE = Path(__file__).parent
SIZE = 16
WORDS = 32
WORKERS = 2
PATIENCE = 60.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Site:
    """The processes of one scenario."""

    def __init__(self, folder: Path, plane: str, stack: contextlib.ExitStack) -> None:
        self.folder, self.plane, self.stack = folder, plane, stack
        self.discovery = folder / "discovery"
        self.discovery.mkdir()
        self.nats = free_port()
        # Other variables with this prefix are settings of kvatlas.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVATLAS_")}
        self.environment = inherited | {
            "DYN_FILE_KV": str(self.discovery),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": plane,
            "DYN_EVENT_PLANE": "zmq",
            "NATS_SERVER": f"nats://127.0.0.1:{self.nats}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def start(self, name: str, *command: str) -> None:
        """Starts a process, which ends with the scenario."""
        log = self.stack.enter_context(open(self.folder / f"{name}.log", "wb"))
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=self.environment)
        self.stack.callback(process.wait)
        self.stack.callback(process.terminate)

    def records(self, endpoint: str) -> list[dict[str, object]]:
        """The instances of an endpoint."""
        folder = self.discovery / "v1/instances"
        texts = [path.read_text() for path in folder.iterdir()] if folder.exists() else []
        # A file may be just about to be written.
        found = [json.loads(text) for text in texts if text]
        return [record for record in found if record["endpoint"] == endpoint]

    def wait_for(self, endpoint: str, count: int) -> list[dict[str, object]]:
        """So many instances of an endpoint."""
        deadline = time.monotonic() + PATIENCE
        while len(found := self.records(endpoint)) < count:
            if time.monotonic() > deadline:
                logs = {log.name: log.read_text(errors="replace")[-1000:] for log in self.folder.glob("*.log")}
                raise TimeoutError(f"{count} of {endpoint}: {found}; {logs}")
            time.sleep(0.1)
        return found


@contextlib.contextmanager
def site(plane: str, blocks: int, indexer: Path | None = None) -> Iterator[Site]:
    """A broker, Dynamo's mockers, a daemon, and a bridge to the mockers; or in place of those two a program of Dynamo's that serves its index."""
    python, kvatlas = os.environ["DYNAMO_PYTHON"], os.environ["KVATLAS_BIN"]
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        own = Site(folder, plane, stack)
        own.start("nats", os.environ["NATS_SERVER_BIN"], "-a", "127.0.0.1", "-p", str(own.nats))
        names = words_model(folder / "model", WORDS)
        engines: list[str] = []
        known: set[object] = set()
        for number in range(WORKERS):
            events, replay = free_port(), free_port()
            own.start(
                f"mocker-{number}", python, "-m", "dynamo.mocker", "--model-path", str(names), "--model-name", "m",
                "--block-size", str(SIZE), "--num-gpu-blocks-override", str(blocks), "--speedup-ratio", "1000",
                "--discovery-backend", "file", "--request-plane", plane, "--event-plane", "zmq",
                "--zmq-kv-events-ports", str(events), "--zmq-replay-ports", str(replay),
            )  # fmt: skip
            found = {record["instance_id"] for record in own.wait_for("generate", number + 1)}
            [worker] = found - known
            known = found
            engines += ["--engine", f"{worker}=tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay}"]
        if indexer is not None:
            own.start("indexer", python, str(indexer), str(SIZE))
        else:
            url = ("--nats-url", f"nats://127.0.0.1:{own.nats}", "--admin-listen", "off")
            listen = ("--dynamo-listen", "127.0.0.1:0") if plane == "tcp" else ()
            components = ("--dynamo-components", "dynamo.backend", "--dynamo-discovery", f"file:{own.discovery}")
            own.start("daemon", kvatlas, "serve", *url, *components, *listen)
            own.start("bridge", kvatlas, "bridge", *url, "--model", "m", "--block-size", str(SIZE), *engines)
        own.wait_for("kv_indexer_query", 1)
        yield own


def play(name: str, plane: str, blocks: int, prompts: int, questions: int, seed: int) -> bool:
    """Plays a scenario, and prints its line. Returns whether every answer was right."""
    with site(plane, blocks) as own:
        arguments = [str(number) for number in (SIZE, WORDS, prompts, questions, seed)]
        command = [os.environ["DYNAMO_PYTHON"], str(HERE / "dynamo_router.py"), *arguments]
        done = subprocess.run(command, env=own.environment, capture_output=True, text=True, timeout=900, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
            print(f"| {name} | failed | | | |", flush=True)
            return False
        result = json.loads(lines[-1])
        print(f"| {name} | " + " | ".join(str(value) for value in result.values()) + " |", flush=True)
        return result["wrong"] == 0


def main() -> int:
    """Plays all scenarios."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--short", action="store_true")
    given = arguments.parse_args()
    prompts, questions = (40, 200) if given.short else (400, 5000)
    print("| router | answers | wrong | wrong, by its own index | µs a question |")
    print("|---|---|---|---|---|")
    outcomes = [
        play("Dynamo over NATS, roomy caches", "nats", 4096, prompts, questions, given.seed),
        play("Dynamo over TCP, caches that evict", "tcp", 200, prompts, questions, given.seed + 1),
    ]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
