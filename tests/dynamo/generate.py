"""Has Dynamo's workers serve prompts, through Dynamo's own router.

    python3 generate.py BLOCK_SIZE SEED FIRST LAST

Runs as a process of Dynamo's runtime: discovery and planes come from its environment. The prompts are those of `prompts.py`.
"""

from __future__ import annotations

import asyncio
import os
import sys

from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime, dynamo_worker
from prompts import prompts

SIZE, SEED, FIRST, LAST = map(int, sys.argv[1:5])


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Serves the prompts from FIRST on, before LAST."""
    endpoint = runtime.endpoint("dynamo.backend.generate")
    # Without a model of what workers hold, prompts spread over them.
    router = KvRouter(endpoint, SIZE, KvRouterConfig(router_temperature=2.0))
    await asyncio.sleep(3)
    for prompt in prompts(SIZE, SEED, LAST)[FIRST:]:
        async for _ in await router.generate(prompt, "m", stop_conditions={"max_tokens": 4}):
            pass
    print("done", flush=True)
    # Its threads outlive the interpreter.
    os._exit(0)


asyncio.run(main())
