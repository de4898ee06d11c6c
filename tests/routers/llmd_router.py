"""Runs kvatlas beside llm-d's own index, and compares their answers with what vLLM's caches hold.

    python3 tests/routers/llmd_router.py [--seed N] [--short] [--restarts]

The engines are vLLM's own block pools and publishers (tests/engines). llm-d's event pool fills a real Redis from the payloads that they publish.
kvatlas hears the same payloads through its bridge. Engines copy blocks to host memory, and tell it with the blocks' tokens or by their names alone, as
vLLM's offloading does. llm-d's index asks both. At the end the daemon and the engines restart. Wants KVATLAS_ENGINES,
LLMD_BIN (tests/routers/llmd built in a checkout of llm-d-router), KVATLAS_BIN, NATS_SERVER_BIN and redis-server, and a Python with what the
engines need. Prints a line a scenario. Ends with 1 where an answer was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from judging import Restart, kinds_of, patiently
from llmd_site import SIZE, Driver, Pod, Prompt, site

from processes import Host, free_ports

PODS = 4
CAPACITY = 150


class Engines:
    """vLLM's caches, and what they publish, as llm-d's pool gets it."""

    def __init__(self, folder: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.pods = [Pod(f"10.0.0.{number}:8000", *free_ports(2)) for number in range(PODS)]
        described = [
            {
                "endpoint": f"tcp://*:{pod.events}",
                "replay": f"tcp://*:{pod.replay}",
                "rank": 0,
                "blocks": CAPACITY,
                "block_size": SIZE,
                "buffer_steps": 10_000,
                "hash_fn": "sha256_cbor",
                "topic": pod.topic,
            }
            for pod in self.pods
        ]
        self.host = Host("vllm", described, folder / "engines.log")
        self._heard = [context.socket(zmq.SUB) for _ in self.pods]
        for pod, heard in zip(self.pods, self._heard, strict=True):
            heard.setsockopt(zmq.RCVHWM, 0)
            heard.subscribe(b"")
            heard.connect(f"tcp://127.0.0.1:{pod.events}")
        self._markers = 0

    def serve(self, orders: list[tuple[int, Prompt]]) -> None:
        """Serves prompts."""
        self.host.serve([(number, wire(prompt)) for number, prompt in orders])

    def offload(self, number: int, prompt: Prompt, dice: random.Random) -> None:
        """An engine copies blocks of a prompt to its host memory, or drops them from there, or one of them from the device."""
        first = dice.choice([0, 0, dice.randrange(prompt.blocks() + 1)])
        if first < prompt.blocks() and dice.random() < 0.1:
            self.host.evict(number, wire(prompt), first)
            return
        if dice.random() < 0.3:
            self.host.unload(number, wire(prompt), first)
            return
        # vLLM tells the tokens of blocks that have nothing else in their names, where it is set to.
        is_plain = not (prompt.adapter or prompt.salt or prompt.images)
        self.host.offload(number, wire(prompt), first, is_plain and number % 2 == 0)

    def depths(self, prompt: Prompt) -> dict[str, int]:
        """The leading blocks of a prompt that the engines have, by pod."""
        return {pod: len(tiers) for pod, tiers in self.tiers(prompt).items()}

    def tiers(self, prompt: Prompt) -> dict[str, list[str]]:
        """Where these blocks are."""
        found = zip(self.pods, self.host.tiers(wire(prompt)), strict=True)
        return {pod.name: tiers for pod, tiers in found if tiers}

    def settle(self, driver: Driver) -> None:
        """Waits until both indexes have heard all of all engines: each stores a marker last."""
        for number, pod in enumerate(self.pods):
            marker = self._mark(driver, number)
            driver.do(op="wait", pod=pod.name, tokens=marker.tokens)

    def _mark(self, driver: Driver, number: int) -> Prompt:
        # A socket that has just connected hears nothing yet, so that a marker may have to be repeated.
        while True:
            self._markers += 1
            last = (1 << 21) + self._markers
            marker = Prompt((*range(1 << 20, (1 << 20) + SIZE - 1), last))
            self.serve([(number, marker)])
            while self._heard[number].poll(1000):
                _, _, payload = self._heard[number].recv_multipart()
                driver.tell(self.pods[number], payload)
                if b"\xce" + last.to_bytes(4, "big") in payload:
                    return marker


def wire(prompt: Prompt) -> Any:
    """A prompt as the engines take it."""
    images = [[block * SIZE, image] for block, image in prompt.images]
    return [list(prompt.tokens), prompt.salt or None, prompt.adapter or None, images]


@contextlib.contextmanager
def fleet() -> Iterator[Engines]:
    """Engines, for a while."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        engines = Engines(Path(folder), context)
        try:
            yield engines
        finally:
            engines.host.kill()
            context.destroy(0)


