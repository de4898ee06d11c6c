"""Messages that no client of NATS would send for us, for tests and drills."""

from __future__ import annotations

import json
import socket


def publish_raw(address: str, user: str, password: str, subject: str, payload: bytes) -> None:
    """Publishes these bytes on a subject, and returns when the server has taken them."""
    with socket.create_connection((address, 4222), timeout=5) as connection:
        reader = connection.makefile("rb")
        reader.readline()
        options = {"verbose": False, "pedantic": False, "user": user, "pass": password, "name": "trouble"}
        lines = f"CONNECT {json.dumps(options)}\r\nPUB {subject} {len(payload)}\r\n".encode()
        connection.sendall(lines + payload + b"\r\nPING\r\n")
        while (line := reader.readline().strip()) != b"PONG":
            if not line or line.startswith(b"-ERR"):
                raise ConnectionError(f"NATS says {line.decode(errors='replace')!r}")
