"""A router to copy: OpenAI-style HTTP in front of engines, and each request goes where most of its prompt is cached.

    python router.py --listen 8000 --kvatlas http://127.0.0.1:8090 --model NAME --engine gpu-0=http://127.0.0.1:8001 ...

What it does for a request:

1. It makes the prompt's tokens.
2. It asks kvatlas at which workers it can reuse how many leading blocks of them: `POST /v1/query`.
3. It takes the engine with the least to do: blocks of this prompt that can't be reused there, and those on their way to it.
   Of engines with about as little it takes the prompt's home; see policy.py.
4. It passes the request on, and the answer back, as it comes.
5. It tells kvatlas how many tokens the engine found in its cache, beside what was promised: `POST /v1/outcomes`. So kvatlas notices an engine
   that has less than its events say. `--no-outcomes` leaves that out.

With `--hints`, it tells kvatlas in step 3 where the request goes (`POST /v1/hints`), and asks in step 2 who will have more soon by such hints. So a second
request with the same beginning follows the first one before any event tells of it. kvatlas takes hints with `hints.ttl_ms`.

Where kvatlas does not answer in time, step 3 goes by what is on its way and the home: a router must not fail with its map.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web
from policy import choose
from text import tokens_of

# Tokens in a block, until an answer tells it.
BLOCK_SIZE = 16
# What an answer may take, in seconds. Usually it is there in a millisecond.
PATIENCE = 0.1
# What is about the connection between client and router, or changes on the way.
OWN_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "content-encoding"})

# What an engine says of its cache stands at the end of an answer, streamed or not.
TAIL_BYTES = 16 << 10
CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
PROMPT = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')


class Router:
    """Chooses an engine for each request."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._engines: dict[str, str] = dict(engine.split("=", 1) for engine in options.engine)
        self._kvatlas = options.kvatlas.rstrip("/")
        self._model = options.model
        self._asks = options.policy == "kvatlas"
        self._tells = self._asks and not options.no_outcomes
        self._hints = self._asks and options.hints
        # What is being told; a task that nobody holds may vanish.
        self._telling: set[asyncio.Task[None]] = set()
        self._patience = aiohttp.ClientTimeout(total=options.patience)
        self._block_size = BLOCK_SIZE
        self._turns = itertools.cycle(self._engines)
        # Blocks on their way to each engine.
        self._under_way: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def application(self) -> web.Application:
        """The router's HTTP interface."""
        application = web.Application(client_max_size=32 << 20)
        application.router.add_post("/v1/completions", self.route)
        application.router.add_post("/v1/chat/completions", self.route)
        application.router.add_get("/stats", self.stats)
        application.cleanup_ctx.append(self._session)
        return application

    async def _session(self, _application: web.Application) -> AsyncIterator[None]:
        # Requests wait in engines, and not here for one of the 100 connections that a session has by itself.
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(auto_decompress=False, connector=connector) as self._http:
            yield

    async def stats(self, _request: web.Request) -> web.Response:
        """What became of the questions, as JSON."""
        return web.json_response(dict(self.counts))

    async def holders(self, tokens: list[int]) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
        """The workers at which a request can reuse leading blocks of the prompt, and how many some will have soon; empty where nobody answers."""
        question = {"model": self._model, "tokens": tokens, "workers": list(self._engines), "predicted": self._hints}
        try:
            async with self._http.post(
                f"{self._kvatlas}/v1/query", json=question, timeout=self._patience
            ) as answer:
                if answer.status == 404:
                    # No worker of the model has stored anything yet.
                    self.counts["unknown_model"] += 1
                    return {}, {}
                answer.raise_for_status()
                reply = await answer.json()
                holders, predicted = reply["holders"], reply.get("predicted", [])
                self._block_size = reply.get("block_size") or self._block_size
        except (aiohttp.ClientError, asyncio.TimeoutError, KeyError, ValueError) as error:
            self.counts["unanswered"] += 1
            print(f"routing without kvatlas: {error!r}", flush=True)
            return {}, {}
        self.counts["answered"] += 1
        # Of a worker with several ranks, the best: answers begin with it.
        found: dict[str, dict[str, Any]] = {}
        for holder in holders:
            found.setdefault(holder["worker"], holder)
        soon: dict[str, int] = {}
        for holder in predicted:
            soon.setdefault(holder["worker"], holder["blocks"])
        return found, soon

    async def choose(self, tokens: list[int]) -> tuple[str, int, dict[str, Any] | None]:
        """The engine for a prompt, what the prompt adds to its work, in blocks, and what was promised of it."""
        if not self._asks:
            return next(self._turns), len(tokens) // self._block_size, None
        holders, soon = await self.holders(tokens)
        blocks = len(tokens) // self._block_size
        usable = {name: usable_blocks(holder) for name, holder in holders.items()}
        # What is on its way to an engine will be there when this request is.
        reusable = {name: max(usable.get(name, 0), soon.get(name, 0)) for name in usable | soon}
        name, blocks = choose(self._engines, tokens, blocks, reusable, self._under_way)
        if self._hints:
            self._post("hints", {"worker": name, "prompt": {"tokens": tokens}})
        return name, blocks, holders.get(name)

    async def route(self, request: web.Request) -> web.StreamResponse:
        """Passes a request on, and its answer back as it comes."""
        body = await request.read()
        try:
            tokens = tokens_of(await request.json())
        except (ValueError, AttributeError):
            return web.json_response({"error": {"message": "the body is no JSON object"}}, status=400)
        name, blocks, promised = await self.choose(tokens)
        self._under_way[name] += blocks
        try:
            response, tail = await self._pass_on(request, name, body)
            if self._tells and promised is not None:
                self._tell(promised, tail)
            return response
        except aiohttp.ClientError as error:
            return web.json_response({"error": {"message": f"engine {name}: {error}"}}, status=502)
        finally:
            self._under_way[name] -= blocks

    def _tell(self, promised: dict[str, Any], tail: bytes) -> None:
        """Tells in the background what the request found; nobody waits for that, and a failure costs nothing."""
        cached, prompt = CACHED.findall(tail), PROMPT.findall(tail)
        if not cached or not prompt:
            self.counts["unknown_outcome"] += 1
            return
        outcome = {
            "worker": promised["worker"],
            "rank": promised["rank"],
            "promised_blocks": usable_blocks(promised),
            "found_tokens": int(cached[-1]),
            "prompt_tokens": int(prompt[-1]),
            "exact": promised["exact"],
        }
        self._post("outcomes", outcome)

    def _post(self, what: str, told: dict[str, Any]) -> None:
        """Posts an outcome or a hint in the background."""
        task = asyncio.create_task(self._posted(what, told))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _posted(self, what: str, told: dict[str, Any]) -> None:
        report = {"model": self._model, what: [told]}
        counted = "" if what == "outcomes" else "hints_"
        try:
            async with self._http.post(
                f"{self._kvatlas}/v1/{what}", json=report, timeout=self._patience
            ) as answer:
                self.counts[f"{counted}told" if answer.ok else f"{counted}untold"] += 1
        except (aiohttp.ClientError, asyncio.TimeoutError):
            self.counts[f"{counted}untold"] += 1

    async def _pass_on(
        self, request: web.Request, name: str, body: bytes
    ) -> tuple[web.StreamResponse, bytes]:
        """Passes a request on; gives back the answer, and the last of its bytes."""
        headers = {key: value for key, value in request.headers.items() if key.lower() not in OWN_HEADERS}
        # A generation takes as long as it takes.
        patience = aiohttp.ClientTimeout(total=None, connect=5)
        url = self._engines[name] + request.path
        async with self._http.post(url, data=body, headers=headers, timeout=patience) as answer:
            kept = {key: value for key, value in answer.headers.items() if key.lower() not in OWN_HEADERS}
            if "content-encoding" in answer.headers:
                kept["content-encoding"] = answer.headers["content-encoding"]
            response = web.StreamResponse(status=answer.status, headers=kept | {"x-routed-to": name})
            await response.prepare(request)
            tail = b""
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
                tail = (tail + chunk)[-TAIL_BYTES:]
            await response.write_eof()
            return response, tail


