"""What may happen to engines and to kvatlas. Each scenario serves conversations, breaks something, and compares every answer.

A scenario fails where an answer that is called exact is wrong, or where holders do not become exact again in time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fronted import fronted, holed, relayed
from lies import lied
from processes import Prompt, wait_until
from servers import FRONT_ENDS, SERVICERS
from world import Layout, World

Play = Callable[[World, random.Random, int], None]


@dataclass
class Scenario:
    """A scenario, and in which worlds it is played."""

    name: str
    play: Play
    layout: Layout = field(default_factory=Layout)
    # How often its fault happens, in the long form.
    rounds: int = 3


# Answers that are called exact may be behind engines for so long where the bridge that spoke is gone and another one follows, in seconds.
SEVERED = 3.0
JETSTREAM: dict[str, object] = {"events-transport": "jetstream", "events-stream-max-bytes": "256 MiB"}
BOTH = ("vllm", "sglang")


def quiet(world: World, seeded: random.Random, rounds: int) -> None:
    """Chats, evictions and resets."""
    for number in range(10 * rounds):
        world.serve(20)
        if number % 4 == 3:
            world.reset(seeded.randrange(100))
        if number % 2:
            world.serve(3)
        world.compare(10)
        world.serve_as_promised(5)
    world.settles(10)
    world.promises_are_kept()


def daemon_restarts(world: World, seeded: random.Random, rounds: int) -> None:
    """The daemon ends or is killed, engines go on meanwhile or not; its first answers count."""
    for number in range(rounds):
        world.serve(100)
        world.compare(10)
        if number % 2:
            # Longer than between two snapshots.
            time.sleep(2.5)
            world.serve(10)
            world.compare(5)
        world.serve_as_promised(5)
        world.daemon_ends(is_killed=seeded.random() >= 0.5)
        if seeded.random() < 0.5:
            world.serve(30)
        world.daemon.start()
        # Exact when ready: no grace.
        world.compare(40, behind=0)
        world.serve_as_promised(5)
        world.settles(20)
    world.promises_are_kept()


def bridge_restarts(world: World, seeded: random.Random, rounds: int) -> None:
    """The bridge ends or is killed; engines go on."""
    for _ in range(rounds):
        world.serve(60)
        world.compare(10)
        if seeded.random() < 0.5:
            world.bridge.stop()
        else:
            world.bridge.kill()
        if seeded.random() < 0.5:
            world.serve(40)
            world.compare(10, behind=5)
        world.serve_as_promised(5, behind=5)
        world.bridge.start()
        world.compare(20, behind=5)
        world.serve_as_promised(5, behind=5)
        world.settles(20)
    world.promises_are_kept()


def bridge_upgrades(world: World, seeded: random.Random, rounds: int) -> None:
    """The bridge is stopped when replays no longer reach back to the start, and the next one goes on from what it has kept."""
    world.serve(600)
    for _ in range(rounds):
        world.serve(60)
        world.compare(10)
        world.bridge.stop()
        world.serve(30)
        world.bridge.start()
        world.compare(20, behind=5)
        world.settles(20)


def two_bridges(world: World, seeded: random.Random, rounds: int) -> None:
    """Of two bridges the one that speaks is stopped, killed or stands still: the other one speaks, and goes on when the first is back."""
    assert world.spare
    # The one that is alone speaks, and goes on when the other one has begun.
    world.spare.stop()
    world.settles(20)
    world.spare.start()
    taken_over = 0
    for number in range(3 * rounds):
        world.serve(60)
        world.compare(10)
        bridge, way = (world.bridge, world.spare)[number % 2], (number + seeded.randrange(2)) % 3
        before = world.epochs()
        (bridge.stop, bridge.kill, bridge.pause)[way]()
        for _ in range(10):
            world.serve(4)
            world.serve_as_promised(1, behind=SEVERED)
        world.compare(20, behind=SEVERED)
        # By the other one alone.
        world.settles(20)
        taken_over += sum(epoch != before.get(holder) for holder, epoch in world.epochs().items())
        (bridge.start, bridge.start, bridge.resume)[way]()
        world.serve_as_promised(10, behind=SEVERED)
        world.compare(20)
        world.settles(20)
    world.counts.notes.append(f"{taken_over} times an engine was taken over")
    assert taken_over >= len(world.holders), "it was the silent one that was stopped"
    world.promises_are_kept()


def known_behind(world: World, prompts: list[Prompt]) -> None:
    """Prompts are known again with the first block that is stored behind each, though doubted; clears end the doubt."""
    world.serve_behind(prompts)
    wait_until("prefixes are known again", lambda: world.differences(prompts) == (0, 0))
    world.compare(20, behind=5)
    for number in range(len(world.holders)):
        world.reset(number)
    world.serve(40)
    world.settles(20)


def evidence(world: World, seeded: random.Random, rounds: int) -> None:
    """Replays don't reach back to what the bridge has kept: a prefix is known again with the first block that is stored behind it."""
    systems = world.chats.systems()
    world.proofread()
    for _ in range(rounds):
        world.serve(150)
        world.serve_behind(systems)
        world.settles(10)
        world.bridge.stop()
        world.serve(300)
        world.bridge.start()
        for host in world.hosts:
            world.none_exact(host, 10)
        wait_until("the bridge has asked", lambda: world.differences(systems)[0] > 0 == world.differences(systems)[1])
        known_behind(world, systems)
    world.ancestors_are_proven()