def prompts_of(dice: random.Random, count: int) -> list[Prompt]:
    """Prompts that share beginnings; some with an adapter, a salt or images."""
    roots = [[dice.randrange(1 << 17) for _ in range(SIZE * 8)] for _ in range(8)]
    made = []
    for _ in range(count):
        tokens = list(dice.choice(roots))[: SIZE * dice.randint(1, 8)]
        tokens += [dice.randrange(1 << 17) for _ in range(dice.randint(0, SIZE * 12))]
        kind = dice.random()
        blocks = len(tokens) // SIZE
        if kind < 0.1:
            prompt = Prompt(tuple(tokens), adapter=dice.choice(["sql", "chat"]))
        elif kind < 0.2:
            prompt = Prompt(tuple(tokens), salt=dice.choice(["tenant-a", "tenant-b"]))
        elif kind < 0.3 and blocks > 1:
            first = dice.randrange(blocks)
            prompt = Prompt(tuple(tokens), images=((first, "z" * 8), (first, "a" * 8)))
        else:
            prompt = Prompt(tuple(tokens))
        made.append(prompt)
    return made


@dataclass
class Tally:
    """What a scenario has found."""

    answers: int = 0
    wrong: int = 0
    redis_wrong: int = 0
    unequal: int = 0
    # Answers about blocks that are in host memory alone, and those of them where a block on the device is behind such a block.
    on_host: int = 0
    behind_host: int = 0
    adapters: int = 0
    adapters_missed: int = 0
    asked_again: int = 0


def compare(driver: Driver, engines: Engines, prompt: Prompt, tally: Tally) -> None:
    """Asks both about a prompt, and compares with what the engines hold."""
    tiers = engines.tiers(prompt)
    truth = {pod: len(blocks) for pod, blocks in tiers.items()}

    def ask() -> Any:
        return driver.do(op="ask", tokens=prompt.tokens, model=prompt.adapter, extras=prompt.extras())

    answer, asked_again = patiently(ask, lambda both: kinds_of(both["kvatlas"]["depths"], truth) == ["blind"])
    own, redis = answer["kvatlas"], answer["redis"]
    tally.answers += 1
    tally.asked_again += asked_again
    if own["depths"] != truth:
        tally.wrong += 1
        print("wrong:", prompt, own, "holds:", truth, file=sys.stderr)
    if prompt.adapter:
        # llm-d's events have the adapter's name in each block, and its requests have not.
        tally.adapters += 1
        tally.adapters_missed += redis["depths"] != truth
        return
    tally.redis_wrong += redis["depths"] != truth
    tally.on_host += any("cpu" in blocks for blocks in tiers.values())
    tally.behind_host += is_behind_host(tiers)
    if not is_equal(own, redis, tiers):
        tally.unequal += 1
        print("unequal:", prompt, own, "Redis:", redis, "holds:", tiers, file=sys.stderr)


def is_behind_host(tiers: dict[str, list[str]]) -> bool:
    """Whether a block on a device is behind one that is in host memory alone."""
    return any(blocks != sorted(blocks, reverse=True) for blocks in tiers.values())


def is_equal(own: Any, redis: Any, tiers: dict[str, list[str]]) -> bool:
    """Whether both say the same: depths and scores.

    Of a block on a device behind one in host memory, kvatlas tells the nearest tier that has the whole prefix, and Redis the block's own. So scores may be less.
    """
    if is_behind_host(tiers):
        return bool(own["depths"] == redis["depths"] and all(score <= redis["scores"].get(pod, 0) for pod, score in own["scores"].items()))
    return bool((own["depths"], own["scores"]) == (redis["depths"], redis["scores"]))