def usable_blocks(holder: dict[str, Any]) -> int:
    """How many leading blocks a request can reuse. Engines with windows or states reuse less than they hold."""
    return int(holder.get("usable_blocks", holder["matched_blocks"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Routes OpenAI-style requests to where their prompts are cached."
    )
    parser.add_argument("--listen", type=int, required=True, help="port, on the loopback address")
    parser.add_argument("--kvatlas", default="http://127.0.0.1:8090", help="kvatlas' HTTP listener")
    parser.add_argument("--model", required=True, help="the model, as kvatlas was told")
    parser.add_argument(
        "--engine", action="append", required=True, metavar="NAME=URL", help="an engine, by its worker's name"
    )
    parser.add_argument("--policy", choices=["kvatlas", "round-robin"], default="kvatlas")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, help="seconds that an answer of kvatlas may take"
    )
    parser.add_argument(
        "--no-outcomes", action="store_true", help="do not tell kvatlas what requests found in the caches"
    )
    parser.add_argument(
        "--hints",
        action="store_true",
        help="tell kvatlas where requests are sent, and go by that, too; its hints.ttl_ms has to allow it",
    )
    options = parser.parse_args()

    async def application() -> web.Application:
        return Router(options).application()

    web.run_app(application(), host="127.0.0.1", port=options.listen, print=None)


if __name__ == "__main__":
    main()
