"""Answers after a restart, counted by what is wrong with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

# From so many seconds on after all is there again, every answer has to be right.
BOUND = 5.0
# For so long answers are looked at beyond that.
BEYOND = 3.0

# For so long an answer may leave somebody out: on a busy machine holders are in doubt now and then.
PATIENCE = 10.0

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Truth = TypeVar("Truth")
Told = dict[str, int]


def patiently(ask: Callable[[], Answer], is_blind: Callable[[Answer], bool]) -> tuple[Answer, bool]:
    """Asks until the answer is not blind, for a while. Returns the last answer, and whether it took more than one."""
    deadline = time.monotonic() + PATIENCE
    asks_again = False
    while is_blind(answer := ask()) and time.monotonic() < deadline:
        asks_again = True
        time.sleep(0.1)
    return answer, asks_again


class Restart:
    """A restart: answers are asked for from now on, when all is there again and says that it is ready."""

    def __init__(self, name: str) -> None:
        self._name, self._begun = name, time.monotonic()

    def watch(
        self, ask: Callable[[Asked], Answer], held: Sequence[tuple[Asked, Truth]], kinds: Callable[[Answer, Truth], list[str]]
    ) -> bool:
        """Asks again and again, and prints what came of it; `kinds` says what is wrong with an answer, blind or stale.

        Returns whether nothing was wrong beyond the bound.
        """
        questions, last = 0, 0.0
        early, late = {"blind": 0, "stale": 0}, {"blind": 0, "stale": 0}
        while (since := time.monotonic() - self._begun) < BOUND + BEYOND:
            question, expected = held[questions % len(held)]
            wrong = kinds(ask(question), expected)
            questions += 1
            for kind in wrong:
                last = since
                (early if since <= BOUND else late)[kind] += 1
        print(
            f"restart of {self._name}: {questions} questions; beyond {BOUND:.0f} s {late['blind']} blind, {late['stale']} stale; "
            f"before that {early['blind']} blind, {early['stale']} stale, the last after {last:.1f} s",
            flush=True,
        )
        return not any(late.values())


def kinds_of(told: Told | None, expected: Told) -> list[str]:
    """What is wrong with an answer: blind where there is none, or where it says less than somebody holds, and stale where it says more."""
    answer = told or {}
    is_blind = told is None or any(answer.get(name, 0) < depth for name, depth in expected.items())
    is_stale = any(depth > expected.get(name, 0) for name, depth in answer.items())
    return ["blind"] * is_blind + ["stale"] * is_stale
