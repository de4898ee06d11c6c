"""Dynamo's own router, with its index in this process, asked by JSON lines on standard input.

    dynamo_choice.py BLOCK_SIZE

A line is {"tokens", "salt", "adapter"}; the answer is a line with the worker's number, and how many blocks it was credited with. The first line is
`true`. Settings come from DYN_... in the environment.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvloop
from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import dynamo_worker


@dynamo_worker()
async def main(runtime: Any) -> None:
    """Answers until the input ends."""
    router = KvRouter(runtime.endpoint("dynamo.backend.generate"), int(sys.argv[1]), KvRouterConfig())
    lines = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print("true", flush=True)
    while line := await lines.readline():
        asked = json.loads(line)
        more = {"lora_name": asked["adapter"]} if asked["adapter"] else {}
        more |= {"cache_namespace": asked["salt"]} if asked["salt"] else {}
        try:
            worker, _, blocks = await router.best_worker(asked["tokens"], **more)
            print(json.dumps([worker, blocks]), flush=True)
        except Exception as error:
            print(json.dumps(repr(error)), flush=True)


uvloop.run(main())
