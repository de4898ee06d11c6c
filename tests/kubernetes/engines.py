"""Engines as pods have them: genuine caches of vLLM with their publishers, and before each a small server that answers as vLLM's does."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from chats import Chats
from processes import Depths, Host, Prompt, free_ports

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
BLOCK_SIZE = 16


class _Server(ThreadingHTTPServer):
    # A server of another address has the same port.
    allow_reuse_address = True
    daemon_threads = True


class Engine:
    """An engine at an address of its own, such as 127.0.1.7."""

    def __init__(self, address: str, port: int, seed: int, folder: Path, sockets: tuple[int, int] | None = None) -> None:
        self.address, self.port = address, port
        self.sockets = sockets or (free_ports(1)[0], free_ports(1)[0])
        # Another seed has other prompts, so that no engine has blocks of another one.
        self._chats = Chats(seed, BLOCK_SIZE, [None], [None])
        self.prompts: list[Prompt] = []
        self.is_dev = True
        endpoint, replay = (f"tcp://*:{socket}" for socket in self.sockets)
        given = {"endpoint": endpoint, "replay": replay, "rank": 0, "blocks": 2000, "block_size": BLOCK_SIZE}
        given |= {"buffer_steps": 10_000, "hash_fn": "sha256_cbor"}
        self._lock = threading.Lock()
        self._host = Host("vllm", [given], folder / f"engine-{seed}.log")
        self._server = _Server((address, port), self._handler(endpoint, replay))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def _handler(self, endpoint: str, replay: str) -> type[BaseHTTPRequestHandler]:
        source = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay}
        source |= {"buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": ""}
        answers: dict[str, Any] = {
            "/kv_event_sources": {"0": source},
            "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "root": MODEL, "parent": None}]},
        }
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def _answer(self, answer: Any) -> None:
                body = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(200 if answer is not None else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self._answer(answers.get(self.path))

            def do_POST(self) -> None:
                # vLLM has it in its development mode only.
                is_reset = engine.is_dev and self.path.startswith("/reset_prefix_cache")
                if is_reset:
                    engine.reset()
                self._answer({} if is_reset else None)

        return Handler

    def serve(self, requests: int) -> None:
        """Serves requests, whose prompts are kept."""
        prompts = [self._chats.prompt() for _ in range(requests)]
        with self._lock:
            self._host.serve([(0, prompt) for prompt in prompts])
        self.prompts += prompts

    def reset(self) -> None:
        """Clears the cache."""
        with self._lock:
            self._host.reset(0)

    def depths(self) -> list[Depths]:
        """What the cache has now of each prompt that was served."""
        with self._lock:
            return self._host.depths(self.prompts)[0]

    def kill(self) -> None:
        """SIGKILL, and its server with it: connections to it break."""
        self._host.kill()
        self._server.shutdown()
        self._server.server_close()

    def as_another(self, seed: int, folder: Path) -> Engine:
        """Another process at the same address, with the same ports and another content."""
        return Engine(self.address, self.port, seed, folder, self.sockets)