def learnt(world: World, seeded: random.Random, rounds: int) -> None:
    """Replays don't reach back and nothing was kept: names are learnt from an engine that stores the prefixes anew."""
    systems = world.chats.systems()
    for _ in range(rounds):
        world.serve(150)
        world.serve_behind(systems)
        world.bridge.kill()
        world.serve(300)
        world.bridge.start()
        number = seeded.randrange(len(world.holders))
        teacher = world.holders[number]
        world.reset(number)
        wait_until("the bridge has asked", lambda: world.differences(systems)[0] > 0 == world.differences(systems)[1])
        world.serve_behind(systems, teacher)
        wait_until("one engine is known", lambda: world.differences(systems, teacher) == (0, 0))
        known_behind(world, systems)


def engine_restarts(world: World, seeded: random.Random, rounds: int) -> None:
    """An engine is killed and starts again on the same ports, empty; before and after its first event."""
    for _ in range(rounds):
        world.serve(80)
        world.compare(10)
        host = seeded.choice(world.hosts)
        host.kill()
        world.compare(20)
        world.serve_as_promised(5)
        if seeded.random() < 0.5:
            world.none_exact(host, 5)
            world.serve(10, but=host)
            world.compare(10)
        host.start()
        # Before its first event.
        world.compare(20)
        if seeded.random() < 0.5:
            world.settles(10)
        host.serve([(0, world.chats.prompt())])
        world.compare(20)
        world.serve_as_promised(20)
        world.settles(20)
    world.promises_are_kept()


def blind(world: World, seeded: random.Random, rounds: int) -> None:
    """Engines without a replay socket are killed and start again: what they lost sight of is in doubt until they clear."""

    def clears() -> bool:
        # Before the bridge is connected, a clear is lost.
        for number in range(len(world.holders)):
            world.reset(number)
        return world.are_exact()

    for _ in range(rounds):
        wait_until("all engines have cleared", clears)
        world.serve(60)
        world.compare(20)
        assert world.are_exact()
        host = seeded.choice(world.hosts)
        host.kill()
        world.none_exact(host, 5)
        world.compare(10)
        host.start()
        world.compare(10)
        world.serve(60)
        world.compare(20)


def silence(world: World, seeded: random.Random, rounds: int) -> None:
    """Nothing arrives from engines while requests are served."""
    for _ in range(rounds):
        world.serve(40)
        world.compare(10)
        for proxy in world.proxies:
            proxy.silence()
        world.serve(300)
        # What cannot be known yet: then it is marked.
        world.compare(10, behind=8)
        for host in world.hosts:
            world.none_exact(host, 8)
        world.compare(20)
        for proxy in world.proxies:
            proxy.heal()
        world.compare(20, behind=3)
        world.settles(20)


