"""The same chats through the router twice, once by turns and once by kvatlas' answers, and what that saves.

    deploy/router-example/run.sh

Starts `kvatlas up`, two mock engines and the router, each on free local ports, and ends them again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

HERE = Path(__file__).parent
MODEL = "example/chat-8B"
ENGINES = ("gpu-0", "gpu-1")
PATIENCE = 60.0
# Until a user answers, on average.
THINK_MS = 40.0
WORDS = "the of a in map block cache token worker query prefix answer router engine holds how long is".split()  # noqa: SIM905


@dataclass
class Figures:
    """What became of the chats under one policy."""

    prompt_tokens: int
    cached_tokens: int
    waits_ms: list[float]
    unanswered: int
    # Outcomes that kvatlas was told of.
    told: int = 0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def to_json(self) -> dict[str, float]:
        waits = statistics.quantiles(self.waits_ms, n=100)
        return {
            "hit_rate": round(self.hit_rate, 4),
            "first_token_ms_mean": round(statistics.fmean(self.waits_ms), 1),
            "first_token_ms_p50": round(waits[49], 1),
            "first_token_ms_p99": round(waits[98], 1),
            "computed_tokens": self.prompt_tokens - self.cached_tokens,
            "unanswered": self.unanswered,
            "told": self.told,
        }


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def processes(policy: str, options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """All that a policy needs; gives the URL of the router, and those that must answer before it is of use."""
    router, http, *ports = free_ports(2 + 3 * len(ENGINES))
    started: list[subprocess.Popen[bytes]] = []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVATLAS_")}

    def start(*command: str) -> None:
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment))

    try:
        told, routed = [], []
        for number, name in enumerate(ENGINES):
            listen, events, replay = ports[3 * number : 3 * number + 3]
            endpoints = [f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"]
            start(
                sys.executable, str(HERE / "engine.py"), "--listen", str(listen), "--blocks", str(options.blocks),
                "--block-ms", str(options.block_ms), "--events", endpoints[0], "--replay", endpoints[1],
            )  # fmt: skip
            told += ["--engine", f"{name}={endpoints[0]},replay={endpoints[1]}"]
            routed += ["--engine", f"{name}=http://127.0.0.1:{listen}"]
        start(
            options.kvatlas, "up", "--model", MODEL, *told, "--http-listen", f"127.0.0.1:{http}",
            "--admin-listen", "off", "--logging-level", "error",
        )  # fmt: skip
        start(
            sys.executable, str(HERE / "router.py"), "--listen", str(router), "--model", MODEL,
            "--kvatlas", f"http://127.0.0.1:{http}", "--policy", policy,
            "--patience", str(options.patience), *routed,
        )  # fmt: skip
        healths = [f"http://127.0.0.1:{port}/health" for port in (http, *ports[::3])]
        yield f"http://127.0.0.1:{router}", [*healths, f"http://127.0.0.1:{router}/stats"]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def chats(seed: int, count: int) -> list[list[dict[str, str]]]:
    """Chats that share a few system prompts; what users say grows them turn by turn."""
    pick = random.Random(seed)

    def words(length: int) -> str:
        return " ".join(pick.choices(WORDS, k=length))

    systems = [words(60) for _ in range(4)]
    return [
        [{"role": "system", "content": pick.choice(systems)}]
        + [{"role": "user", "content": words(pick.randrange(60, 140))} for _ in range(6)]
        for _ in range(count)
    ]


async def ready(session: aiohttp.ClientSession, *urls: str) -> None:
    """Waits until all of these answer."""
    deadline = time.monotonic() + PATIENCE
    for url in urls:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        break
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} did not answer within {PATIENCE} s")
            await asyncio.sleep(0.02)


async def talk(
    session: aiohttp.ClientSession,
    router: str,
    chat: list[dict[str, str]],
    figures: Figures,
    pick: random.Random,
) -> None:
    """One chat, turn by turn: each prompt has all turns before."""
    for turn in range(2, len(chat) + 1):
        asked = time.perf_counter()
        body: dict[str, Any] = {"model": MODEL, "messages": chat[:turn], "max_tokens": 1}
        async with session.post(f"{router}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            usage = (await answer.json())["usage"]
        # The mock engines give one token, the first.
        figures.waits_ms.append(1000 * (time.perf_counter() - asked))
        figures.prompt_tokens += usage["prompt_tokens"]
        figures.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        await asyncio.sleep(pick.expovariate(1000 / THINK_MS))


async def measure(policy: str, options: argparse.Namespace) -> Figures:
    """All chats under one policy, some side by side."""
    figures = Figures(0, 0, [], 0)
    pick = random.Random(options.seed)
    waiting = iter(chats(options.seed, options.chats))
    with processes(policy, options) as (router, needed):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE)) as session:
            await ready(session, *needed)

            async def user() -> None:
                for chat in waiting:
                    await talk(session, router, chat, figures, pick)

            await asyncio.gather(*(user() for _ in range(options.users)))
            async with session.get(f"{router}/stats") as answer:
                counts = await answer.json()
                figures.unanswered, figures.told = counts.get("unanswered", 0), counts.get("told", 0)
    return figures


def table(found: dict[str, dict[str, float]]) -> str:
    by_turns, by_answers = found["round-robin"], found["kvatlas"]
    rows: list[tuple[str, ...]] = [("", "ROUND ROBIN", "KVATLAS")]
    rows.append(
        (
            "prompt tokens from the cache",
            *(f"{100 * each['hit_rate']:.1f} %" for each in (by_turns, by_answers)),
        )
    )
    for key, what in [
        ("first_token_ms_mean", "time to first token, mean"),
        ("first_token_ms_p50", "time to first token, p50"),
        ("first_token_ms_p99", "time to first token, p99"),
    ]:
        rows.append((what, f"{by_turns[key]:.1f} ms", f"{by_answers[key]:.1f} ms"))
    rows.append(
        ("prompt tokens computed", *(f"{int(each['computed_tokens']):,}" for each in (by_turns, by_answers)))
    )
    saved = 1 - by_answers["first_token_ms_mean"] / by_turns["first_token_ms_mean"]
    lines = [f"  {what:<30}{one:>14}{other:>14}" for what, one, other in rows]
    return "\n".join([*lines, "", f"  Time to first token saved: {100 * saved:.0f} %"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares routing by kvatlas' answers with round robin.")
    parser.add_argument("--kvatlas", required=True, help="the kvatlas binary")
    parser.add_argument("--chats", type=int, default=40, help="chats of six turns")
    parser.add_argument("--users", type=int, default=6, help="chats at the same time")
    parser.add_argument("--blocks", type=int, default=1500, help="blocks in each engine's cache")
    parser.add_argument(
        "--block-ms", type=float, default=0.3, help="milliseconds that an engine needs for a block"
    )
    parser.add_argument(
        "--patience", type=float, default=0.1, help="seconds that the router waits for kvatlas"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print figures for a program")
    options = parser.parse_args()
    found = {}
    for policy in ("round-robin", "kvatlas"):
        found[policy] = asyncio.run(measure(policy, options)).to_json()
    if options.json:
        print(json.dumps(found))
    else:
        print(
            f"{options.chats} chats of six turns, {options.users} at a time, on {len(ENGINES)} mock engines:\n"
        )
        print(table(found))


if __name__ == "__main__":
    main()
