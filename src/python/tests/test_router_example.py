"""`deploy/router-example`: the mock engine tells the truth in vLLM's words, and routing by answers beats round robin."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import aiohttp
import msgpack
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from processes import REPOSITORY, kvatlas

SOURCE = REPOSITORY / "deploy/router-example"
FIXTURE = REPOSITORY.parent / "shared/fixtures/engines/vllm_map_stored_root.msgpack"


def imported(name: str) -> Iterator[ModuleType]:
    """A module of the example, whose folder is searched as long as it is in use."""
    sys.path.insert(0, str(SOURCE))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(SOURCE))


@pytest.fixture(scope="module")
def engine() -> Iterator[ModuleType]:
    yield from imported("engine")


@pytest.fixture(scope="module")
def policy() -> Iterator[ModuleType]:
    yield from imported("policy")


@pytest.fixture(scope="module")
def router() -> Iterator[ModuleType]:
    yield from imported("router")


def fields(event: dict[str, Any]) -> dict[str, str]:
    return {key: type(value).__name__ for key, value in event.items()}


def test_the_mock_engine_speaks_like_vllm(engine: ModuleType) -> None:
    if not FIXTURE.exists():
        assert "CI" not in os.environ, f"{FIXTURE} is missing"
        pytest.skip(f"NOT COMPARED with vLLM's payloads: {FIXTURE} is missing")
    [_, [genuine], _] = msgpack.unpackb(FIXTURE.read_bytes())
    _, [mock] = engine.PrefixCache(100).admit(list(range(64)))
    assert fields(msgpack.unpackb(msgpack.packb(mock))) == fields(genuine)
    assert mock["medium"] == genuine["medium"]
    assert mock["kv_cache_spec_kind"] == genuine["kv_cache_spec_kind"]


@pytest.mark.parametrize("seed", range(5))
def test_the_mock_engine_tells_what_it_has(engine: ModuleType, seed: int) -> None:
    pick = random.Random(seed)
    cache = engine.PrefixCache(60)
    # What a listener knows: names, their parents and tokens.
    known: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    base = [pick.randrange(256) for _ in range(600)]
    for _ in range(300):
        shared = pick.randrange(600)
        prompt = base[:shared] + [pick.randrange(256) for _ in range(pick.randrange(200))]
        expected = 0
        parent: int | None = None
        children = {(above, tokens): name for name, (above, tokens) in known.items()}
        while (block := tuple(prompt[16 * expected : 16 * expected + 16])) and (parent, block) in children:
            parent, expected = children[parent, block], expected + 1
        hits, events = cache.admit(prompt)
        assert hits == expected
        for event in events:
            if event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    assert all(above != name for above, _ in known.values()), "children go first"
                    del known[name]
                continue
            parent = event["parent_block_hash"]
            assert parent is None or parent in known
            for number, name in enumerate(event["block_hashes"]):
                known[name] = (parent, tuple(event["token_ids"][16 * number : 16 * number + 16]))
                parent = name
        assert set(known) == set(cache._parents)


def test_equals_have_one_home_and_load_and_knowledge_go_before_it(policy: ModuleType) -> None:
    engines = [f"gpu-{number}" for number in range(4)]
    homes = {}
    for chat in range(200):
        tokens = [chat] * 1600
        home, to_compute = policy.choose(engines, tokens, 100, {}, {})
        homes[chat] = home
        assert to_compute == 100
        # Other routers, which list the engines otherwise, and later turns choose the same.
        assert policy.choose(engines[::-1], [*tokens, 7], 100, {}, {})[0] == home
        other = engines[(engines.index(home) + 1) % 4]
        # What is known goes before the home; of about equals the home wins.
        assert policy.choose(engines, tokens, 100, {other: 40}, {}) == (other, 60)
        assert policy.choose(engines, tokens, 100, {other: 40, home: 35}, {}) == (home, 65)
        # Without knowledge the home may have one prompt more than others to do, and not more.
        assert policy.choose(engines, tokens, 100, {}, {home: 100})[0] == home
        assert policy.choose(engines, tokens, 100, {}, {home: 101})[0] != home
        # An engine that is gone moves its own prompts alone.
        kept = [engine for engine in engines if engine != other]
        assert policy.choose(kept, tokens, 100, {}, {})[0] == home
    counts = [list(homes.values()).count(engine) for engine in engines]
    assert all(25 <= count <= 75 for count in counts), counts


def choices(policy: ModuleType) -> list[dict[str, Any]]:
    """What the policy chooses in some hundred cases, which the examples in Rust and Go must choose, too."""
    pick, cases = random.Random(1), []
    for _ in range(200):
        engines = [f"gpu-{number}" for number in range(pick.randint(1, 6))]
        blocks = pick.choice([0, 1, 7, 10, 30, 64, 100])
        some = [engine for engine in engines if pick.random() < 0.5]
        usable = {engine: pick.randint(0, blocks) for engine in some if pick.random() < 0.7}
        under_way = {engine: pick.randint(0, 2 * blocks) for engine in engines if pick.random() < 0.3}
        first, count = pick.randint(0, 1 << 17), 16 * blocks + pick.randint(0, 15)
        chosen, to_compute = policy.choose(engines, range(first, first + count), blocks, usable, under_way)
        case = {"engines": engines, "first_token": first, "tokens": count, "blocks": blocks, "usable": usable, "under_way": under_way}
        cases.append(case | {"chosen": chosen, "to_compute": to_compute})
    return cases


def test_the_policy_chooses_what_the_examples_in_other_languages_do(policy: ModuleType) -> None:
    kept, cases = SOURCE / "choices.json", choices(policy)
    if "KVATLAS_TEST_REWRITE_VECTORS" in os.environ:
        kept.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
    assert json.loads(kept.read_text()) == cases


async def test_work_is_counted_in_blocks_of_the_namespace(router: ModuleType) -> None:
    holder = {"worker": "warm", "rank": 0, "matched_blocks": 90, "usable_blocks": 90, "exact": True}

    async def answer(_request: web.Request) -> web.Response:
        return web.json_response({"query_blocks": 100, "block_size": 64, "holders": [holder]})

    kvatlas_page = web.Application()
    kvatlas_page.router.add_post("/v1/query", answer)
    async with TestServer(kvatlas_page) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("/"))
        options = argparse.Namespace(
            engine=["warm=http://h:1"], kvatlas=url, model="m", policy="kvatlas", no_outcomes=True, hints=False, patience=30
        )
        made = router.Router(options)
        made._http = session
        assert await made.choose(list(range(6400))) == ("warm", 10, holder)
        await server.close()
        # What the last answer told counts where nobody answers.
        assert await made.choose(list(range(6400))) == ("warm", 100, None)
        assert made.counts == {"answered": 1, "unanswered": 1}


def test_a_short_conversation_keeps_its_home_over_most_turns(policy: ModuleType) -> None:
    engines = [f"gpu-{number}" for number in range(16)]
    tokens = list(range(2000))
    homes = [policy.choose(engines, tokens[:length], length // 16, {}, {})[0] for length in range(100, 2000, 50)]
    changes = sum(one != other for one, other in itertools.pairwise(homes))
    assert changes <= 4, homes
    assert len(set(homes[20:])) == 1, homes


def test_routing_by_answers_beats_round_robin() -> None:
    """The one command, with fewer chats. What it saves in time depends on the machine; what is cached does not."""
    done = subprocess.run(
        [
            sys.executable,
            str(SOURCE / "compare.py"),
            "--kvatlas",
            kvatlas(),
            "--json",
            "--chats",
            "18",
            "--block-ms",
            "0.1",
            "--patience",
            "20",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kvatlas"]["unanswered"] == 0, done.stderr
    # All but the first requests of chats went where an answer promised something.
    assert found["kvatlas"]["told"] > 0 and found["round-robin"]["told"] == 0
    assert found["kvatlas"]["hit_rate"] > found["round-robin"]["hit_rate"] + 0.03
    assert found["kvatlas"]["computed_tokens"] < found["round-robin"]["computed_tokens"]


@pytest.mark.parametrize("is_silent", [False, True])
async def test_the_router_answers_without_kvatlas(is_silent: bool) -> None:
    """Nobody listens where it asks, or somebody who says nothing: it goes by what is under way."""
    sys.path.insert(0, str(SOURCE))
    try:
        compare, aiohttp = importlib.import_module("compare"), importlib.import_module("aiohttp")
    finally:
        sys.path.remove(str(SOURCE))
    engine_port, events, replay, router_port, nobody = compare.free_ports(5)
    # The system takes connections for it, and nobody reads them.
    listener = socket.create_server(("127.0.0.1", nobody)) if is_silent else None
    commands = [
        f"engine.py --listen {engine_port} --events tcp://127.0.0.1:{events} --replay tcp://127.0.0.1:{replay}",
        f"router.py --listen {router_port} --model m --kvatlas http://127.0.0.1:{nobody} "
        f"--engine gpu-0=http://127.0.0.1:{engine_port}",
    ]
    processes = [
        subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, *command.split()], cwd=SOURCE, stdout=subprocess.DEVNULL
        )
        for command in commands
    ]
    try:
        async with aiohttp.ClientSession() as session:
            router = f"http://127.0.0.1:{router_port}"
            await compare.ready(session, f"http://127.0.0.1:{engine_port}/health", f"{router}/stats")
            body = {"prompt": "x" * 100}
            for cached in (0, 96):
                async with session.post(f"{router}/v1/completions", json=body) as answer:
                    assert answer.status == 200
                    assert answer.headers["x-routed-to"] == "gpu-0"
                    usage = (await answer.json())["usage"]
                    assert usage["prompt_tokens_details"]["cached_tokens"] == cached
            async with session.post(f"{router}/v1/completions", data=b"garbage") as answer:
                assert answer.status == 400
            async with session.get(f"{router}/stats") as answer:
                assert await answer.json() == {"unanswered": 2}
            processes[0].kill()
            await asyncio.to_thread(processes[0].wait, 10)
            async with session.post(f"{router}/v1/completions", json=body) as answer:
                assert answer.status == 502
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
        if listener is not None:
            listener.close()


async def test_the_router_passes_on_as_many_requests_as_come() -> None:
    """The engine answers the first request when it has the last."""
    sys.path.insert(0, str(SOURCE))
    try:
        compare, aiohttp = importlib.import_module("compare"), importlib.import_module("aiohttp")
    finally:
        sys.path.remove(str(SOURCE))
    web = importlib.import_module("aiohttp.web")
    count, arrived, all_are_there = 150, 0, asyncio.Event()

    async def complete(_request: Any) -> Any:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            all_are_there.set()
        await all_are_there.wait()
        return web.json_response({})

    engine = web.Application()
    engine.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(engine)
    await runner.setup()
    engine_port, router_port = compare.free_ports(2)
    await web.TCPSite(runner, "127.0.0.1", engine_port).start()
    command = f"router.py --listen {router_port} --model m --policy round-robin --engine gpu-0=http://127.0.0.1:{engine_port}"
    router = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, *command.split()], cwd=SOURCE, stdout=subprocess.DEVNULL
    )
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            url = f"http://127.0.0.1:{router_port}"
            await compare.ready(session, f"{url}/stats")

            async def ask(number: int) -> int:
                async with session.post(f"{url}/v1/completions", json={"prompt": f"prompt {number}"}) as answer:
                    if answer.status != 200:
                        all_are_there.set()
                    return int(answer.status)

            assert await asyncio.gather(*map(ask, range(count))) == [200] * count
    finally:
        router.kill()
        router.wait(10)
        await runner.cleanup()
