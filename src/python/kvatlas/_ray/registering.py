"""Registers the engines of replicas with a bridge, which then follows them."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .sources import EventSource

_LOG: Final = logging.getLogger("kvatlas.ray")

ROUND: Final = 30.0
"""Seconds after which all engines are registered again, so that the bridge keeps them."""
RETRY: Final = 2.0
"""Seconds after which one that could not be registered is tried again."""
TTL: Final = 120.0
"""Seconds after which a bridge forgets an engine that no router registers: no replica has it, or the application has ended."""
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

    def register(self, source: EventSource) -> None:
        """Registers an engine, or has the bridge keep it.

        :raises OSError: where it is not answered, or refused.
        :raises http.client.HTTPException: where the answer, or the URL, is none of HTTP.
        """
        body: dict[str, object] = {
            "instance_id": source.instance,
            "modelname": self.model,
            "tenant_id": self.tenant,
            "dp_rank": source.rank,
            "endpoint": source.endpoint,
            "block_size": source.block_size,
            "type": self.kind,
            "ttl_ms": round(TTL * 1000),
        }
        body |= {"replay_endpoint": source.replay_endpoint} if source.replay_endpoint else {}
        headers = {"content-type": "application/json"}
        if self.token_file:
            headers["authorization"] = f"Bearer {Path(self.token_file).read_text().strip()}"
        request = urllib.request.Request(self.url.rstrip("/") + "/register", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT):
                pass
        except urllib.error.HTTPError as error:
            raise OSError(f"{error.code}: {error.read(1000).decode(errors='replace')}") from None


class Registrar:
    """Keeps the engines registered that replicas have. All methods run in one event loop.

    Nothing is unregistered: a bridge forgets what nobody registers again, also where this process ends with its application. What is
    registered takes the place of what a router has registered at the same address before.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._advertised: frozenset[EventSource] = frozenset()
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
            is_complete = await self.round()
            try:
                await asyncio.wait_for(self._changed.wait(), ROUND if is_complete else RETRY)
            except asyncio.TimeoutError:
                continue

    async def round(self) -> bool:
        """Registers all engines. Returns whether all are."""
        advertised = self._advertised
        outcomes = [await self._register(source) for source in advertised]
        self._failed = {source: why for source, why in self._failed.items() if source in advertised}
        return all(outcomes)

    async def _register(self, source: EventSource) -> bool:
        try:
            await asyncio.to_thread(self._bridge.register, source)
        except _ERRORS as error:
            if self._failed.get(source) != str(error):
                _LOG.warning("%s is not registered at %s: %s", source.endpoint, self._bridge.url, error)
            self._failed[source] = str(error)
            return False
        self._failed.pop(source, None)
        return True
