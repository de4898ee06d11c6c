"""Prompts that continue each other, the same for whoever has the seed."""

from __future__ import annotations

import random

VOCABULARY = 32


def prompts(size: int, seed: int, count: int) -> list[list[int]]:
    """The first `count` prompts: turns of a few chats."""
    dice = random.Random(seed)
    chats: list[list[int]] = [[] for _ in range(8)]
    made = []
    for _ in range(count):
        chat = dice.randrange(len(chats))
        chats[chat] = chats[chat] + [dice.randrange(3, VOCABULARY) for _ in range(dice.randint(size, 3 * size))]
        made.append(chats[chat])
        if len(chats[chat]) > 40 * size:
            chats[chat] = []
    return made
