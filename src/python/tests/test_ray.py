"""`kvatlas.ray`: which replicas are chosen, and that nothing that goes wrong fails a request."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_ray
import pytest
from fake_ray import replica, request
from processes import Broker, Daemon
from world import NAMESPACE, World, eventually, options, world

import kvatlas
from kvatlas import Doubted, Profile, Stored, worker_of_instance
from kvatlas._ray.asking import MISSES_MAX
from kvatlas._ray.recent import LASTING, RecentChoices
from kvatlas._ray.registering import Bridge, Registrar
from kvatlas._ray.sources import EventSource

PROMPT = list(range(1, 1 + 10 * 16))
A, B, C = "tcp://10.0.0.1:5557", "tcp://10.0.0.2:5557", "tcp://10.0.0.3:5557"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    fake_ray.install(monkeypatch, has_engine=True)
    yield importlib.import_module("kvatlas.ray")
    sys.modules.pop("kvatlas.ray", None)


def router_of(made: Any, url: str, **more: Any) -> Any:
    made.initialize_state(**({"model": NAMESPACE, "nats_url": url, "patience": 5.0} | more))
    return made


async def closed(router: Any) -> None:
    """Ends what a router has begun; Ray ends the process."""
    for task in (router._asker._connecting, router._registrar and router._registrar._task):
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if router._asker._connection is not None:
        await router._asker._connection.close()


class Fleet:
    """A router, and engines of which it hears by kvatlas."""

    def __init__(self, here: World, router: Any) -> None:
        self.here, self.router = here, router

    async def has(self, worker: str, blocks: int, rank: int = 0, **hashed: str) -> kvatlas.Publisher:
        """An engine caches the beginning of the prompt."""
        publisher = await self.here.publisher(worker, rank)
        await self.store(publisher, worker, blocks, rank, **hashed)
        return publisher

    async def store(
        self, publisher: kvatlas.Publisher, worker: str, blocks: int, rank: int = 0, **hashed: str
    ) -> None:
        hashes = kvatlas.block_hashes(PROMPT, **hashed)[:blocks]
        await publisher.publish(Stored(kvatlas.sequence_hashes(hashes), block_hashes=hashes))
        await self.here.applied(await publisher.flush(), worker, rank)

    async def names(self, pending: Any) -> list[list[str]]:
        groups = await self.router.choose_replicas(self.router.replicas, pending)
        return [[found.replica_id for found in group] for group in groups]

    async def chosen(self, pending: Any, by: str) -> list[list[str]]:
        """The groups; this decided."""
        before = self.router._choices.counts[by]
        groups = await self.names(pending)
        assert self.router._choices.counts[by] == before + 1, self.router._choices.counts
        return groups

    async def connected(self) -> None:
        async def look() -> bool:
            return self.router._asker._connection is not None

        await eventually("the router is connected", look)


@contextlib.asynccontextmanager
async def fleet(url: str, made: Any, replicas: list[Any], **more: Any) -> AsyncIterator[Fleet]:
    """A router that knows these replicas."""
    async with world(url) as here:
        router = router_of(made, url, **more)
        router.update_replicas(replicas)
        found = Fleet(here, router)
        try:
            await found.connected()
            yield found
        finally:
            await closed(router)


def worker(endpoint: str) -> str:
    return worker_of_instance(endpoint.removeprefix("tcp://"))


async def test_those_with_most_of_a_prompt_come_first(ray: ModuleType, broker: Broker, daemon: Daemon) -> None:
    replicas = [replica("a", A), replica("b", B), replica("c", C, dp_rank=1), replica("d")]
    async with fleet(broker.url, ray.KvatlasRequestRouter(), replicas) as found:
        await found.has(worker(A), 3)
        await found.has(worker(B), 7)
        # Another rank than the replica's.
        await found.has(worker(C), 9)
        await found.has(worker(C), 3, rank=1)
        pending = request(PROMPT)
        assert await found.chosen(pending, "cache") == [["b"], ["a", "c"], ["a", "b", "c", "d"]]
        assert pending.routing_context.should_backoff
        assert len(await found.chosen(request(PROMPT[16:]), "nothing")) == 1
        assert len(await found.chosen(request(None), "no_tokens")) == 1
        assert len(await found.chosen(None, "no_tokens")) == 1
        # No more than those that Ray would ask have a part in it.
        assert [len(group) for group in await found.names(request(None))] == [2]


async def test_salts_and_adapters_are_part_of_a_prompt(ray: ModuleType, broker: Broker, daemon: Daemon) -> None:
    replicas = [replica("a", A), replica("b", B), replica("c", C)]
    async with fleet(broker.url, ray.KvatlasRequestRouter(), replicas) as found:
        await found.has(worker(A), 3, cache_salt="red")
        await found.has(worker(B), 3, lora_name="base:sql")
        await found.has(worker(C), 2)
        salted = request(PROMPT, request_cache_salt="red")
        assert (await found.chosen(salted, "cache"))[0] == ["a"]
        adapted = request(PROMPT, request_lora_name="base:sql")
        assert (await found.chosen(adapted, "cache"))[0] == ["b"]
        assert (await found.chosen(request(PROMPT), "cache"))[0] == ["c"]

        # What Ray Serve LLM gives to its own class.
        aware = router_of(ray.KvatlasKVAwareRouter(), broker.url)
        assert isinstance(aware, fake_ray.KVAwareRouter)
        aware.update_replicas(replicas)
        over = Fleet(found.here, aware)
        await over.connected()
        payload = type("Payload", (), {"cache_salt": "red"})()
        assert (await over.chosen(request(PROMPT, payload), "cache"))[0] == ["a"]
        assert (await over.chosen(request(PROMPT, model="base:sql"), "cache"))[0] == ["b"]
        assert (await over.chosen(request(PROMPT, object()), "cache"))[0] == ["c"]
        payload.cache_salt = 7
        assert (await over.chosen(request(PROMPT, payload), "cache"))[0] == ["c"]
        await closed(aware)


async def test_an_engine_with_a_name_of_its_own_is_found_by_its_address(
    ray: ModuleType, broker: Broker, daemon: Daemon
) -> None:
    async with fleet(broker.url, ray.KvatlasRequestRouter(), [replica("a", A), replica("b", B)]) as found:
        profile = Profile(address="10.0.0.2:5557")
        publisher = await kvatlas.Publisher.start(found.here.nats, NAMESPACE, "gpu-0", 0, options(profile=profile))
        await found.store(publisher, "gpu-0", 5)
        assert await found.chosen(request(PROMPT), "cache") == [["b"], ["a", "b"]]
        await publisher.aclose()


async def test_doubt_is_ignorance(ray: ModuleType, broker: Broker, daemon: Daemon) -> None:
    async with fleet(broker.url, ray.KvatlasRequestRouter(), [replica("a", A), replica("b", B)]) as found:
        publisher = await found.has(worker(A), 5)
        await found.has(worker(B), 2)
        assert (await found.names(request(PROMPT)))[0] == ["a"]
        await publisher.publish(Doubted(["host_gap"]))
        await found.here.applied(await publisher.flush(), worker(A))
        # What is on the device is certain all the same.
        assert (await found.chosen(request(PROMPT), "cache"))[0] == ["a"]
        await publisher.publish(Doubted(["upstream_gap"]))
        await found.here.applied(await publisher.flush(), worker(A))
        assert (await found.chosen(request(PROMPT), "cache"))[0] == ["b"]


async def test_who_is_much_busier_than_others_is_not_preferred(
    ray: ModuleType, broker: Broker, daemon: Daemon
) -> None:
    replicas = [replica("a", A), replica("b", B), replica("c")]
    async with fleet(broker.url, ray.KvatlasRequestRouter(), replicas, imbalance=4) as found:
        await found.has(worker(A), 5)
        queues = found.router.replica_queue_len_cache.known
        queues |= {"a": 5, "b": 1, "c": 1}
        assert (await found.chosen(request(PROMPT), "cache"))[0] == ["a"]
        queues |= {"b": 0}
        assert len(await found.chosen(request(PROMPT), "busy")) == 1
        await found.has(worker(B), 2)
        assert (await found.chosen(request(PROMPT), "cache"))[0] == ["b"]


async def test_choices_are_load_where_ray_serve_llm_tells_of_no_queues(
    ray: ModuleType, broker: Broker, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "monotonic", lambda: 0.0)
    replicas = [replica("a", A), replica("b", B), replica("c", C)]
    async with fleet(broker.url, ray.KvatlasKVAwareRouter(), replicas, imbalance=3) as found:
        await found.has(worker(A), 5)
        await found.has(worker(B), 5)
        # It takes the first of the first group.
        firsts = [(await found.chosen(request(PROMPT), "cache"))[0][0] for _ in range(6)]
        assert sorted(firsts) == ["a", "a", "a", "b", "b", "b"], firsts
        for name in ("a", "b"):
            found.router._recent.add(name, 0.0)
        # Both have four more than the third.
        await found.chosen(request(PROMPT), "busy")
        found.router.update_replicas(replicas[1:])
        assert found.router._recent.of("a", 0.0) == 0.0


def test_choices_fade() -> None:
    recent = RecentChoices()
    for now in (0.0, 0.0, 5.0):
        recent.add("a", now)
    assert recent.of("a", 5.0) == pytest.approx(1.0 + 2.0 * 2.718281828 ** (-5.0 / LASTING))
    assert recent.of("a", 5.0 + 20 * LASTING) < 0.001
    assert recent.of("b", 5.0) == 0.0


async def test_without_answers_ray_chooses(ray: ModuleType, broker: Broker) -> None:
    replicas = [replica("a", A, models=("x",)), replica("b", B), replica("c", C)]
    router = router_of(ray.KvatlasRequestRouter(), "nats://127.0.0.1:1", nats_options={"connect_timeout": 0.1})
    router.update_replicas(replicas)
    over = Fleet(World.__new__(World), router)
    assert len(await over.chosen(request(PROMPT), "no_answer")) == 1
    # The model of the request decides, as Ray has it.
    assert await over.chosen(request(PROMPT, model="x"), "no_answer") == [["a"]]
    await closed(router)

    router = router_of(ray.KvatlasRequestRouter(), broker.url, patience=0.2)
    router.update_replicas(replicas)
    over = Fleet(World.__new__(World), router)
    await over.connected()
    for _ in range(MISSES_MAX):
        await over.chosen(request(PROMPT), "no_answer")
    # Nobody is asked now, so that nobody waits.
    asked: list[object] = []
    router._asker._client.query = asked.append
    await over.chosen(request(PROMPT), "no_answer")
    assert not asked
    # An error that nobody has thought of.
    router._asker._misses = 0
    await over.chosen(request(PROMPT), "failed")
    with Daemon(broker.url):
        router._asker._client = kvatlas.QueryClient(router._asker._connection, patience=5.0)

        async def is_refused() -> bool:
            await over.names(request(PROMPT))
            return bool(router._choices.counts["refused"])

        # Of this model nothing is known.
        await eventually("the daemon refuses", is_refused)
    await closed(router)


def test_sources_are_read_as_they_are_advertised() -> None:
    def read(**metadata: Any) -> EventSource | None:
        return EventSource.of_stats({"kv_event_metadata": metadata})

    found = read(endpoint=A, block_size=16, dp_rank=2, replay_endpoint="tcp://10.0.0.1:6557", max_num_batched_tokens=8)
    assert found == EventSource(A, 2, "tcp://10.0.0.1:6557", 16, "10_d0_d0_d1_c5557")
    assert read(endpoint=A, dp_rank=None) == EventSource(A, 0, None, None, "10_d0_d0_d1_c5557")
    far = read(endpoint=f"tcp://{'very-' * 12}far:5557")
    assert far is not None and far.worker is None and far.blocks({(far.instance, 0): 3}) == 3
    for stats in ({}, None, {"kv_event_metadata": None}, {"kv_event_metadata": {}}, {"kv_event_metadata": {"endpoint": 5}}):
        assert EventSource.of_stats(stats) is None


class Listener:
    """A bridge's HTTP listener that notes what is posted, and answers with a status."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, dict[str, Any], str | None]] = []
        self.status = 200
        self.answer: Callable[[str, dict[str, Any]], int] = lambda path, body: self.status
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.posts.append((self.path, body, self.headers["authorization"]))
                self.send_response(outer.answer(self.path, body))
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    running = Listener()
    yield running
    running.close()


