"""Processes that are given lines of JSON, and answer each."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from dynamo_site import SIZE, WORDS, Site


class Lines:
    """Such a process. Libraries in it may print, too."""

    def __init__(self, command: list[str], **more: Any) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more)

    def ask(self, **request: Any) -> dict[str, Any]:
        """What it answers."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                answered: dict[str, Any] = json.loads(line)
                return answered
        raise RuntimeError(f"{self._process.args!r} has ended")

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()


def router_of(site: Site, seed: int) -> Lines:
    """Dynamo's router on a site, which ends with it."""
    log = site.stack.enter_context(open(site.folder / "router.log", "ab"))
    arguments = [str(Path(__file__).parent / "dynamo_router.py"), *(str(number) for number in (SIZE, WORDS, seed))]
    router = Lines([os.environ["DYNAMO_PYTHON"], *arguments], env=site.environment, stderr=log)
    site.stack.callback(router.close)
    return router
