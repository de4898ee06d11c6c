"""Questions to kvatlas that never hold up a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nats.aio.client import Client

from ..client import QueryClient, make_connection
from ..errors import ConnectionFailedError, KvatlasError, NoDaemonError, NotPermittedError, TimedOutError
from ..models import namespace_of
from ..queries import Query
from .sources import Depths, depths_of

_LOG: Final = logging.getLogger("kvatlas.ray")

MISSES_MAX: Final = 3
"""After so many questions in a row without an answer, none are asked for a while."""
REST: Final = 1.0
"""How long, in seconds."""
_CONNECT_PAUSE_MAX: Final = 5.0
"""The longest pause between two attempts to connect, in seconds."""

_ABSENT: Final = (TimedOutError, NoDaemonError, NotPermittedError, ConnectionFailedError)


class NotAnsweredError(KvatlasError):
    """A question has no answer, or was not asked because others had none."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request will have computed: its tokens, and what else makes blocks differ."""

    tokens: Sequence[int]
    lora_name: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Addressee:
    """Whom to ask about what.

    :param url: of the NATS server.
    :param patience: seconds that a question waits for its answer.
    :param options: of ``nats.connect``.
    """

    url: str
    model: str
    tenant: str
    patience: float
    prefix: str
    gathering: bool
    options: Mapping[str, Any]


class Asker:
    """Asks how much of a prompt is where. It connects by itself, in the event loop of the first question."""

    def __init__(self, whom: Addressee) -> None:
        self._whom = whom
        self._namespace = namespace_of(None, whom.model, whom.tenant)
        self._connection: Client | None = None
        self._client: QueryClient | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._misses = 0
        self._asks_again_at = 0.0

    def start(self) -> None:
        """Connects in the background, unless that is done or under way."""
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def depths(self, prompt: Prompt) -> Depths:
        """What is certain to be where.

        :raises NotAnsweredError: where nobody has answered in time.
        :raises KvatlasError: where the daemon refuses, or the prompt is none.
        """
        self.start()
        query = Query.by_tokens(prompt.tokens, lora_name=prompt.lora_name, cache_salt=prompt.cache_salt)
        connection, client = self._connection, self._client
        if connection is None or client is None or not connection.is_connected:
            raise NotAnsweredError("there is no connection to NATS")
        if self._misses >= MISSES_MAX and time.monotonic() < self._asks_again_at:
            raise NotAnsweredError("there was no answer before")
        try:
            reply = await client.query(self._namespace, query.narrowed(tiers=True))
        except _ABSENT as error:
            self._missed(error)
            raise NotAnsweredError(str(error)) from error
        if self._misses >= MISSES_MAX:
            _LOG.warning("kvatlas answers again")
        self._misses = 0
        return depths_of(reply)

    def _missed(self, error: Exception) -> None:
        self._misses += 1
        self._asks_again_at = time.monotonic() + REST
        if self._misses == MISSES_MAX:
            _LOG.warning("kvatlas does not answer, replicas are chosen by their queues: %s", error)

    async def _connect(self) -> None:
        whom, pause = self._whom, 0.1
        while True:
            try:
                connection = await make_connection(whom.url, **whom.options)
                break
            except Exception as error:  # Wrong options are errors of many kinds, and no request may fail of them.
                _LOG.warning("no connection to NATS, replicas are chosen by their queues: %s", error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _CONNECT_PAUSE_MAX)
        self._client = QueryClient(
            connection, prefix=whom.prefix, patience=whom.patience, gathering=whom.gathering
        )
        self._connection = connection
