"""llm-d-router's indexer, as a small router would ask it: its scores, ties as the others of ours."""

from __future__ import annotations

import json
import os
from pathlib import Path

from processes import Process, Prompt, free_ports, wait_until
from vllm_fleet import MODEL, SIZE, Client, Fleet
from ways import Scoring


class _Indexer(Process):
    def __init__(self, folder: Path, fleet: Fleet) -> None:
        [port] = free_ports(1)
        self.client = Client(port)
        command = [os.environ["LLMD_INDEXER"], str(port), str(SIZE)]
        for worker in fleet.workers:
            replay = f",tcp://127.0.0.1:{worker.replay}" if worker.has_replay else ""
            command.append(f"{worker.pod}=tcp://127.0.0.1:{worker.events}{replay}")
        super().__init__(command, folder / f"llmd-{port}.log")

    def start(self) -> None:
        super().start()
        wait_until("llm-d's indexer answers", self.client.is_healthy)


class Llmd(Scoring):
    """llm-d's indexer, one of each router."""

    TOPIC = f"kv@{{pod}}@{MODEL}"

    def __init__(self, folder: Path, fleet: Fleet, routers: int) -> None:
        super().__init__(folder, fleet, routers)
        self._indexers = [_Indexer(folder, fleet) for _ in range(routers)]
        self._places = {worker.pod: place for place, worker in enumerate(fleet.workers)}

    def start(self) -> None:
        for indexer in self._indexers:
            indexer.start()
        self.rest()

    def stop(self) -> None:
        for indexer in self._indexers:
            indexer.stop()

    def restart_routers(self) -> None:
        self.restart_all()

    def reused(self, prompt: Prompt, router: int) -> dict[int, float]:
        tokens, salt, adapter = prompt
        status, content = self._indexers[router].client.post("/score", {"model": adapter or MODEL, "tokens": tokens, "salt": salt or ""})
        if status != 200:
            raise RuntimeError(f"llm-d: {status}: {content[:300]!r}")
        return {self._places[pod]: score for pod, score in (json.loads(content) or {}).items()}

    def processes(self) -> list[Process]:
        return list(self._indexers)