def stalls(world: World, seeded: random.Random, rounds: int) -> None:
    """The daemon, the bridge or both stand still while 300 requests are served."""
    for number in range(rounds):
        world.serve(40)
        world.compare(10)
        stalled = {(world.daemon, world.bridge)[number % 2], *((world.bridge, world.daemon) if number % 3 == 2 else ())}
        for process in stalled:
            process.pause()
        begun = time.monotonic()
        world.serve(300)
        if world.daemon not in stalled:
            world.compare(20, behind=6)
            for host in world.hosts:
                world.none_exact(host, 6)
            world.compare(20)
            world.serve_as_promised(5)
        time.sleep(max(0.0, begun + seeded.choice((0.5, 2, 4)) - time.monotonic()))
        for process in stalled:
            process.resume()
        world.compare(30, behind=3)
        world.serve_as_promised(5, behind=3)
        world.settles(20)
        world.serve_as_promised(5)
    world.promises_are_kept()


def drops(world: World, seeded: random.Random, rounds: int) -> None:
    """Messages of engines are lost on the way, more and more of them."""
    for share in (0.01, 0.05, 0.2, 0.5)[: max(2, rounds)]:
        for proxy in world.proxies:
            proxy.lose(share)
        for _ in range(6):
            world.serve(40)
            if seeded.random() < 0.3:
                world.reset(seeded.randrange(100))
            world.compare(10)
            world.serve_as_promised(3)
        # The last messages may be lost, too: the poll finds that.
        world.compare(20)
        for proxy in world.proxies:
            proxy.heal()
        world.settles(20)
    world.promises_are_kept()


def cuts(world: World, seeded: random.Random, rounds: int) -> None:
    """Connections to engines break, for a moment or longer, while they go on."""
    for _ in range(2 * rounds):
        world.serve(40)
        some = seeded.sample(world.proxies, 1 + seeded.randrange(len(world.proxies)))
        for proxy in some:
            proxy.cut()
        world.serve(40)
        world.compare(10, behind=8)
        if seeded.random() < 0.5:
            victim = seeded.choice(world.hosts)
            victim.kill()
            victim.start()
        for proxy in some:
            proxy.heal()
        world.serve(20)
        world.compare(10, behind=8)
        world.settles(20)


def kills(world: World, seeded: random.Random, rounds: int) -> None:
    """Any part is killed, one after the other, while engines go on."""
    for number in range(3 * rounds):
        world.serve(50)
        part = (number + seeded.randrange(2)) % 4
        if part == 0:
            host = seeded.choice(world.hosts)
            host.kill()
            world.compare(5, behind=5)
            host.start()
        elif part == 1:
            world.bridge.kill()
            world.serve(20)
            world.bridge.start()
        elif part == 2:
            world.daemon.kill()
            world.serve(20)
            world.daemon.start()
        else:
            world.broker.kill()
            world.serve(20)
            world.compare(5, behind=5)
            world.broker.start()
        world.compare(10, behind=5)
        world.serve(20)
        world.compare(10, behind=5)
        world.settles(20)


def late(world: World, seeded: random.Random, rounds: int) -> None:
    """The bridge starts when replays no longer reach back to the start: in doubt until the engine clears, and never wrong."""
    world.bridge.kill()
    world.serve(400)
    world.bridge.start()
    world.serve(40)
    world.compare(20, behind=5)
    for number in range(len(world.holders)):
        world.reset(number)
    world.serve(40)
    world.settles(20)


def promised(world: World, seeded: random.Random, rounds: int) -> None:
    """Chats on engines with several groups of layers, or tiers: what is promised to a request is what the scheduler takes."""
    world.proofread()
    for number in range(5 * rounds):
        world.serve(30)
        if number % 4 == 3:
            world.reset(seeded.randrange(100))
        world.compare(10)
        if world.layout.at_once == 1:
            world.serve_as_promised(15)
            world.compare(10)
    world.settles(10)
    world.promises_are_kept()
    world.ancestors_are_proven()


