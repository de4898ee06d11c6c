"""A router to copy: OpenAI-style HTTP in front of engines, and each request goes where most of its prompt is cached.

    python router.py --listen 8000 --kvatlas http://127.0.0.1:8090 --model NAME --engine gpu-0=http://127.0.0.1:8001 ...

What it does for a request:

1. It makes the prompt's tokens.
2. It asks kvatlas at which workers it can reuse how many leading blocks of them: `POST /v1/query`.
3. It takes the engine with the least to do: blocks of this prompt that can't be reused there, and those on their way to it.
   Of engines with about as little it takes the prompt's home; see policy.py.
4. It passes the request on, and the answer back, as it comes.

Where kvatlas does not answer in time, step 3 goes by what is on its way and the home: a router must not fail with its map.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web
from policy import choose
from text import tokens_of

BLOCK_SIZE = 16
# What an answer may take, in seconds. Usually it is there in a millisecond.
PATIENCE = 0.1
# What is about the connection between client and router, or changes on the way.
OWN_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "content-encoding"})


class Router:
    """Chooses an engine for each request."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._engines: dict[str, str] = dict(engine.split("=", 1) for engine in options.engine)
        self._kvatlas = options.kvatlas.rstrip("/")
        self._model = options.model
        self._asks = options.policy == "kvatlas"
        self._patience = aiohttp.ClientTimeout(total=options.patience)
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
        async with aiohttp.ClientSession(auto_decompress=False) as self._http:
            yield

    async def stats(self, _request: web.Request) -> web.Response:
        """What became of the questions, as JSON."""
        return web.json_response(dict(self.counts))

    async def usable_blocks(self, tokens: list[int]) -> dict[str, int]:
        """How many leading blocks of the prompt a request can reuse at each worker; empty where nobody answers."""
        question = {"model": self._model, "tokens": tokens, "workers": list(self._engines)}
        try:
            async with self._http.post(
                f"{self._kvatlas}/v1/query", json=question, timeout=self._patience
            ) as answer:
                if answer.status == 404:
                    # No worker of the model has stored anything yet.
                    self.counts["unknown_model"] += 1
                    return {}
                answer.raise_for_status()
                holders = (await answer.json())["holders"]
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            self.counts["unanswered"] += 1
            print(f"routing without kvatlas: {error!r}", flush=True)
            return {}
        self.counts["answered"] += 1
        # Of a worker with several ranks, the best.
        found: dict[str, int] = {}
        for holder in holders:
            # Engines with windows or states reuse less than they hold.
            usable = holder.get("usable_blocks", holder["matched_blocks"])
            found[holder["worker"]] = max(found.get(holder["worker"], 0), usable)
        return found

    async def choose(self, tokens: list[int]) -> tuple[str, int]:
        """The engine for a prompt, and what the prompt adds to its work, in blocks."""
        blocks = len(tokens) // BLOCK_SIZE
        if not self._asks:
            return next(self._turns), blocks
        usable = await self.usable_blocks(tokens)
        return choose(self._engines, tokens, blocks, usable, self._under_way)

    async def route(self, request: web.Request) -> web.StreamResponse:
        """Passes a request on, and its answer back as it comes."""
        body = await request.read()
        try:
            tokens = tokens_of(await request.json())
        except (ValueError, AttributeError):
            return web.json_response({"error": {"message": "the body is no JSON object"}}, status=400)
        name, blocks = await self.choose(tokens)
        self._under_way[name] += blocks
        try:
            return await self._pass_on(request, name, body)
        except aiohttp.ClientError as error:
            return web.json_response({"error": {"message": f"engine {name}: {error}"}}, status=502)
        finally:
            self._under_way[name] -= blocks

    async def _pass_on(self, request: web.Request, name: str, body: bytes) -> web.StreamResponse:
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
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


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
    options = parser.parse_args()

    async def application() -> web.Application:
        return Router(options).application()

    web.run_app(application(), host="127.0.0.1", port=options.listen, print=None)


if __name__ == "__main__":
    main()