def play(algorithm: str, seed: str, number: int, rounds: int, with_restarts: bool) -> bool:
    """Plays a scenario, and prints its lines. Returns whether every answer was right."""
    dice, tally = random.Random(number), Tally()
    with fleet() as engines, site(algorithm, seed, engines.pods) as driver:
        prompts = prompts_of(dice, 200)
        # From here on, llm-d's pool misses nothing.
        engines.settle(driver)
        for turn in range(rounds):
            for place in range(PODS):
                if dice.random() < 0.05:
                    engines.host.reset(place)
                engines.serve([(place, prompt) for prompt in dice.sample(prompts, 5)])
                for prompt in dice.sample(prompts, 3):
                    engines.offload(place, prompt, dice)
            engines.settle(driver)
            for prompt in dice.sample(prompts, 25):
                compare(driver, engines, prompt, tally)
            if turn % 5 == 0:
                guess(driver, engines, dice.choice(prompts), tally)
        print(f"| llm-d, {algorithm} {seed} | {tally.answers} | {tally.wrong} | {tally.redis_wrong} | {tally.unequal} | "
              f"{tally.on_host}, {tally.behind_host} | {tally.adapters_missed} of {tally.adapters} | {tally.asked_again} |", flush=True)  # fmt: skip
        outcomes = restarts(driver, engines, prompts, tally) if with_restarts else []
        return all([*outcomes, tally.wrong == 0, tally.unequal == 0, tally.on_host > 0, tally.behind_host > 0 or rounds < 100])


def restarts(driver: Driver, engines: Engines, prompts: list[Prompt], tally: Tally) -> list[bool]:
    """The daemon restarts, and then the engines, which serve again at last. Returns how that was."""

    def ask(prompt: Prompt) -> dict[str, int]:
        answer = driver.do(op="ask", tokens=prompt.tokens, model=prompt.adapter, extras=prompt.extras())
        told: Any = answer["kvatlas"]["depths"]
        return dict(told)

    held = [(prompt, engines.depths(prompt)) for prompt in prompts]
    driver.daemon.kill()
    driver.daemon.start()
    outcomes = [Restart("llm-d, the daemon").watch(ask, held, kinds_of)]
    engines.host.kill()
    engines.host.start()
    engines.settle(driver)
    outcomes.append(Restart("llm-d, the engines").watch(ask, [(prompt, {}) for prompt in prompts], kinds_of))
    engines.serve([(place % PODS, prompt) for place, prompt in enumerate(prompts[:40])])
    engines.settle(driver)
    for prompt in prompts[:40]:
        tally.wrong += ask(prompt) != engines.depths(prompt)
    return outcomes


def guess(driver: Driver, engines: Engines, prompt: Prompt, tally: Tally) -> None:
    """Writes a speculative entry to both, looks, and takes it back."""
    if prompt.extras() != [[] for _ in range(prompt.blocks())] or prompt.adapter or not prompt.blocks():
        return
    driver.do(op="guess", tokens=prompt.tokens, pod="10.9.9.9:8000", back=False)
    answer = driver.do(op="ask", tokens=prompt.tokens)
    own, redis = answer["kvatlas"], answer["redis"]
    known = is_equal(own, redis, engines.tiers(prompt))
    driver.do(op="guess", tokens=prompt.tokens, pod="10.9.9.9:8000", back=True)
    tally.answers += 1
    # Entries beside the speculative one differ: those of Redis have the group of layers in them.
    tally.unequal += not known or any("10.9.9.9:8000@[speculative]" not in json.dumps(one["first"]) for one in (own, redis))
    compare(driver, engines, prompt, tally)


def main() -> int:
    """Plays all scenarios."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--short", action="store_true", help="200 questions in each algorithm, and no restarts")
    arguments.add_argument("--restarts", action="store_true", help="restarts in the short form, too")
    given = arguments.parse_args()
    rounds = 8 if given.short else 200
    print("| router | answers | wrong | wrong, by its own index | unequal | on the host alone, of these with the device behind | adapters that its own index missed | in doubt at first |")
    print("|---|---|---|---|---|---|---|---|")
    outcomes = [play("xxh64", "", given.seed, rounds, given.restarts or not given.short), play("cbor-fnv", "42", given.seed + 1, rounds, False)]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