def doubted(world: World, seeded: random.Random, rounds: int) -> None:
    """Models whose events don't tell what a request reuses: never called exact once they have served."""
    world.proofread()
    for _ in range(rounds):
        world.serve(40)
        world.compare(20)
    world.ancestors_are_proven()
    exact = {place for place, is_exact in world.status().items() if is_exact}
    # One that has served nothing has nothing.
    assert world.served and not exact & world.served, f"events of such a model don't tell enough: {exact & world.served}"


def hybrid(model: str, block_size: int, blocks: int, **more: object) -> Layout:
    """Engines of vLLM with a model of several groups of layers."""
    unit = min(block_size, 32)
    given = {"kinds": ("vllm_hybrid",), "engines": 3, "model": model, "block_size": block_size, "blocks": blocks, "chat_unit": unit}
    return Layout(**{**given, **more})  # type: ignore[arg-type]


# Models, their blocks of main attention, and pools from roomy to tight.
HYBRIDS = (
    ("gpt-oss", 16, (1200, 300)),
    ("gemma-3", 16, (3000, 1300)),
    ("gemma-3, windows of 256", 16, (3000, 900)),
    ("gemma-4", 16, (2000, 700)),
    ("large main blocks", 32, (900, 250)),
    ("deepseek-v4", 256, (3000, 1000)),
    ("qwen3-next", 64, (800, 250)),
    ("window and state", 16, (1500, 400)),
    ("two windows", 16, (1500, 400)),
)
RETENTIONS = (0, 512, None)

MIXED = Layout(kinds=BOTH, engines=4)
PROXIED = replace(MIXED, has_proxies=True)
NAMES = replace(
    MIXED, salts=(None, "tenant-a", "tenant-b"), adapters=(None, None, "my-lora", "other-lora"), blocks=500
)

# vLLM's names of blocks are the hashes of a namespace of their scheme.
OWN_HASHES = Layout(keys=('scheme = "vllm-sha256-cbor"',), scheme="vllm-sha256-cbor", salts=(None, "tenant-a"))
# SGLang's default for every model.
UNIFIED = Layout(kinds=("sglang_unified",))
# Its events tell nothing of windows.
HIDDEN: dict[str, Any] = {"keys": ("hybrid = true",), "can_be_exact": False}
# What a servicer leaves out, it leaves out of models with several groups of layers only.
WHOLE = ('groups = ["full"]',)

# Replays that don't reach back to what the bridge has kept, and engines whose stored events prove what is before them.
FORGETFUL: dict[str, Any] = {"keeps_state": True, "buffer_steps": 20}
PROVERS = {
    "vLLM": Layout(),
    "SGLang": Layout(kinds=("sglang", "sglang_unified")),
    "gpt-oss": hybrid("gpt-oss", 16, 700),
    "two windows": hybrid("two windows", 16, 600),
}

