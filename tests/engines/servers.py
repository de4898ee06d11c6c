"""Servers before genuine caches, which the bridge is given instead of the caches' sockets: vLLM's own front end, and SMG's two servicers.

The front end is the file `vllm/vllm-rs` of vLLM's wheel, named by VLLM_RS. SMG's are in a Python that has its packages, named by SMG_PYTHON, or that of
deploy/scenario-routers.sh.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from processes import HERE, REPOSITORY, Process, free_ports, wait_until

sys.path.append(str(REPOSITORY / "tests/routers"))

from words import words_model

# Ways to follow an engine by its server.
FRONT_ENDS, SERVICERS = ("vLLM over HTTP", "vLLM over gRPC"), ("SMG in Python", "SMG in Rust")

_lives = itertools.count()


class Missing(Exception):
    """A partner that cannot be had here, and why."""


def server_before(way: str, folder: Path, model: str, engine: dict[str, Any], publishing: list[int], replaying: list[int]) -> FrontEnd | Servicer:
    """The server before an engine with these ports, one for each rank; no replay ports where it has no replay sockets."""
    if way in FRONT_ENDS:
        return FrontEnd(folder, way, model, engine, publishing, replaying)
    return Servicer(folder, way, model, publishing[0], replaying[0] if replaying else None)


class FrontEnd(Process):
    """vLLM's front end, with pretended engine cores that tell it the sockets of genuine caches."""

    def __init__(self, folder: Path, way: str, model: str, engine: dict[str, Any], publishing: list[int], replaying: list[int]) -> None:
        self._binary = os.environ.get("VLLM_RS", "")
        if not Path(self._binary).is_file():
            raise Missing("vLLM's front end: name the file vllm/vllm-rs of its wheel in VLLM_RS")
        self._engine, self._sockets = engine, list(zip(publishing, replaying, strict=True))
        self._http, self._grpc = free_ports(2)
        self.endpoint = f"http://127.0.0.1:{self._http}" if way == FRONT_ENDS[0] else f"grpc://127.0.0.1:{self._grpc}"
        self._model = words_model(folder / f"model-{self._http}", 64)
        self._arguments = json.dumps({"model_tag": str(self._model), "served_model_name": [model]})
        self._open: list[Any] = []
        super().__init__([], folder / f"front-end-{self._http}.log")

    def start(self) -> None:
        """Starts it, and has the engine cores say who they are."""
        listeners = {name: _listener(port) for name, port in (("", self._http), ("grpc", self._grpc), ("input", 0), ("output", 0))}
        ranks = str(len(self._sockets))
        command = [self._binary, "frontend", "--args-json", self._arguments, "--engine-start-index", "0", "--engine-count", ranks]
        command += ["--data-parallel-size", ranks, "--listen-fd", str(listeners[""].fileno())]
        command += ["--grpc-listen-fd", str(listeners["grpc"].fileno()), "--input-listener-fd", str(listeners["input"].fileno())]
        command += ["--output-listener-fd", str(listeners["output"].fileno())]
        given = [listener.fileno() for listener in listeners.values()]
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(command, pass_fds=given, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        inputs, outputs = (listeners[name].getsockname()[1] for name in ("input", "output"))
        for listener in listeners.values():
            listener.close()
        self._connect(inputs, outputs)
        wait_until("vLLM's front end answers", lambda: _answers(self._http))

    def _connect(self, inputs: int, outputs: int) -> None:
        import msgspec
        import zmq

        context: zmq.Context[Any] = zmq.Context.instance()
        life = next(_lives)
        for rank in range(len(self._sockets)):
            core, answers = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
            core.setsockopt(zmq.IDENTITY, rank.to_bytes(2, "little"))
            core.connect(f"tcp://127.0.0.1:{inputs}")
            core.send(msgspec.msgpack.encode(self._registration(rank, life)))
            answers.connect(f"tcp://127.0.0.1:{outputs}")
            self._open += [core, answers]

    def _registration(self, rank: int, life: int) -> dict[str, object]:
        """How an engine core of vLLM 0.33.0 introduces itself."""
        publishing, replaying = self._sockets[rank]
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{publishing}", "replay_endpoint": f"tcp://*:{replaying}",
            "buffer_steps": self._engine["buffer_steps"], "hwm": 100_000, "max_queue_size": 100_000, "topic": "",
        }  # fmt: skip
        size, blocks, ranks = self._engine["block_size"], self._engine["blocks"], len(self._sockets)
        return {
            "max_model_len": 32768, "num_gpu_blocks": blocks, "block_size": size, "dp_stats_address": None, "dtype": "float32",
            "vllm_version": "0.33.0", "world_size": 1, "data_parallel_size": ranks, "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1, "data_parallel_rank": rank, "max_num_seqs": 8, "max_num_batched_tokens": 2048,
            "instance_id": f"life-{life}", "supports_lora": False, "max_loras": 0, "mamba_block_size": None, "kv_cache_size_tokens": blocks * size,
            "kv_cache_max_concurrency": 1.0, "kv_events_config": events, "weight_transfer_backend": None, "enable_sleep_mode": False,
            "supports_draft_weight_updates": False, "effective_attention_block_size": size, "coord_store_port": 0,
            "coordinator_input_address": None, "coordinator_output_address": None,
        }  # fmt: skip

    def kill(self) -> None:
        super().kill()
        for one in self._open:
            one.close(linger=0)
        self._open = []


class Servicer(Process):
    """SMG's servicer beside an engine, which hands on its events: in Python as they come, in Rust with a history."""

    def __init__(self, folder: Path, way: str, model: str, publishing: int, replaying: int | None) -> None:
        python = os.environ.get("SMG_PYTHON", str(REPOSITORY / ".tools/routers-python/bin/python"))
        probe = [python, "-c", "import smg, smg_grpc_servicer, grpc_health"]
        if not Path(python).exists() or subprocess.run(probe, capture_output=True).returncode:
            raise Missing("SMG's servicers: name a Python with its packages in SMG_PYTHON, or run deploy/scenario-routers.sh")
        # The Rust one has another port for itself.
        self._port, _ = free_ports(2)
        self.endpoint = f"grpc://127.0.0.1:{self._port}"
        about = {"kind": way, "port": self._port, "model": model, "events": publishing, "replay": replaying}
        super().__init__([python, str(HERE / "smg_server.py"), json.dumps(about)], folder / f"servicer-{self._port}.log")

    def start(self) -> None:
        super().start()
        wait_until("the servicer listens", lambda: _listens(self._port))


def _listener(port: int) -> socket.socket:
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", port))
    one.listen(16)
    return one


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/kv_event_sources", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
