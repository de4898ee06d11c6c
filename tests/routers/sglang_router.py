"""Asks kvatlas as SGLang's router asks its indexer, and compares the answers with what SGLang's caches have.

    python3 tests/routers/sglang_router.py [--seed N] [--short] [--restarts]

The engines are SGLang's own radix caches and publishers (tests/engines). The client is Python's grpcio: it asks by the hashes of a prompt's pages,
as SGLang chains them. A second daemon hears of the same engines by gRPC alone: their events are reported to it, as SGLang's bridge does. With
GRPCURL, the path of grpcurl, the server is asked what it takes, and the same questions are asked by its answer. At the end the daemon and the engines
restart. Wants KVATLAS_ENGINES, KVATLAS_BIN and NATS_SERVER_BIN, and a Python with grpcio and what the engines need. Ends with 1 where an answer was wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import msgspec
import zmq

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from chats import Chats
from judging import Restart, kinds_of, patiently
from processes import Bridge, Broker, Daemon, Host, Prompt, free_ports

ENGINES = 4
PAGE = 16
MODEL = "m"
SALTS = (None, "tenant-a")
METHODS = ("MatchExternalKvPrefix", "MatchExternalKv")
PATIENCE = 30.0

# The pages that each address is told to have.
Told = dict[str, int]


def pages(prompt: Prompt) -> list[int]:
    """The hashes of a prompt's full pages, as SGLang's router has them."""
    tokens, salt, _ = prompt
    before = hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest() if salt else b""
    hashes = []
    for start in range(0, len(tokens) // PAGE * PAGE, PAGE):
        before = hashlib.sha256(before + array("I", tokens[start : start + PAGE]).tobytes()).digest()
        hashes.append(int.from_bytes(before[:8], "big", signed=True))
    return hashes


def question(hashes: list[int]) -> bytes:
    """The message: field 1, packed numbers of eight bytes."""
    packed = struct.pack(f"<{len(hashes)}q", *hashes)
    return b"\x0a" + varint(len(packed)) + packed if hashes else b""


def varint(value: int) -> bytes:
    """A number of the wire."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: their numbers, and what they have."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
        else:
            assert key & 7 == 2, f"wire type {key & 7}"
            length = number()
            yield key >> 3, message[at : at + length]
            at += length


def told(answer: bytes) -> Told:
    """What an answer says of each address."""
    found: Told = {}
    for number, value in fields(answer):
        if number == 1:
            assert isinstance(value, bytes)
            match = dict(fields(value))
            address = match[1]
            assert isinstance(address, bytes)
            found[address.decode()] = int(match[2])
    return found


def field(number: int, value: int | bytes) -> bytes:
    """A field of a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def packed(hashes: list[int]) -> bytes:
    """Hashes as a field has them."""
    return struct.pack(f"<{len(hashes)}q", *hashes)


class Reporter:
    """Reports the events of engines over gRPC, as SGLang's bridge does; the engines have nothing yet."""

    EPOCH = b"e"

    def __init__(self, channel: grpc.Channel, endpoints: list[str], addresses: list[str]) -> None:
        self._channel = channel
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._engines: dict[object, tuple[bytes, bytes]] = {}
        for number, (endpoint, address) in enumerate(zip(endpoints, addresses, strict=True)):
            socket = self._context.socket(zmq.SUB)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.subscribe(b"")
            socket.connect(endpoint)
            self._poller.register(socket, zmq.POLLIN)
            self._engines[socket] = (f"sglang-{number}".encode(), address.encode())
        self._numbered: set[bytes] = set()
        self.batches = 0

    def _call(self, method: str, message: bytes) -> bytes:
        answer = self._channel.unary_unary(f"/kv_indexer.v1.KVIndexer/{method}")(message, timeout=5)
        assert isinstance(answer, bytes)
        return answer

    def begin(self) -> None:
        """Says which workers there will be."""
        workers = b"".join(field(1, field(1, name) + field(2, address)) for name, address in self._engines.values())
        self._call("ConfigureExpectedWorkers", workers)

    def report(self) -> None:
        """Reports what has come."""
        while ready := self._poller.poll(0):
            for socket, _ in ready:
                _, number, payload = socket.recv_multipart()
                self._batch(*self._engines[socket], int.from_bytes(number, "big"), payload)

    def _batch(self, name: bytes, address: bytes, number: int, payload: bytes) -> None:
        if name not in self._numbered:
            # The first batch that matters comes behind an empty snapshot. One before it says that the cache is clear at the start.
            assert number <= 1, f"the first batches of an engine are lost: {number}"
            self._numbered.add(name)
            self._call("ReplaceExternalKvSnapshot", field(1, name) + field(2, address) + field(3, self.EPOCH) + field(4, number))
        actions = b"".join(field(3, action) for event in msgspec.msgpack.decode(payload)[1] for action in self._actions(event))
        head = field(1, name) + field(2, number + 1) + actions + field(4, address) + field(7, self.EPOCH) + field(8, 1)
        applied = dict(fields(self._call("ApplyExternalKvBatch", head)))
        assert applied == {4: number + 1}, applied
        self.batches += 1

    def _actions(self, event: list[object] | dict[str, object]) -> Iterator[bytes]:
        kind = event["type"] if isinstance(event, dict) else event[0]
        if kind == "AllBlocksCleared":
            yield from (field(1, 3) + field(2, tier) for tier in (1, 2, 3))
            return
        hashes = event["block_hashes"] if isinstance(event, dict) else event[1]
        assert isinstance(hashes, list)
        yield field(1, 1 if kind == "BlockStored" else 2) + field(2, 1) + field(3, packed(hashes))


