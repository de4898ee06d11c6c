"""Runs kvatlas beside llm-d's own index, and compares their answers with what vLLM's caches hold.

    python3 tests/routers/llmd_router.py [--seed N] [--short] [--restarts]

The engines are vLLM's own block pools and publishers (tests/engines). llm-d's event pool fills a real Redis from the payloads that they publish.
kvatlas hears the same payloads through its bridge. llm-d's index asks both. At the end the daemon and the engines restart. Wants KVATLAS_ENGINES,
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
CAPACITY = 300


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

    def depths(self, prompt: Prompt) -> dict[str, int]:
        """The leading blocks of a prompt that the caches have, by pod."""
        found = zip(self.pods, self.host.depths([wire(prompt)]), strict=True)
        return {pod.name: held for pod, [(held, _)] in found if held}

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
    adapters: int = 0
    adapters_missed: int = 0
    asked_again: int = 0


def compare(driver: Driver, engines: Engines, prompt: Prompt, tally: Tally) -> None:
    """Asks both about a prompt, and compares with what the engines hold."""
    truth = engines.depths(prompt)

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
    tally.unequal += (own["depths"], own["scores"]) != (redis["depths"], redis["scores"])


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
            engines.settle(driver)
            for prompt in dice.sample(prompts, 25):
                compare(driver, engines, prompt, tally)
            if turn % 5 == 0:
                guess(driver, engines, dice.choice(prompts), tally)
        print(f"| llm-d, {algorithm} {seed} | {tally.answers} | {tally.wrong} | {tally.redis_wrong} | {tally.unequal} | "
              f"{tally.adapters_missed} of {tally.adapters} | {tally.asked_again} |", flush=True)  # fmt: skip
        outcomes = restarts(driver, engines, prompts, tally) if with_restarts else []
        return all([*outcomes, tally.wrong == 0, tally.unequal == 0])


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
    known = (own["depths"], own["scores"]) == (redis["depths"], redis["scores"])
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
    print("| router | answers | wrong | wrong, by its own index | unequal | adapters that its own index missed | in doubt at first |")
    print("|---|---|---|---|---|---|---|")
    outcomes = [play("xxh64", "", given.seed, rounds, given.restarts or not given.short), play("cbor-fnv", "42", given.seed + 1, rounds, False)]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
