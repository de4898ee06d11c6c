#!/usr/bin/env python3
"""SIGHUP: a running daemon takes another log level, other bounds and another password for NATS, says what needs a restart, and passes over a
configuration with mistakes. With a real nats-server, whose password is changed under the daemon."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

DEPLOY = Path(__file__).resolve().parent
sys.path.insert(0, str(DEPLOY / "compose"))
from processes import programs, wait_until  # noqa: E402


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    kvatlas, nats_server = programs()["kvatlas"][0], programs()["nats"][0]
    assert kvatlas and nats_server, "kvatlas or nats-server is missing"
    port, admin = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="kvatlas-reload-") as directory:
        place = Path(directory)
        server_config, config, log = place / "nats.conf", place / "kvatlas.toml", place / "kvatlas.log"

        def write(password: str, more: str) -> None:
            server_config.write_text(f'listen: "127.0.0.1:{port}"\nauthorization {{ user: daemon, password: {password} }}\n')
            text = f'[nats]\nurl = "nats://127.0.0.1:{port}"\nuser = "daemon"\npassword = "{password}"\n'
            config.write_text(f'{text}[admin]\nlisten = "127.0.0.1:{admin}"\n{more}')

        def is_ready() -> bool:
            return subprocess.run([kvatlas, "probe", f"--admin=127.0.0.1:{admin}"], capture_output=True).returncode == 0

        def is_applied(password: str) -> bool:
            """Whether the daemon applies what somebody with this password publishes, and answers for it."""
            who = {"KVATLAS_NATS_URL": f"nats://127.0.0.1:{port}", "KVATLAS_NATS_USER": "daemon", "KVATLAS_NATS_PASSWORD": password}
            command = [str(kvatlas), "publish", "--namespace=llama", "--worker=gpu-0", "--wait", "--timeout=2s"]
            event = '{"type":"stored","sequence_hashes":["ea06fc71a5ee6e88"]}'
            return subprocess.run(command, input=event, text=True, capture_output=True, env=who).returncode == 0

        def is_answered(hashes: list[str]) -> bool:
            who = {"KVATLAS_NATS_URL": f"nats://127.0.0.1:{port}", "KVATLAS_NATS_USER": "daemon", "KVATLAS_NATS_PASSWORD": "one"}
            command = [str(kvatlas), "query", "--namespace=llama", "--sequence-hashes", ",".join(hash.zfill(16) for hash in hashes)]
            return subprocess.run(command, capture_output=True, env=who).returncode == 0

        def told_bytes() -> object:
            with urllib.request.urlopen(f"http://127.0.0.1:{admin}/index", timeout=10) as answer:
                return json.load(answer)["setup"]["max_message_bytes"]

        def says(words: str) -> None:
            wait_until(f"{words!r} in the log:\n{log.read_text()}", lambda: words in log.read_text(), 20)

        write("one", "")
        environment = {"NO_COLOR": "1", "PATH": os.environ["PATH"]}
        with log.open("wb") as output:
            server = subprocess.Popen([nats_server, "--config", server_config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            daemon = subprocess.Popen([kvatlas, "serve", "--config", config], stderr=output, env=environment)
        try:
            wait_until("the daemon to be ready", is_ready, 30)
            assert is_applied("one")
            write("two", '[logging]\nlevel = "info,kvatlas=debug"\n[shutdown]\ndrain_seconds = 5\n')
            daemon.send_signal(signal.SIGHUP)
            says('applied="logging.level, nats.password"')
            says('settings="shutdown.drain_seconds"')
            assert is_answered(["1", "2"]), log.read_text()
            write("two", '[logging]\nlevel = "info,kvatlas=debug"\n[queries]\nmax_message_bytes = 65536\nmax_depth_blocks = 1\n')
            daemon.send_signal(signal.SIGHUP)
            says('applied="queries.max_depth_blocks, queries.max_message_bytes"')
            assert told_bytes() == 65536
            assert not is_answered(["1", "2"]) and is_answered(["1"]), log.read_text()
            server.send_signal(signal.SIGHUP)
            says("event=disconnected")
            wait_until("a batch to be applied with the new password", lambda: is_applied("two"), 30)
            wait_until("the daemon to be ready again", is_ready, 30)
            config.write_text("[nats\n")
            daemon.send_signal(signal.SIGHUP)
            says("the configuration stays as it is")
            assert is_ready()
            daemon.terminate()
            assert daemon.wait(30) == 0, log.read_text()
        finally:
            for process in (daemon, server):
                process.kill()
                process.wait()
    print("SIGHUP changes the log's level, bounds and the password for NATS, says what needs a restart, and passes over mistakes")


if __name__ == "__main__":
    main()
