"""Small routers that ask kvatlas, tell it where they send requests, and go by what that predicts, too."""

from __future__ import annotations

from typing import ClassVar

from processes import Prompt
from ways import Asked, named, place_of


class Hinted(Asked):
    """Routers that send a prompt to who reuses most, or will soon; among equals to its home."""

    # Longer than an event is under way, and short beside the life of a block.
    OPTIONS: ClassVar[tuple[str, ...]] = ("--hints-ttl-ms", "2000")

    def reused(self, prompt: Prompt, router: int) -> dict[int, float]:
        answer = self.answer(prompt, predicted=True)
        found = {place_of(holder): float(holder.get("usable_blocks", holder["matched_blocks"])) for holder in answer.get("holders", [])}
        for holder in answer.get("predicted", []):
            place = place_of(holder)
            found[place] = max(found.get(place, 0), holder["blocks"])
        return found

    def ask(self, prompt: Prompt, router: int) -> None:
        place = self.choose(prompt, router)
        self.post("/v1/hints", {"hints": [{"worker": f"gpu-{place}", "prompt": named(prompt)}]})
        self.send(place, prompt)


class HintedWithState(Hinted):
    """The same, where kvatlas's bridge keeps what it knows in a directory."""

    KEEPS_STATE = True
