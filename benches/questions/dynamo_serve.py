"""Serves the index of Dynamo's router to other routers, as kvatlas does, until it is ended.

    python3 dynamo_serve.py BLOCK_SIZE
"""

from __future__ import annotations

import asyncio
import sys

from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime, dynamo_worker


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Serves."""
    endpoint = runtime.endpoint("dynamo.backend.generate")
    router = KvRouter(endpoint, int(sys.argv[1]), KvRouterConfig(serve_indexer=True))
    await asyncio.Event().wait()
    del router


asyncio.run(main())