def source_of(endpoint: str, **metadata: Any) -> EventSource:
    found = EventSource.of_stats(replica("a", endpoint, **metadata).routing_stats)
    assert found is not None
    return found


async def test_engines_are_registered_again_and_again(listener: Listener, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    registrar = Registrar(Bridge(listener.url, "llama", "acme", "vllm", str(tmp_path / "token")))
    registrar._advertised = frozenset([source_of(A, replay_endpoint=f"{A}0")])
    assert await registrar.round()
    named = {"instance_id": "10.0.0.1:5557", "modelname": "llama", "tenant_id": "acme", "dp_rank": 0}
    told = {"endpoint": A, "replay_endpoint": f"{A}0", "block_size": 16, "type": "vllm", "ttl_ms": 120_000}
    assert listener.posts == [("/register", named | told, "Bearer secret")]

    # It is told again, and what is refused is tried again.
    listener.status = 409
    assert not await registrar.round()
    assert listener.posts[1] == listener.posts[0]

    # Whoever registers an engine no more has the bridge forget it.
    listener.status = 200
    registrar._advertised = frozenset([source_of(B)])
    assert await registrar.round()
    assert [(path, body["endpoint"]) for path, body, _ in listener.posts[2:]] == [("/register", B)]


async def test_an_answer_that_is_no_http_is_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([b'INFO {"server_id": "N"}\r\n', b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"])

    async def answer(request: asyncio.StreamReader, reply: asyncio.StreamWriter) -> None:
        # The body is one map.
        await request.readuntil(b"}")
        reply.write(next(answers))
        await reply.drain()
        reply.close()

    source = EventSource.of_stats(replica("a", A).routing_stats)
    assert source is not None
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        registrar = Registrar(Bridge(url, "llama", "acme", "vllm", None))
        registrar._advertised = frozenset([source])
        # The port is that of a NATS server, for one.
        assert not await registrar.round()
        assert "INFO" in caplog.text
        assert await registrar.round()
    wrong = Registrar(Bridge("http://bridge:http", "llama", "acme", "vllm", None))
    wrong._advertised = frozenset([source])
    assert not await wrong.round()


async def test_a_router_registers_what_replicas_advertise(
    ray: ModuleType, broker: Broker, listener: Listener
) -> None:
    router = router_of(ray.KvatlasRequestRouter(), broker.url, register_url=listener.url, register_type="sglang")
    router.update_replicas([replica("a"), replica("b", B)])

    async def posted() -> bool:
        return bool(listener.posts) and router._asker._connection is not None

    await eventually("the engine is registered", posted)
    [(path, body, token), *_] = listener.posts
    assert (path, body["endpoint"], body["type"], token) == ("/register", B, "sglang", None)
    await closed(router)


def test_who_lacks_something_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ray.install(monkeypatch, has_engine=False)
    module = importlib.import_module("kvatlas.ray")
    with pytest.raises(ImportError, match="needs Ray Serve LLM and an engine"):
        _ = module.KvatlasKVAwareRouter
    with pytest.raises(AttributeError, match="no attribute 'Another'"):
        _ = module.Another
    fake_ray.install(monkeypatch, has_engine=True)
    module = importlib.import_module("kvatlas.ray")
    assert module.KvatlasKVAwareRouter is module.KvatlasKVAwareRouter

    monkeypatch.setitem(sys.modules, "ray.serve.request_router", None)
    sys.modules.pop("kvatlas.ray")
    with pytest.raises(ImportError, match=r"needs Ray Serve: pip install 'ray\[serve\]>=2.60'"):
        importlib.import_module("kvatlas.ray")