SCENARIOS = [
    Scenario("quiet, vLLM", quiet, Layout()),
    Scenario("quiet, vLLM, xxhash", quiet, Layout(hash_fn="xxhash_cbor")),
    Scenario("quiet, vLLM's own hashes", quiet, OWN_HASHES),
    Scenario("engine restarts, vLLM's own hashes", engine_restarts, OWN_HASHES),
    Scenario("quiet, SGLang", quiet, Layout(kinds=("sglang",))),
    Scenario("quiet, SGLang, pages of 64", quiet, Layout(kinds=("sglang",), block_size=64, blocks=100)),
    Scenario("quiet, SGLang unified", quiet, replace(UNIFIED, salts=NAMES.salts, adapters=NAMES.adapters)),
    Scenario("SGLang unified, with a host tier", promised, replace(UNIFIED, model="host")),
    Scenario("SGLang unified, windows", doubted, replace(UNIFIED, model="windows", **HIDDEN)),
    Scenario("SGLang unified, wide windows", doubted, replace(UNIFIED, model="wide windows", blocks=600, **HIDDEN)),
    Scenario("salts and adapters", quiet, NAMES),
    Scenario("four ranks", quiet, replace(MIXED, ranks=4, engines=2, blocks=150)),
    Scenario("fifty engines", quiet, replace(MIXED, engines=50, engines_a_process=10, blocks=100), rounds=1),
    Scenario("daemon restarts", daemon_restarts, MIXED, rounds=6),
    Scenario("daemon restarts, JetStream", daemon_restarts, replace(MIXED, settings=JETSTREAM), rounds=6),
    Scenario("`up` restarts", daemon_restarts, replace(MIXED, is_one_process=True), rounds=4),
    Scenario("bridge restarts", bridge_restarts, MIXED, rounds=4),
    Scenario("bridge restarts, state", bridge_restarts, replace(MIXED, keeps_state=True), rounds=4),
    Scenario("bridge upgrades, state", bridge_upgrades, replace(MIXED, keeps_state=True, buffer_steps=100), rounds=4),
    Scenario("two bridges", two_bridges, replace(MIXED, has_spare=True), rounds=2),
    *(Scenario(f"evidence, {name}", evidence, replace(layout, **FORGETFUL), rounds=1 if layout.model else 3) for name, layout in PROVERS.items()),
    Scenario("names learnt", learnt, Layout(buffer_steps=20)),
    Scenario("names learnt, SGLang", learnt, Layout(kinds=("sglang",), buffer_steps=20)),
    Scenario("engine restarts", engine_restarts, MIXED, rounds=6),
    Scenario("engine restarts, no replay", blind, replace(MIXED, has_replay=False)),
    Scenario("engine restarts, four ranks", engine_restarts, replace(MIXED, ranks=4, engines=2)),
    Scenario("engine restarts, `up`", engine_restarts, replace(MIXED, is_one_process=True)),
    Scenario("silence of engines", silence, PROXIED, rounds=2),
    Scenario("stalls", stalls, MIXED, rounds=6),
    Scenario("stalls, `up`", stalls, replace(MIXED, is_one_process=True), rounds=3),
    Scenario("messages lost", drops, PROXIED, rounds=4),
    Scenario("connections cut", cuts, PROXIED, rounds=3),
    Scenario("kills of each part", kills, NAMES, rounds=4),
    Scenario("kills, JetStream, ranks", kills, replace(NAMES, ranks=2, settings=JETSTREAM), rounds=4),
    Scenario("a lying engine", lied, replace(MIXED, has_admin=True)),
    Scenario("replay too short", late, replace(MIXED, buffer_steps=20)),
    Scenario("gpt-oss", promised, hybrid("gpt-oss", 16, 700)),
    *(
        Scenario(f"{model}, pool of {blocks}, retention {retention}, {at_once} at once", promised, layout)
        for model, block_size, pools in HYBRIDS
        for blocks in pools
        for retention in RETENTIONS
        for at_once in (1, 5)
        for layout in [hybrid(model, block_size, blocks, retention=retention, at_once=at_once)]
    ),
    Scenario("gpt-oss, daemon restarts", daemon_restarts, hybrid("gpt-oss", 16, 700), rounds=4),
    Scenario("qwen3-next, engine restarts", engine_restarts, hybrid("qwen3-next", 64, 400)),
    Scenario("deepseek-v4, stalls", stalls, hybrid("deepseek-v4", 256, 1500)),
    Scenario("two windows, messages lost", drops, hybrid("two windows", 16, 600, has_proxies=True), rounds=4),
    Scenario("gpt-oss, kills of each part", kills, hybrid("gpt-oss", 16, 700), rounds=2),
    Scenario("windows only", doubted, hybrid("windows only", 16, 900)),
    Scenario("chunked attention", doubted, hybrid("chunked attention", 16, 2000)),
    *(Scenario(f"{way}, restarts", fronted, Layout(engines=2, ranks=2, server=way), rounds=2) for way in FRONT_ENDS),
    *(Scenario(f"{way}, restarts", relayed, Layout(engines=2, server=way, keys=WHOLE), rounds=2) for way in SERVICERS),
    *(Scenario(f"{way}, holes", holed, Layout(engines=2, server=way, keys=WHOLE, has_replay=False, has_proxies=True), rounds=2) for way in SERVICERS),
    Scenario("stated to be hybrid", doubted, replace(MIXED, keys=("hybrid = true",), can_be_exact=False)),
]
