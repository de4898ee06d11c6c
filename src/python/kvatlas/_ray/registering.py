"""Registers the engines of replicas with a bridge, which then follows them."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .sources import EventSource

_LOG: Final = logging.getLogger("kvatlas.ray")

ROUND: Final = 30.0
"""Seconds after which all engines are registered again: a bridge may have forgotten them. That changes nothing where it has not."""
RETRY: Final = 2.0
"""Seconds after which one that could not be registered is tried again."""
GONE_AFTER: Final = 60.0
"""Seconds for which no replica may have an engine before it is unregistered."""
_TIMEOUT: Final = 2.0

_ERRORS: Final = (OSError, ValueError, http.client.HTTPException)
"""What a request fails with: also where what answers speaks no HTTP."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """Where engines are registered.

    :param url: of the HTTP listener, ``http://HOST:PORT``.
    :param kind: whose events: ``vllm`` or ``sglang``.
    :param token_file: has the token that the listener wants, if it wants one.
    """

    url: str
    model: str
    tenant: str
    kind: str
    token_file: str | None

    def post(self, path: str, source: EventSource) -> None:
        """Sends one request.

        :raises OSError: where it is not answered, or refused.
        :raises http.client.HTTPException: where the answer, or the URL, is none of HTTP.
        """
        body: dict[str, object] = {
            "instance_id": source.instance,
            "modelname": self.model,
            "tenant_id": self.tenant,
            "dp_rank": source.rank,
        }
        if path == "/register":
            body |= {"endpoint": source.endpoint, "block_size": source.block_size, "type": self.kind}
            body |= {"replay_endpoint": source.replay_endpoint} if source.replay_endpoint else {}
        headers = {"content-type": "application/json"}
        if self.token_file:
            headers["authorization"] = f"Bearer {Path(self.token_file).read_text().strip()}"
        request = urllib.request.Request(self.url.rstrip("/") + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT):
                pass
        except urllib.error.HTTPError as error:
            raise OSError(f"{error.code}: {error.read(1000).decode(errors='replace')}") from None


class Registrar:
    """Keeps the engines registered that replicas have. All methods run in one event loop."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._seen: dict[EventSource, float] = {}
        self._advertised: frozenset[EventSource] = frozenset()
        self._registered: set[EventSource] = set()
        self._failed: dict[EventSource, str] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def advertise(self, sources: Iterable[EventSource]) -> None:
        """Tells which engines there are now."""
        found = frozenset(source for source in sources if source.block_size is not None)
        if found != self._advertised:
            self._advertised = found
            self._changed.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            is_complete = await self.round(time.monotonic())
            try:
                await asyncio.wait_for(self._changed.wait(), ROUND if is_complete else RETRY)
            except asyncio.TimeoutError:
                continue

    async def round(self, now: float) -> bool:
        """Registers all engines, and unregisters those that have gone. Returns whether nothing is left to do."""
        advertised = self._advertised
        self._seen |= dict.fromkeys(advertised, now)
        outcomes = [await self._register(source) for source in advertised]
        # Another engine may have its address by now.
        taken = {source.place for source in advertised if source in self._registered}
        for source in [source for source, seen in self._seen.items() if now - seen >= GONE_AFTER]:
            is_taken = source.place in taken
            if is_taken or source not in self._registered or await self._send("/unregister", source):
                del self._seen[source]
                self._registered.discard(source)
        self._failed = {source: why for source, why in self._failed.items() if source in self._seen}
        return all(outcomes)

    async def _register(self, source: EventSource) -> bool:
        if await self._send("/register", source):
            return True
        # A bridge refuses an engine with other settings in the place of one that it still follows.
        before = {old for old in self._registered if old.place == source.place} - self._advertised
        if not before or not await self._send("/unregister", next(iter(before))):
            return False
        self._registered -= before
        return await self._send("/register", source)

    async def _send(self, path: str, source: EventSource) -> bool:
        try:
            await asyncio.to_thread(self._bridge.post, path, source)
        except _ERRORS as error:
            if self._failed.get(source) != str(error):
                _LOG.warning("%s of %s at %s: %s", path, source.endpoint, self._bridge.url, error)
            self._failed[source] = str(error)
            return False
        if path == "/register":
            self._registered.add(source)
        self._failed.pop(source, None)
        return True
