"""A worker of Dynamo beside an engine: its events reach Dynamo's event plane by Dynamo's own relay, as its launcher for vLLM has it.

    dynamo_relay.py PLACE EVENTS BLOCK_SIZE MODEL_FOLDER IDS

Writes the place into a file of IDS, which is named after the worker's number, once it can be found. Settings come from DYN_... in the environment.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop
from dynamo.llm import KvEventPublisher, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import dynamo_worker

PLACE, EVENTS, BLOCK_SIZE, FOLDER, IDS = sys.argv[1:]


async def nothing(request: Any, context: Any = None) -> AsyncIterator[dict[str, Any]]:
    """Serves a request; none comes here."""
    yield {"token_ids": [1], "finish_reason": "stop"}


@dynamo_worker()
async def main(runtime: Any) -> None:
    """Relays until it is ended."""
    endpoint = runtime.endpoint("dynamo.backend.generate")
    publisher = KvEventPublisher(
        endpoint=endpoint, kv_block_size=int(BLOCK_SIZE), zmq_endpoint=EVENTS, zmq_topic="", enable_local_indexer=True, dp_rank=0
    )
    about = ModelRuntimeConfig()
    about.total_kv_blocks, about.max_num_seqs, about.max_num_batched_tokens = 3000, 256, 8192
    about.enable_local_indexer = about.kv_event_publishing_enabled = True
    serving = asyncio.ensure_future(endpoint.serve_endpoint(nothing, graceful_shutdown=False))
    await register_model(
        ModelInput.Tokens, ModelType.Completions, endpoint, FOLDER, "m",
        worker_type=WorkerType.Aggregated, kv_cache_block_size=int(BLOCK_SIZE), runtime_config=about,
    )  # fmt: skip
    path = Path(IDS) / str(endpoint.connection_id())
    path.with_suffix(".new").write_text(PLACE)
    os.rename(path.with_suffix(".new"), path)
    await serving
    del publisher


uvloop.run(main())
