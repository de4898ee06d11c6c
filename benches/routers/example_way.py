"""Small routers that ask kvatlas, and choose as deploy/router-example does."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

from policy import choose
from processes import Prompt
from vllm_fleet import ENGINES, SIZE, Fleet
from ways import Asked


class Example(Asked):
    """Routers with the policy of the example: what must be computed, load, and a home among engines that cost about as little."""

    def __init__(self, folder: Path, fleet: Fleet, routers: int) -> None:
        super().__init__(folder, fleet, routers)
        self._under_way: list[Counter[str]] = [Counter() for _ in range(routers)]
        self._lock = threading.Lock()

    def ask(self, prompt: Prompt, router: int) -> None:
        usable = {str(place): int(blocks) for place, blocks in self.reused(prompt, router).items()}
        under_way, tokens = self._under_way[router], prompt[0]
        with self._lock:
            name, blocks = choose(map(str, range(ENGINES)), tokens, len(tokens) // SIZE, usable, under_way)
            under_way[name] += blocks
        try:
            self.send(int(name), prompt)
        finally:
            with self._lock:
                under_way[name] -= blocks


class ExampleWithState(Example):
    """The same, where kvatlas's bridge keeps what it knows in a directory."""

    KEEPS_STATE = True
