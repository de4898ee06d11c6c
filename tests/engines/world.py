"""Engines, the bridge, the broker and the daemon; and the comparison of every answer with what the caches have."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

from chats import Chats
from processes import Bridge, Broker, Daemon, Depths, Host, Process, Prompt, free_ports, kvatlas, wait_until
from proxy import Loop, Proxy
from servers import SERVICERS, FrontEnd, Servicer, server_before

MODEL = "meta-llama/Llama-3.1-8B-Instruct"

# Time in which an answer may be behind an engine that works undisturbed, in seconds.
BEHIND = 2.0

# Notes of a scenario that are printed.
NOTES_MAX = 4


@dataclass
class Counts:
    """What came of comparing answers, a holder and a prompt each."""

    answers: int = 0
    exact: int = 0
    wrong: int = 0
    wrong_exact: int = 0
    # Requests to which an exact answer promised something, and those of them that did not find just that.
    promises: int = 0
    broken: int = 0
    # The longest that holders took to be exact again, and that an answer was called exact and was behind, in seconds.
    seconds: float = 0.0
    behind: float = 0.0
    notes: list[str] = field(default_factory=list)


@dataclass
class Layout:
    """What a world consists of."""

    kinds: tuple[str, ...] = ("vllm",)
    engines: int = 4
    ranks: int = 1
    engines_a_process: int = 1
    blocks: int = 300
    block_size: int = 16
    buffer_steps: int = 10_000
    hash_fn: str = "sha256_cbor"
    salts: tuple[str | None, ...] = (None,)
    adapters: tuple[str | None, ...] = (None,)
    has_proxies: bool = False
    has_replay: bool = True
    # `kvatlas up`: daemon and bridge in one process.
    is_one_process: bool = False
    # The server by which the bridge follows each engine, instead of its sockets; see servers.py.
    server: str | None = None
    # Whether the daemon has an admin listener.
    has_admin: bool = False
    # Whether the bridge has a state directory, and whether a second one follows the same engines.
    keeps_state: bool = False
    has_spare: bool = False
    settings: dict[str, object] = field(default_factory=dict)
    # Of a model with several groups of layers: its name, the retention of vLLM, and how many requests an engine serves at once.
    model: str | None = None
    retention: int | None = 0
    at_once: int = 1
    # Tokens that prompts are made of, where they should be shorter than of whole blocks.
    chat_unit: int | None = None
    # Keys of every engine in the bridge's file, and whether holders can be exact with them.
    keys: tuple[str, ...] = ()
    # The scheme whose hashes the bridge publishes. Every second question is by these hashes then, the others by tokens.
    scheme: str | None = None
    can_be_exact: bool = True


@dataclass
class Holder:
    """One publisher, and where its truth is."""

    worker: str
    rank: int
    host: Host
    place: int


class World:
    """All processes of one scenario."""

    def __init__(self, layout: Layout, seed: int, folder: Path) -> None:
        self.layout, self.counts = layout, Counts()
        # The cache that is asked about, in the words of HTTP.
        self.about = {"namespace": namespace_of(layout.scheme)} if layout.scheme else {"model": MODEL}
        self._asked = 0
        # Holders that have served requests in turn.
        self.served: set[tuple[str, int]] = set()
        self.chats = Chats(seed, layout.chat_unit or layout.block_size, list(layout.salts), list(layout.adapters))
        self.hosts: list[Host] = []
        self.holders: list[Holder] = []
        self.proxies: list[Proxy] = []
        # The server before each engine, in their order, where there are some.
        self.servers: list[FrontEnd | Servicer] = []
        self._loop = Loop() if layout.has_proxies else None
        self._seed = seed
        # Requests that have gone to holders so far.
        self._turn = 0
        # Outcomes that the daemon was told of since it began, and whose promises can't be kept.
        self._told = 0
        self._liars: set[tuple[str, int]] = set()
        self.folder = folder
        folder.mkdir(parents=True)
        tables = self._engines(folder)
        nats_port, port = free_ports(2)
        self.broker = Broker(folder, nats_port)
        # Noticed within seconds, so that a scenario need not wait for long.
        settings: dict[str, object] = {"namespace-defaults-stale-after-ms": 3000, "snapshots-interval-seconds": 2}
        settings |= {"namespace-defaults-block-size": layout.block_size, **layout.settings}
        if layout.has_admin:
            [self.admin_port] = free_ports(1)
            settings["admin-listen"] = f"127.0.0.1:{self.admin_port}"
        file = folder / "engines.toml"
        file.write_text(tables)
        follow = ["--engines-file", str(file), "--model", MODEL, "--block-size", str(layout.block_size)]
        self.bridge: Process
        self.spare = Bridge(folder, nats_port, [*follow, "--lease", "pair"]) if layout.has_spare else None
        follow += ["--lease", "pair"] if layout.has_spare else []
        follow += ["--state", str(folder / "state")] if layout.keeps_state else []
        if layout.is_one_process:
            self.bridge = self.daemon = Daemon(folder, nats_port, port, settings, ["up", *follow])
        else:
            self.daemon = Daemon(folder, nats_port, port, settings, ["serve"])
            self.bridge = Bridge(folder, nats_port, follow)

    def _engines(self, folder: Path) -> str:
        """Starts the engines. Returns the bridge's file of them."""
        layout, tables = self.layout, []
        for number in range(0, layout.engines, layout.engines_a_process):
            kind = layout.kinds[(number // layout.engines_a_process) % len(layout.kinds)]
            # Worker names spell an underscore in another way.
            name = kind.replace("_", "-")
            engines: list[dict[str, Any]] = []
            begun: list[Holder] = []
            for engine in range(number, min(number + layout.engines_a_process, layout.engines)):
                publishing, replaying = free_ports(layout.ranks), free_ports(layout.ranks)
                for rank in range(layout.ranks):
                    given = {
                        "endpoint": f"tcp://*:{publishing[0]}",
                        "replay": f"tcp://*:{replaying[0]}" if layout.has_replay else None,
                        "rank": rank,
                        "blocks": layout.blocks,
                        "block_size": layout.block_size,
                        "buffer_steps": layout.buffer_steps,
                        "hash_fn": layout.hash_fn,
                    }
                    if layout.model:
                        given |= {"model": layout.model, "retention": layout.retention, "at_once": layout.at_once}
                    engines.append(given)
                tables.append(self._table(f"{name}-{engine}", kind, publishing, replaying, engines[-1]))
                begun += [Holder(f"{name}-{engine}", rank, None, 0) for rank in range(layout.ranks)]  # type: ignore[arg-type]
            host = Host(kind, engines, folder / f"engines-{number}.log")
            for place, holder in enumerate(begun):
                holder.host, holder.place = host, place
            self.hosts.append(host)
            self.holders += begun
        return "".join(tables)

    def _table(self, name: str, kind: str, publishing: list[int], replaying: list[int], engine: dict[str, Any]) -> str:
        if self._loop:
            publishing = [self._proxy(port, True) for port in publishing]
            replaying = [self._proxy(port, False) for port in replaying]
            assert len(publishing) == 1, "a proxy's ports are not one behind the other"
        form = kind.split("_")[0]
        lines = ["[[engine]]", f'name = "{name}"', f'format = "{form}"', f"block_size = {self.layout.block_size}", *self.layout.keys]
        if self.layout.server:
            replaying = replaying if self.layout.has_replay else []
            server = server_before(self.layout.server, self.folder, MODEL, engine, publishing, replaying)
            self.servers.append(server)
            return "\n".join([*lines, f'endpoint = "{server.endpoint}"']) + "\n"
        lines += [f'endpoint = "tcp://127.0.0.1:{publishing[0]}"', f"ranks = {self.layout.ranks}"]
        if self.layout.has_replay:
            lines.append(f'replay = "tcp://127.0.0.1:{replaying[0]}"')
        return "\n".join(lines) + "\n"

    def _proxy(self, target: int, loses_messages: bool) -> int:
        assert self._loop
        [port] = free_ports(1)
        self._seed += 1
        self.proxies.append(Proxy(self._loop, port, target, self._seed, loses_messages))
        return port

    def __enter__(self) -> Self:
        try:
            self.broker.start()
            for server in self.servers:
                server.start()
            if not self.layout.is_one_process:
                self.bridge.start()
            if self.spare:
                self.spare.start()
            self.daemon.start()
            # Of a servicer, the first batch tells whether it has been heard from the start.
            is_known_idle = self.layout.has_replay and self.layout.server not in SERVICERS
            if is_known_idle and self.layout.can_be_exact:
                self.all_exact()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in {self.bridge, self.spare, self.daemon, self.broker, *self.servers}:
            if process:
                process.kill()
        for host in self.hosts:
            host.kill()

    def serve(self, requests: int, but: Host | None = None) -> None:
        """Serves so many requests, by the engines that live, `but` one process."""
        orders: dict[int, list[tuple[int, Prompt]]] = {}
        hosts = {id(host): host for host in self.hosts}
        for _ in range(requests):
            prompt = self.chats.prompt()
            holder = self._holder_for(prompt, but)
            orders.setdefault(id(holder.host), []).append((holder.place, prompt))
        for host, order in orders.items():
            self._serve_by(hosts[host], order)

    def _holder_for(self, prompt: Prompt, but: Host | None = None) -> Holder:
        """Whom the next request goes to: most turns of a conversation go where the ones before went."""
        self._turn += 1
        spread = [holder for holder in self.holders if holder.host.lives and holder.host is not but]
        key = hash(tuple(prompt[0][:64])) if self._turn % 3 else self._turn * 7919
        holder = spread[key % len(spread)]
        self.served.add((holder.worker, holder.rank))
        return holder

    def _serve_by(self, host: Host, order: list[tuple[int, Prompt]]) -> list[int | None]:
        served = host.serve(order)
        for (_, prompt), (_, answer) in zip(order, served, strict=True):
            self.chats.answered(prompt, answer)
        return [taken for taken, _ in served]

    def serve_as_promised(self, requests: int, behind: float = BEHIND) -> None:
        """Serves requests one by one: where an exact answer says before what one will reuse, the engine has to take just that.

        An answer that is called exact may be `behind` for so long; until then it is asked again.
        """
        for _ in range(requests):
            prompt = self.chats.prompt()
            holder = self._holder_for(prompt)
            place = (holder.worker, holder.rank)
            promised = self._promise(prompt, place, 0.0 if place in self._liars else behind)
            [taken] = self._serve_by(holder.host, [(holder.place, prompt)])
            self.counts.answers += 1
            if promised is None or taken is None:
                continue
            self.counts.exact += 1
            self.counts.promises += 1
            self.counts.broken += taken != promised
            if taken != promised and place not in self._liars:
                self.counts.wrong_exact += 1
                self.counts.notes.append(f"{place} was promised {promised} and took {taken}")
            self._tell(place, promised, taken)

    def _promise(self, prompt: Prompt, place: tuple[str, int], behind: float) -> int | None:
        """How many blocks an exact answer says that a request will reuse; none where the answer is not exact."""
        begun, truth = time.monotonic(), self._truth([prompt])
        # Until the events of the request before have arrived.
        while True:
            found, exact = self._answers(prompt)
            promised = found.get(place, (0, 0))[1] if place in exact else None
            if promised is None or promised == truth[place][0][1] or time.monotonic() > begun + behind:
                return promised
            self.counts.behind = max(self.counts.behind, time.monotonic() - begun)
            time.sleep(0.005)

    def _tell(self, place: tuple[str, int], promised: int, taken: int) -> None:
        """Tells the daemon what a request found of what an exact answer promised, as a router does."""
        outcome = {"worker": place[0], "rank": place[1], "promised_blocks": promised, "exact": True}
        outcome["found_tokens"] = taken * self.layout.block_size
        answer = self.daemon.ask("/v1/outcomes", {**self.about, "outcomes": [outcome]})
        assert answer == {"counted": 1}, answer
        self._told += 1

    def promises_are_kept(self) -> None:
        """Asserts that the daemon has counted all that it was told since it began, and that it calls a promise broken only where one is."""
        names = ("outcomes", "outcome_missing_blocks", "outcome_unpromised_blocks")
        counted = {name: self.daemon.metric(name, 'state="exact"') for name in names}
        assert counted["outcomes"] == self._told, (counted, self._told)
        differing = counted["outcome_missing_blocks"] + counted["outcome_unpromised_blocks"]
        assert (differing > 0) <= (self.counts.broken > 0), (counted, self.counts)

    def daemon_ends(self, is_killed: bool) -> None:
        """The daemon is killed or stopped: what it was told so far is looked at before, and the next one begins to count anew."""
        self.promises_are_kept()
        self._told = 0
        if is_killed:
            self.daemon.kill()
        else:
            self.daemon.stop()

    def serve_behind(self, prompts: list[Prompt], only: Holder | None = None) -> None:
        """Serves a longer request behind each of the prompts, by each engine or by one."""
        for prompt in prompts:
            for holder in [only] if only else self.holders:
                self._serve_by(holder.host, [(holder.place, self.chats.longer(prompt))])

    def differences(self, prompts: list[Prompt], only: Holder | None = None) -> tuple[int, int]:
        """How many blocks of the prompts caches have that are not known, and how many are told that they don't have; of all holders or of one."""
        lacking, invented, truth = 0, 0, self._truth(prompts)
        for number, prompt in enumerate(prompts):
            found, _ = self._answers(prompt)
            for holder, depths in truth.items():
                if only and holder != (only.worker, only.rank):
                    continue
                (held, _), (told, _) = depths[number], found.get(holder, (0, 0))
                lacking += max(0, held - told)
                invented += max(0, told - held)
        return lacking, invented

    def proofread(self) -> None:
        """From now on, each stored event is compared with the cache that tells it."""
        for host in self.hosts:
            host.proofread()

    def ancestors_are_proven(self) -> None:
        """Asserts that each stored event of full attention proved that all blocks before it were on the device."""
        counts = [engine for host in self.hosts for engine in host.proofs()]
        (seen, failed), (others, others_failed) = ([sum(column) for column in zip(*group, strict=True)] for group in zip(*counts, strict=True))
        self.counts.notes.append(f"{seen} events proved what is before them, {others - others_failed} of {others} of windows and states")
        assert failed == 0, f"{failed} of {seen} events of full attention proved nothing"

    def reset(self, number: int) -> None:
        """Clears the cache of a holder."""
        holder = self.holders[number % len(self.holders)]
        holder.host.reset(holder.place)

    def hide_removals(self, holder: Holder) -> None:
        """From now on, a holder's engine drops blocks and tells nobody. What it is said to have may be wrong, and nobody can know."""
        self._liars.add((holder.worker, holder.rank))
        holder.host.hide_removals(holder.place)

    def status(self) -> dict[tuple[str, int], bool]:
        """Which holders are exact."""
        answer = self.daemon.ask(f"/v1/status?{urlencode(self.about)}")
        listed = answer["holders"] if answer else []
        return {(holder["worker"], holder.get("rank", 0)): holder["exact"] for holder in listed}

    def epochs(self) -> dict[tuple[str, int], int]:
        """In which epoch of its publisher each holder is."""
        answer = self.daemon.ask(f"/v1/status?{urlencode(self.about)}")
        return {(holder["worker"], holder.get("rank", 0)): holder["epoch"] for holder in answer["holders"]}

    def are_exact(self) -> bool:
        """Whether all holders are called exact."""
        status = self.status()
        return all(status.get((holder.worker, holder.rank)) for holder in self.holders)

    def all_exact(self, patience: float = 30.0) -> None:
        """Waits until all holders are exact."""
        begun = time.monotonic()
        wait_until("all holders are exact", self.are_exact, patience)
        self.counts.seconds = max(self.counts.seconds, time.monotonic() - begun)

    def settles(self, count: int, patience: float = 30.0) -> None:
        """Waits until all holders are exact, and so many answers are, too: right without a doubt."""
        deadline = time.monotonic() + patience
        self.all_exact(patience)
        while self.compare(count) > 0:
            # A busy machine may make a holder doubtful again for a moment.
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {patience} s: all answers are exact")
            self.all_exact(patience)

    def none_exact(self, host: Host, patience: float) -> None:
        """Waits until none of a process's holders is called exact."""
        mine = {(holder.worker, holder.rank) for holder in self.holders if holder.host is host}
        wait_until("the holders are in doubt", lambda: not any(self.status().get(holder) for holder in mine), patience)

    def compare(self, count: int, behind: float = BEHIND) -> int:
        """Compares the answers to so many prompts with the caches, which nobody changes meanwhile; returns how many were not exact.

        An answer that is called exact has to be right once the engine has not changed for `behind` seconds; until then it may be wrong,
        and is asked again.
        """
        probes = self.chats.probes(count)
        truth = self._truth(probes)
        doubted = 0
        for number, probe in enumerate(probes):
            begun = time.monotonic()
            while True:
                wrong, exact = self._ask(probe, {holder: depths[number] for holder, depths in truth.items()})
                changed_at = max(holder.host.changed_at for holder in self.holders)
                false = wrong & exact
                if false:
                    self.counts.behind = max(self.counts.behind, time.monotonic() - max(changed_at, begun))
                if not false or time.monotonic() > changed_at + behind:
                    break
                time.sleep(0.005)
            self.counts.answers += len(self.holders)
            self.counts.exact += len(exact)
            self.counts.wrong += len(wrong)
            self.counts.wrong_exact += len(false)
            doubted += len(self.holders) - len(exact)
            if false:
                self.counts.notes.append(f"{sorted(false)} of a prompt of {len(probe[0])} tokens")
        return doubted

    def _truth(self, probes: list[Prompt]) -> dict[tuple[str, int], list[Depths]]:
        truth: dict[tuple[str, int], list[Depths]] = {}
        for host in self.hosts:
            depths = host.depths(probes)
            for holder in self.holders:
                if holder.host is host:
                    truth[holder.worker, holder.rank] = depths[holder.place]
        return truth

    def _ask(
        self, probe: Prompt, truth: dict[tuple[str, int], Depths]
    ) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
        """Which holders' depths are wrong, and which are called exact."""
        found, exact = self._answers(probe)
        return {holder for holder, depths in truth.items() if depths != found.get(holder, (0, 0))}, exact

    def _answers(self, probe: Prompt) -> tuple[dict[tuple[str, int], Depths], set[tuple[str, int]]]:
        """The depths of holders, and which are called exact. Who is not in the answer has nothing, as exactly as its status."""
        tokens, salt, adapter = probe
        query: dict[str, object] = dict(self.about)
        self._asked += 1
        if self.layout.scheme and self._asked % 2:
            query |= {"sequence_hashes": vllm_hashes(tokens, salt, self.layout.block_size), "token_count": len(tokens)}
        else:
            query["tokens"] = tokens
            query |= {"cache_salt": salt} if salt else {}
            query |= {"lora_name": adapter} if adapter else {}
        before = self.status()
        answer = self.daemon.ask("/v1/query", query)
        after = self.status()
        found = {(one["worker"], one.get("rank", 0)): one for one in answer["holders"]} if answer else {}
        depths = {holder: (one["matched_blocks"], one["usable_blocks"]) for holder, one in found.items()}
        known = {(holder.worker, holder.rank) for holder in self.holders}
        unlisted = {holder for holder in known - set(found) if before.get(holder) and after.get(holder)}
        return depths, unlisted | {holder for holder, one in found.items() if one["exact"]}


def namespace_of(scheme: str) -> str:
    """The namespace of the model's blocks under the hashes of a scheme."""
    return MODEL.replace("/", "__").replace(".", "_d") + f"_s{scheme}"


def vllm_hashes(tokens: list[int], salt: str | None, block_size: int) -> list[str]:
    """The hashes of a prompt's blocks, as vLLM names them with sha256_cbor and without a PYTHONHASHSEED."""
    import cbor2

    def digest(value: object) -> bytes:
        return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()

    before, hashes = digest("vllm-none-hash"), []
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        extra = (("cache_salt", salt),) if salt and not start else None
        before = digest((before, tuple(tokens[start : start + block_size]), extra))
        hashes.append(f"0x{before[-8:].hex()}")
    return hashes


def summary(name: str, counts: Counts, lost: Counter[str]) -> str:
    """One line of a table."""
    share = 100 * counts.exact / max(1, counts.answers)
    notes = "; ".join([*(f"{count} {what}" for what, count in lost.items()), *counts.notes[:NOTES_MAX]])
    right = f"{counts.answers:,} | {share:.1f} % | {counts.wrong} | {counts.wrong_exact} | {counts.promises:,} | {counts.broken}"
    return f"| {name} | {right} | {counts.behind:.2f} s | {counts.seconds:.1f} s | {notes} |"


__all__ = ["BEHIND", "MODEL", "Counts", "Layout", "World", "kvatlas", "summary"]
