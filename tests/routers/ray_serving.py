"""Runs all of Ray Serve LLM with kvatlas's subclass of its KVAwareRouter: proxy, ingress, tokenizer, and vLLM on the CPU as its engine.

    python3 tests/routers/ray_serving.py [--seed N] [--short]

The model is of words, and its weights are by chance: what it answers is of no interest. A prompt is served past the proxy by two engines, in different
depths. Then it is sent to the proxy, as a text or as a chat, and the engine that serves it tells how many of its tokens it has found in its cache. Blind is
an answer with fewer than another engine has; stale is one of an engine that has lost them with its process. Wants KVATLAS_BIN and NATS_SERVER_BIN, and a
Python with Ray Serve LLM, vLLM for CPUs and the package kvatlas. Ends with 1 where an answer was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from processes import Broker, Daemon, free_ports, wait_until
from words import words_model

# Ray reads these when it is imported, and so does vLLM in Ray's processes.
os.environ |= {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

import psutil
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.llm import LLMConfig, build_openai_app

MODEL = "m"
WORDS = 2000
# The attention of vLLM for CPUs takes no smaller blocks.
SIZE = 32
REPLICAS = 2
DEEP, SHALLOW = 8, 3
# Each replica imports PyTorch and vLLM, in several processes.
PATIENCE = 600.0


@dataclass(frozen=True)
class Prompt:
    """A prompt of words, and what it is salted with."""

    words: tuple[int, ...]
    salt: str | None

    def body(self, blocks: int, is_chat: bool = False) -> dict[str, Any]:
        """A request for so many blocks of it, and a word."""
        text = " ".join(f"w{word}" for word in self.words[: blocks * SIZE + 1])
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        return {"model": MODEL, "max_tokens": 1} | asked | ({"cache_salt": self.salt} if self.salt else {})


@dataclass(frozen=True)
class Engine:
    """A replica with its engine."""

    # Where its server answers past the proxy.
    port: int
    # The socket of its events.
    source: str


def model(folder: Path) -> Path:
    """A model that vLLM runs on a CPU."""
    made = words_model(folder / "model", WORDS)
    configuration = json.loads((made / "config.json").read_text())
    # Heads of 64.
    configuration |= {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "torch_dtype": "float32"}
    (made / "config.json").write_text(json.dumps(configuration))
    return made


def post(port: int, body: dict[str, Any]) -> int:
    """Sends a request, and returns how many of its tokens the engine has found in its cache."""
    path = "chat/completions" if "messages" in body else "completions"
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        usage = json.loads(answer.read())["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


class Site:
    """kvatlas, and Ray Serve LLM behind its proxy. It ends with its block."""

    def __init__(self, folder: Path, seed: int) -> None:
        nats_port, http_port, self.port, *ports = free_ports(3 + 4 * REPLICAS)
        self._random = random.Random(seed)
        self._stack = contextlib.ExitStack()
        ray.init(num_cpus=16, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        self._stack.callback(ray.shutdown)
        # Replicas advertise their engines by the node's address, which is not the one that registers them.
        settings = {"model": MODEL, "block-size": SIZE, "register-hosts": ray.util.get_node_ip_address()}
        self.kvatlas = Daemon(folder, nats_port, http_port, settings, ["up"])
        for process in (Broker(folder, nats_port), self.kvatlas):
            self._stack.callback(process.kill)
            process.start()
        router = RequestRouterConfig(
            request_router_class="kvatlas.ray:KvatlasKVAwareRouter",
            # It is the choice that is tested, on a busy machine: answers may take their time.
            request_router_kwargs={
                "model": MODEL,
                "patience": 5.0,
                "imbalance": 1_000_000,
                "nats_url": f"nats://127.0.0.1:{nats_port}",
                "register_url": f"http://127.0.0.1:{http_port}",
            },
            request_routing_stats_period_s=1,
        )
        configuration = LLMConfig(
            model_loading_config={"model_id": MODEL, "model_source": str(model(folder))},
            accelerator_config={"kind": "cpu"},
            deployment_config={"num_replicas": REPLICAS, "request_router_config": router, "health_check_period_s": 2},
            experimental_configs={"KV_EVENTS_PORT_BASE": ports[0], "KV_TOKEN_PORT_BASE": ports[2 * REPLICAS]},
            engine_kwargs={
                "load_format": "dummy",
                "dtype": "float32",
                "enforce_eager": True,
                "max_model_len": 1024,
                "block_size": SIZE,
                "kv_cache_memory_bytes": 256 << 20,
                "enable_prompt_tokens_details": True,
            },
            runtime_env={"env_vars": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}},
            log_engine_metrics=False,
        )
        serve.start(http_options={"host": "127.0.0.1", "port": self.port})
        self._handle = serve.run(build_openai_app({"llm_configs": [configuration]}), name="llm", route_prefix="/")
        wait_until("all replicas advertise their engines", lambda: len(self.engines()) == REPLICAS, PATIENCE)

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def engines(self) -> list[Engine]:
        """The engines that are there now, as far as they have been come across."""
        found = {self._any() for _ in range(20)}
        return sorted((engine for engine in found if engine is not None), key=lambda engine: engine.port)

    def _any(self) -> Engine | None:
        async def choose() -> Engine | None:
            async with self._handle.choose_replica(_reserve=False) as selection:
                replica = selection._replica
                source = replica.routing_stats.get("kv_event_metadata")
                return Engine(replica.backend_http_endpoint[1], source["endpoint"]) if source else None

        return asyncio.run(choose())

    def prompts(self, count: int, engines: list[Engine]) -> list[tuple[Prompt, Engine, Engine]]:
        """Prompts, each with the engine that has most of it, and one that has less. Waits until kvatlas knows."""
        made = []
        for number in range(count):
            words = tuple(self._random.randrange(WORDS - 1) for _ in range(DEEP * SIZE + 1))
            deep, shallow = self._random.sample(engines, 2)
            prompt = Prompt(words, "tenant-a" if number % 4 == 0 else None)
            post(deep.port, prompt.body(DEEP))
            post(shallow.port, prompt.body(SHALLOW))
            made.append((prompt, deep, shallow))
        for prompt, _, _ in made:
            wait_until("kvatlas knows what the engines have", lambda prompt=prompt: self._known(prompt) == [SHALLOW, DEEP], PATIENCE)  # type: ignore[misc]
        return made

    def _known(self, prompt: Prompt) -> list[int]:
        answer = self.kvatlas.ask("/v1/query", {"model": MODEL, "tokens": prompt.words, "cache_salt": prompt.salt})
        return sorted(holder["usable_blocks"] for holder in answer["holders"] if holder["exact"]) if answer else []


def is_right(name: str, site: Site, prompts: list[tuple[Prompt, Engine, Engine]], gone: Engine | None = None) -> bool:
    """Sends all prompts to the proxy, and prints how many were blind and stale. Returns whether none was."""
    blind = stale = 0
    for number, (prompt, deep, shallow) in enumerate(prompts):
        found = post(site.port, prompt.body(DEEP, is_chat=number % 2 == 1))
        best = max(blocks for blocks, engine in ((DEEP, deep), (SHALLOW, shallow)) if engine != gone) * SIZE
        # The other engine has nothing only if it has begun anew.
        lost = gone in (deep, shallow)
        stale += found == 0 and lost
        blind += found < best and not lost
    print(f"Ray Serve LLM, {name}: {len(prompts)} requests, {blind} blind, {stale} stale", flush=True)
    return blind + stale == 0


def kill(port: int) -> None:
    """Ends the process that listens on a port, and those that it has started."""
    [number] = {one.pid for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid}
    for process in [*psutil.Process(number).children(recursive=True), psutil.Process(number)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def main() -> int:
    """Plays."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--short", action="store_true", help="40 requests at a time instead of 200")
    given = arguments.parse_args()
    count = 40 if given.short else 200
    with tempfile.TemporaryDirectory() as folder, Site(Path(folder), given.seed) as site:
        engines = site.engines()
        outcomes = [is_right("nothing happens", site, site.prompts(count, engines))]
        prompts = site.prompts(count, engines)
        gone = engines[0]
        kill(gone.port)
        wait_until("the replica is gone", lambda: gone not in site.engines(), PATIENCE)
        wait_until("another replica is there", lambda: len(site.engines()) == REPLICAS, PATIENCE)
        outcomes.append(is_right("a replica and its engine restart", site, prompts, gone))
        outcomes.append(is_right("and all is warm again", site, site.prompts(count, site.engines())))
        prompts = site.prompts(count, site.engines())
        site.kvatlas.kill()
        # By chance some are blind, or nothing was tested.
        outcomes.append(not is_right("without kvatlas, by chance", site, prompts))
    return int(not all(outcomes))


if __name__ == "__main__":
    sys.exit(main())
