"""SMG's gateway in front of the engines, and beside each the gRPC server that SMG has for vLLM, with SMG's own relay of the events.

Its requests are text: a token N is the word wN of a tokenizer that the workers send. They have neither salts nor adapters.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import sys
import urllib.request
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import Process, Prompt, free_ports, wait_until
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_servicer.kv_relay import Engine, RankSource, relay
from smg_grpc_servicer.load_record import engine_load_from
from vllm_fleet import MODEL, SIZE, Client, Fleet
from ways import Way
from words import words_model

WORDS = 128_002
HEALTHY = 1


class _Health(health_pb2_grpc.HealthServicer):
    async def Check(self, request: Any, context: Any) -> Any:
        return health_pb2.HealthCheckResponse(status=HEALTHY)


class Servicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """What the gateway asks of an engine."""

    def __init__(self, fleet: Fleet, place: int, tokenizer: bytes, model: str = MODEL) -> None:
        self._fleet, self._place, self._tokenizer, self._model = fleet, place, tokenizer, model
        worker = fleet.workers[place]
        replay = f"tcp://127.0.0.1:{worker.replay}" if worker.has_replay else None
        self._source = RankSource(0, f"tcp://127.0.0.1:{worker.events}", replay)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        tokens = list(request.tokenized.input_ids)
        await asyncio.to_thread(self._fleet.serve, self._place, (tokens, None, None))
        counts = {"prompt_tokens": len(tokens), "completion_tokens": 1}
        if request.stream:
            yield vllm_engine_pb2.GenerateResponse(chunk=vllm_engine_pb2.GenerateStreamChunk(token_ids=[3], **counts))
        complete = vllm_engine_pb2.GenerateComplete(output_ids=[3], finish_reason="length", **counts)
        yield vllm_engine_pb2.GenerateResponse(complete=complete)

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.HealthCheckResponse(healthy=True, message="ok")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=self._model, is_generation=True, max_context_length=32768, vocab_size=WORDS, served_model_name=self._model,
            tokenizer_path=self._model, model_type="llama", architectures=["LlamaForCausalLM"], eos_token_ids=[WORDS - 1], max_req_input_len=32768,
        )  # fmt: skip

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.GetServerInfoResponse(server_type="vllm-grpc", data_parallel_size=1, block_size=SIZE, uptime_seconds=5)

    @staticmethod
    def _load() -> Any:
        return vllm_engine_pb2.SchedulerLoad(max_running_requests=64, token_usage=0.1, max_total_num_tokens=1 << 20)

    async def GetLoads(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.GetLoadsResponse(dp_rank_count=1, loads=[self._load()])

    async def Abort(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.AbortResponse()

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield common_pb2.GetTokenizerChunk(data=self._tokenizer, sha256=hashlib.sha256(self._tokenizer).hexdigest())

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def load(rank: int) -> Any:
            return engine_load_from(self._load(), queued_token_work=False)

        async for batch in relay([self._source], Engine.VLLM, request.start_sequence_number, context, load_source=load):
            yield batch


class _Server:
    """The gRPC server of an engine."""

    def __init__(self, fleet: Fleet, place: int, tokenizer: bytes) -> None:
        self._fleet, self._place, self._tokenizer = fleet, place, tokenizer
        [self.port] = free_ports(1)
        self.start()

    def start(self) -> None:
        """Starts it."""
        self._fleet.loop.run(self._start())

    async def _start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)])
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(Servicer(self._fleet, self._place, self._tokenizer), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(_Health(), self._server)
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    def stop(self) -> None:
        """Ends it."""
        self._fleet.loop.run(self._server.stop(0))


class _Gateway(Process):
    def __init__(self, folder: Path, servers: list[_Server], tokenizer: Path) -> None:
        self._port, metrics = free_ports(2)
        self._wanted = len(servers)
        command = [str(Path(sys.executable).with_name("smg")), "launch", "--host", "127.0.0.1", "--port", str(self._port), "--policy", "cache_aware"]
        command += ["--worker-urls", *(f"grpc://127.0.0.1:{server.port}" for server in servers), "--block-size", str(SIZE)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--model-path", str(tokenizer), "--backend", "vllm"]
        # Requests that go to workers with little in their caches, so that they get some, would be counted as missed.
        command += ["--worker-warmup-secs", "0", "--worker-warmup-divert-every", "0", "--worker-warmup-thin-ratio", "0"]
        super().__init__([sys.executable, *command], folder / f"smg-{self._port}.log")

    def start(self) -> None:
        super().start()
        self.client = Client(self._port)
        wait_until("SMG's gateway knows all workers", self._knows_all)

    def _knows_all(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/workers", timeout=5) as answer:
                return int(json.loads(answer.read()).get("total", 0)) >= self._wanted
        except OSError:
            return False


class Smg(Way):
    """SMG's gateways, and the servers in the engines' processes."""

    def __init__(self, folder: Path, fleet: Fleet, routers: int) -> None:
        super().__init__(folder, fleet, routers)
        tokenizer = words_model(folder / "tokenizer", WORDS)
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for path in sorted(tokenizer.iterdir()):
                archive.write(path, path.name)
        self._servers = [_Server(fleet, place, packed.getvalue()) for place in range(len(fleet.workers))]
        self._gateways = [_Gateway(folder, self._servers, tokenizer) for _ in range(routers)]

    def start(self) -> None:
        for gateway in self._gateways:
            gateway.start()
        self.rest()

    def stop(self) -> None:
        for gateway in self._gateways:
            gateway.stop()

    def restart_routers(self) -> None:
        self.stop()
        self.start()

    def restart_all(self) -> None:
        self.stop()
        for server in self._servers:
            server.stop()
            server.start()
        self.start()

    def engine_restarted(self, place: int) -> None:
        """The server of an engine is in the engine's process."""
        self._servers[place].stop()
        self._servers[place].start()

    def ask(self, prompt: Prompt, router: int) -> None:
        tokens, salt, adapter = prompt
        assert salt is None and adapter is None
        body = {"model": MODEL, "prompt": " ".join(f"w{token}" for token in tokens), "max_tokens": 1, "temperature": 0}
        client = self._gateways[router].client
        for _ in range(100):
            status, content = client.post("/v1/completions", body)
            if status == 200:
                return
            # It knows an engine that has begun anew only after a while.
            self.rest(0.1)
        raise RuntimeError(f"SMG: {status}: {content[:300]!r}")

    def processes(self) -> list[Process]:
        return list(self._gateways)