class Fleet:
    """Engines, kvatlas beside them, and a client."""

    def __init__(self, seed: int, folder: Path) -> None:
        publishing, replaying = free_ports(ENGINES), free_ports(ENGINES)
        nats_port, http_port, self.grpc_port, second_http, second_grpc = free_ports(5)
        given = [
            {
                "endpoint": f"tcp://*:{publishing[number]}",
                "replay": f"tcp://*:{replaying[number]}",
                "rank": 0,
                "blocks": 300,
                "block_size": PAGE,
                "buffer_steps": 10_000,
                "hash_fn": "",
            }
            for number in range(ENGINES)
        ]
        self.host = Host("sglang", given, folder / "engines.log")
        self.addresses = [f"http://10.0.0.{number}:30000" for number in range(ENGINES)]
        self.broker = Broker(folder, nats_port)
        settings: dict[str, object] = {"grpc-listen": f"127.0.0.1:{self.grpc_port}"}
        self.daemon = Daemon(folder, nats_port, http_port, settings, ["serve"])
        follow = ["--model", MODEL, "--block-size", str(PAGE)]
        for number, address in enumerate(self.addresses):
            sockets = f"tcp://127.0.0.1:{publishing[number]},replay=tcp://127.0.0.1:{replaying[number]}"
            follow += ["--engine", f"sglang-{number}={sockets},format=sglang,scheme=sglang,address={address}"]
        self.bridge = Bridge(folder, nats_port, follow)
        self.chats = Chats(seed, PAGE, list(SALTS), [None])
        self.random = random.Random(seed)
        more = {"grpc-listen": f"127.0.0.1:{second_grpc}", "grpc-namespace": "reported", "grpc-writing": "open"}
        (folder / "reported").mkdir()
        self.reported = Daemon(folder / "reported", nats_port, second_http, dict(more), ["serve"])
        channels = [grpc.insecure_channel(f"127.0.0.1:{port}") for port in (self.grpc_port, second_grpc)]
        self._asks = [channel.unary_unary(f"/kv_indexer.v1.KVIndexer/{METHODS[0]}") for channel in channels]
        endpoints = [f"tcp://127.0.0.1:{port}" for port in publishing]
        self.reporter = Reporter(channels[1], endpoints, self.addresses)

    def ask(self, prompt: Prompt) -> list[Told]:
        """What the router is told: of what the bridge of kvatlas follows, and of what is reported."""
        return [told(ask(question(pages(prompt)), timeout=5)) for ask in self._asks]

    def ask_patiently(self, prompt: Prompt, expected: Told) -> tuple[list[Told], bool]:
        """The same, where neither may leave somebody out for longer than a moment. Also returns whether one has."""
        return patiently(lambda: self.ask(prompt), lambda both: any(kinds_of(one, expected) == ["blind"] for one in both))

    def ask_first(self, prompt: Prompt) -> Told:
        """What the router is told of what the bridge of kvatlas follows."""
        return told(self._asks[0](question(pages(prompt)), timeout=5))

    def truth(self, prompts: list[Prompt]) -> list[Told]:
        """What the caches have."""
        by_engine = self.host.depths(prompts)
        return [
            {address: engine[place][0] for address, engine in zip(self.addresses, by_engine, strict=True) if engine[place][0]}
            for place in range(len(prompts))
        ]

    def settle(self, prompts: list[Prompt]) -> None:
        """Waits until all that the engines have told is known, and the engines are exact."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self.reporter.report()
            try:
                if [self.ask(prompt) for prompt in prompts] == [[known] * 2 for known in self.truth(prompts)]:
                    return
            except grpc.RpcError as error:
                # Nothing is known of anybody yet.
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
            if time.monotonic() > deadline:
                raise TimeoutError(f"kvatlas does not come to know what the caches have within {PATIENCE} s")
            time.sleep(0.02)

    def grpcurl(self, method: str, data: str = "{}") -> str:
        """What grpcurl says, which knows nothing of the messages but what the server tells it."""
        flags = [] if method == "list" else ["-d", data]
        command = [os.environ["GRPCURL"], "-plaintext", *flags, f"127.0.0.1:{self.grpc_port}", method]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout

    def ask_by_grpcurl(self, prompt: Prompt) -> tuple[Told, Told]:
        """The same by what the server says of itself, and of both methods."""
        data = json.dumps({"hashes": [str(number) for number in pages(prompt)]})
        prefix, tiers = (json.loads(self.grpcurl(f"kv_indexer.v1.KVIndexer/{method}", data)) for method in METHODS)
        by_prefix = {match["worker_address"]: match["matched_prefix_blocks"] for match in prefix.get("matches", [])}
        by_tier: Told = {}
        for match in tiers.get("matches", []):
            (tier,) = match["hashes_by_tier"]
            held = [int(number) for number in tier["hashes"]]
            assert tier["tier"] == "TIER_HBM" and held == pages(prompt)[: len(held)], match
            by_tier[match["address"]] = len(held)
        return by_prefix, by_tier

    def __enter__(self) -> Fleet:
        self.broker.start()
        self.daemon.start()
        self.reported.start()
        self.reporter.begin()
        self.bridge.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bridge.stop()
        self.reported.stop()
        self.daemon.stop()
        self.broker.stop()
        self.host.kill()


def restarts(fleet: Fleet, prompts: list[Prompt]) -> list[bool]:
    """The daemon restarts, and then the engines. Returns how that was."""

    def ask(prompt: Prompt) -> Told | None:
        try:
            return fleet.ask_first(prompt)
        except grpc.RpcError as error:
            # The router goes by load then.
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return None

    held = list(zip(prompts, fleet.truth(prompts), strict=True))
    fleet.daemon.kill()
    fleet.daemon.start()
    outcomes = [Restart("SGLang over gRPC, the daemon").watch(ask, held, kinds_of)]
    fleet.host.kill()
    fleet.host.start()
    fleet.host.serve([(number, prompt) for number, prompt in enumerate(prompts[:ENGINES])])
    return [*outcomes, Restart("SGLang over gRPC, the engines").watch(ask, list(zip(prompts, fleet.truth(prompts), strict=True)), kinds_of)]


def check_grpcurl(fleet: Fleet, prompts: list[Prompt]) -> int:
    """Asks by grpcurl; returns how many answers were wrong."""
    if not os.environ.get("GRPCURL"):
        return 0
    services = fleet.grpcurl("list").split()
    assert "kv_indexer.v1.KVIndexer" in services, services
    assert "SERVING" in fleet.grpcurl("grpc.health.v1.Health/Check")
    wrong = 0
    for known, prompt in zip(fleet.truth(prompts), prompts, strict=True):
        answer = fleet.ask_by_grpcurl(prompt)
        if answer != (known, known):
            wrong += 1
            print(f"wrong by grpcurl: {answer}, where the caches have {known}", file=sys.stderr)
    return wrong


def main() -> int:
    """Plays."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--short", action="store_true", help="400 questions instead of 10,000, and no restarts")
    arguments.add_argument("--restarts", action="store_true", help="restarts in the short form, too")
    given = arguments.parse_args()
    wanted, a_round = (400, 100) if given.short else (10_000, 250)
    asked = wrong = found = in_doubt = 0
    with tempfile.TemporaryDirectory() as folder, Fleet(given.seed, Path(folder)) as fleet:
        while asked < wanted:
            orders = [(fleet.random.randrange(ENGINES), fleet.chats.prompt()) for _ in range(40)]
            fleet.host.serve(orders)
            if fleet.random.randrange(8) == 0:
                fleet.host.reset(fleet.random.randrange(ENGINES))
            served = [prompt for _, prompt in orders]
            fleet.settle(served)
            probes = fleet.chats.probes(a_round)
            for prompt, expected in zip(probes, fleet.truth(probes), strict=True):
                answer, asked_again = fleet.ask_patiently(prompt, expected)
                in_doubt += asked_again
                asked, found = asked + 1, found + len(expected)
                wrong += sum(one != expected for one in answer)
        wrong_of_grpcurl = check_grpcurl(fleet, served[:20])
        batches = fleet.reporter.batches
        outcomes = restarts(fleet, probes) if given.restarts or not given.short else []
    print(f"SGLang's caches, by grpcio: {asked:,} answers about {found:,} workers, and as many of {batches:,} batches that were reported over gRPC, of")
    print(f"which wrong: {wrong}; by grpcurl wrong: {wrong_of_grpcurl}; in doubt at first: {in_doubt}")
    return int(wrong + wrong_of_grpcurl > 0 or not all(outcomes))


sys.exit(main())
