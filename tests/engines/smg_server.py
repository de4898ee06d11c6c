"""One of SMG's two servicers for vLLM beside an engine of tests/engines, for a Python that has SMG's packages.

    python3 smg_server.py '{"kind": "SMG in Python" | "SMG in Rust", "port", "model", "events", "replay": PORT or null}'
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("benches/routers", "tests/routers", "tests/engines")]


def in_rust(about: dict[str, Any]) -> None:
    """The servicer in Rust, without an engine core: it follows the engine's sockets from its start."""
    from smg.servicer import VllmGrpcServer

    replay = f"tcp://127.0.0.1:{about['replay']}" if about["replay"] else ""
    with tempfile.TemporaryDirectory() as folder:
        server = VllmGrpcServer(
            f"127.0.0.1:{about['port']}", f"ipc://{folder}/", f"tcp://127.0.0.1:{about['port'] + 1}", about["model"],
            max_context_length=32768, vocab_size=128_002, model_type="llama", architectures=["LlamaForCausalLM"], eos_token_ids=[2], block_size=16,
            kv_events_endpoint=f"tcp://127.0.0.1:{about['events']}", kv_events_replay_endpoint=replay, data_parallel_size=1, engine_count=1,
            engine_startup_timeout_secs=3600, engine_startup_ceiling_secs=7200,
        )  # fmt: skip
        print("serves at", server.address, flush=True)
        threading.Event().wait()


async def in_python(about: dict[str, Any]) -> None:
    """The servicer in Python, as the routers' bench has it."""
    import grpc
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc
    from smg_way import Servicer

    worker = SimpleNamespace(events=about["events"], replay=about["replay"], has_replay=about["replay"] is not None)
    servicer = Servicer(SimpleNamespace(workers=[worker]), 0, b"", about["model"])
    # With the options of vLLM's launcher: a client that pings more often than its defaults allow is sent away.
    options = [("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000), ("grpc.keepalive_permit_without_calls", True)]
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *options])
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{about['port']}")
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    """Serves until it is killed."""
    about = json.loads(sys.argv[1])
    if about["kind"] == "SMG in Rust":
        in_rust(about)
    else:
        asyncio.run(in_python(about))


main()
