"""Seeded conversations, as engines serve them."""

from __future__ import annotations

import random

from processes import Prompt


class Chats:
    """Conversations that begin with one of a few system prompts, and grow by a turn with every request."""

    def __init__(self, seed: int, block_size: int, salts: list[str | None], adapters: list[str | None]) -> None:
        self._random = random.Random(seed)
        self._size = block_size
        self._systems = [self._tokens(self._random.randint(2, 12)) for _ in range(6)]
        self._salts, self._adapters = salts, adapters
        self._open: list[Prompt] = []
        self._asked: list[Prompt] = []

    def _tokens(self, blocks: float) -> list[int]:
        return [self._random.randrange(128_000) for _ in range(int(blocks * self._size) + self._random.randrange(self._size))]

    def of_another(self, seed: int) -> Chats:
        """Conversations of another client, which begin with the same system prompts."""
        other = Chats(seed, self._size, self._salts, self._adapters)
        other._systems = self._systems
        return other

    def systems(self) -> list[Prompt]:
        """The system prompts that conversations begin with, where these have no salts and adapters."""
        return [(tokens, None, None) for tokens in self._systems]

    def stranger(self) -> Prompt:
        """A request that shares nothing with any other."""
        return self._tokens(4), None, None

    def longer(self, prompt: Prompt) -> Prompt:
        """A request that nobody has made, behind a prompt."""
        tokens, salt, adapter = prompt
        return tokens + self._tokens(2), salt, adapter

    def prompt(self) -> Prompt:
        """The next request."""
        if not self._open or (len(self._open) < 30 and self._random.random() < 0.3):
            system = self._random.choice(self._systems)
            begun = (system, self._random.choice(self._salts), self._random.choice(self._adapters))
            self._open.append(begun)
        place = self._random.randrange(len(self._open))
        tokens, salt, adapter = self._open[place]
        longer = (tokens + self._tokens(self._random.randint(1, 5)), salt, adapter)
        if len(longer[0]) > 60 * self._size:
            del self._open[place]
        else:
            self._open[place] = longer
        self._asked = [*self._asked[-400:], longer]
        return longer

    def answered(self, prompt: Prompt, answer: list[int]) -> None:
        """The model has answered a prompt: its conversation goes on behind that."""
        if not answer:
            return
        whole = (prompt[0] + answer, *prompt[1:])
        self._open = [whole if one is prompt else one for one in self._open]
        self._asked.append(whole)

    def probes(self, count: int) -> list[Prompt]:
        """Prompts to compare answers for: asked ones, longer and shorter ones, ones that part ways, other salts and adapters."""
        return [self._probe() for _ in range(count)]

    def _probe(self) -> Prompt:
        if not self._asked:
            return self._tokens(4), None, None
        tokens, salt, adapter = self._random.choice(self._asked)
        way = self._random.randrange(8)
        if way == 0:
            tokens = tokens + self._tokens(3)
        elif way == 1:
            tokens = tokens[: self._random.randrange(len(tokens)) + 1]
        elif way == 2:
            place = self._random.randrange(len(tokens))
            tokens = [*tokens[:place], 128_001, *tokens[place + 1 :]]
        elif way == 3:
            salt = self._random.choice(self._salts)
        elif way == 4:
            adapter = self._random.choice(self._adapters)
        return tokens, salt, adapter
