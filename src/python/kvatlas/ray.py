"""Routers for Ray Serve: a request goes to the replica that has most of its prompt in its cache.

.. code-block:: python

    RequestRouterConfig(
        request_router_class="kvatlas.ray:KvatlasRequestRouter",
        request_router_kwargs={"model": "llama", "nats_url": "nats://kvatlas:4222"},
    )

:class:`KvatlasRequestRouter` takes the tokens that a caller gives beside its request. ``KvatlasKVAwareRouter`` is a subclass of Ray's
``KVAwareRouter``, which has Ray Serve LLM tokenise prompts and switch the engines' events on; it is there where Ray Serve LLM and an
engine are installed. ``deploy/routers.md`` has what to change.

A replica is the holder that follows the event source which it advertises: called ``HOST:PORT`` of its endpoint, or with that as its
address. Where nothing is certain, or kvatlas does not answer, Ray's power of two choices decides. No request fails for want of an answer.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from itertools import groupby
from time import monotonic
from typing import Any, Final

try:
    from ray.serve.request_router import LocalityMixin, MultiplexMixin, RequestRouter
    from ray.util.metrics import Counter
except ImportError as error:
    raise ImportError(f"kvatlas.ray needs Ray Serve: pip install 'ray[serve]>=2.60' ({error})") from error

from ._ray.asking import Addressee, Asker, NotAnsweredError, Prompt
from ._ray.recent import RecentChoices
from ._ray.registering import Bridge, Registrar
from ._ray.sources import Depths, EventSource
from .errors import KvatlasError
from .models import DEFAULT_TENANT
from .subjects import PREFIX

__all__ = ["KvatlasRequestRouter"]

_LOG: Final = logging.getLogger("kvatlas.ray")

TOKENS_KWARG: Final = "request_token_ids"
"""The keyword argument of a request that has its prompt's tokens. Ray's ``KVAwareRouter`` calls it so."""
SALT_KWARG: Final = "request_cache_salt"
"""The keyword argument with the salt of its cache, if it has one."""
ADAPTER_KWARG: Final = "request_lora_name"
"""The keyword argument with the name of its adapter, if it has one."""

# `pending_request` and `replica` are Ray's.
_Groups = list[list[Any]]


class _Routing(LocalityMixin, MultiplexMixin):  # type: ignore[misc]
    """The choice of replicas, for subclasses of Ray's ``RequestRouter``."""

    def initialize_state(
        self,
        *,
        model: str,
        tenant: str = DEFAULT_TENANT,
        nats_url: str = "nats://127.0.0.1:4222",
        nats_options: Mapping[str, Any] | None = None,
        prefix: str = PREFIX,
        gathering: bool = False,
        patience: float = 0.05,
        imbalance: int = 10,
        register_url: str | None = None,
        register_type: str = "vllm",
        register_token_file: str | None = None,
    ) -> None:
        """Takes ``request_router_kwargs``.

        :param model: the name under which kvatlas knows the model, for ``tenant``.
        :param nats_options: of ``nats.connect``, such as ``user_credentials``.
        :param prefix: of the subjects, where the daemon has another one.
        :param gathering: ask all shards, where there is no gateway.
        :param patience: seconds that a question waits for its answer.
        :param imbalance: a replica with so many more requests than the least busy one is not preferred.
        :param register_url: the HTTP listener of ``kvatlas up`` or of a bridge, where the engines that replicas advertise are registered.
        :param register_type: whose events these are: ``vllm`` or ``sglang``.
        :param register_token_file: has that listener's token.
        """
        self._asker = Asker(
            Addressee(nats_url, model, tenant, patience, prefix, gathering, dict(nats_options or {}))
        )
        self._imbalance = imbalance
        self._bridge = None
        if register_url is not None:
            self._bridge = Bridge(register_url, model, tenant, register_type, register_token_file)
        self._registrar: Registrar | None = None
        self._sources: dict[Any, EventSource] = {}
        self._choices = Counter(
            "kvatlas_ray_choices",
            description="Choices of replicas, by what decided: cache, nothing, busy, no_answer, refused, no_tokens or failed.",
            tag_keys=("by",),
        )

    def update_replicas(self, replicas: list[Any]) -> None:
        """Takes the replicas, with what they advertise."""
        found = ((replica.replica_id, EventSource.of_stats(replica.routing_stats)) for replica in replicas)
        self._sources = {replica: source for replica, source in found if source is not None}
        self._asker.start()
        if self._bridge is not None:
            self._registrar = self._registrar or Registrar(self._bridge)
            self._registrar.advertise(self._sources.values())
        super().update_replicas(replicas)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> _Groups:
        """Groups of replicas, the best first: those with most of the prompt, and at last all."""
        groups, by = await self._ranked(candidate_replicas, pending_request)
        self._choices.inc(tags={"by": by})
        if not groups:
            return self._two_choices(candidate_replicas, pending_request)
        # All replicas are among them: Ray has to pause before it asks again.
        pending_request.routing_context.should_backoff = True
        return [*groups, candidate_replicas]

    async def _ranked(self, replicas: Sequence[Any], pending_request: Any) -> tuple[_Groups, str]:
        """Those who are certain to have some of the prompt, those with most of it first; and what decides."""
        try:
            prompt = self._prompt(pending_request)
            if prompt is None:
                return [], "no_tokens"
            return self._by_depth(replicas, await self._asker.depths(prompt))
        except NotAnsweredError:
            return [], "no_answer"
        except KvatlasError as error:
            _LOG.debug("kvatlas refuses: %s", error)
            return [], "refused"
        except Exception:
            # Ray would leave the request without a replica.
            _LOG.exception("a question to kvatlas failed")
            return [], "failed"

    def _prompt(self, pending_request: Any) -> Prompt | None:
        """The prompt of a request; none where its tokens are not told."""
        kwargs = pending_request.kwargs if pending_request is not None else {}
        tokens = kwargs.get(TOKENS_KWARG)
        if tokens is None or not len(tokens):
            return None
        return Prompt(tokens, kwargs.get(ADAPTER_KWARG), kwargs.get(SALT_KWARG))

    def _by_depth(self, replicas: Sequence[Any], depths: Depths) -> tuple[_Groups, str]:
        """Replicas that are not too busy, grouped by how much they have; and whether that is what decides."""
        sources = self._sources
        found = [(sources[replica.replica_id].blocks(depths), replica) for replica in replicas if replica.replica_id in sources]
        holding = [(blocks, replica) for blocks, replica in found if blocks]
        if not holding:
            return [], "nothing"
        queues = {replica.replica_id: self._queue(replica) for replica in replicas}
        most = min(queues.values()) + self._imbalance
        free = [(blocks, replica) for blocks, replica in holding if queues[replica.replica_id] <= most]
        free.sort(key=lambda one: (-one[0], queues[one[1].replica_id]))
        groups = [[replica for _, replica in group] for _, group in groupby(free, key=lambda one: one[0])]
        return groups, "cache" if groups else "busy"

    def _queue(self, replica: Any) -> float:
        """How many requests a replica has, as far as this router knows."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0

    def _two_choices(self, replicas: Sequence[Any], pending_request: Any) -> _Groups:
        """Two replicas by chance, the less busy one first."""
        if pending_request is not None and pending_request.metadata.multiplexed_model_id:
            chosen = self.apply_multiplex_routing(pending_request=pending_request)
        else:
            chosen = self.apply_locality_routing(pending_request=pending_request)
        eligible = [replica for replica in replicas if replica.replica_id in chosen]
        return [sorted(random.sample(eligible, min(2, len(eligible))), key=self._queue)]


class KvatlasRequestRouter(_Routing, RequestRouter):  # type: ignore[misc]
    """Routes by the tokens that the caller gives: ``handle.remote(…, request_token_ids=tokens)``.

    ``request_cache_salt`` and ``request_lora_name`` may stand beside them. Ray hands all three on to the deployment's method.
    """


def _kv_aware_router() -> type:
    try:
        from ray.serve.llm.request_router import KVAwareRouter
    except ImportError as error:
        raise ImportError(
            "kvatlas.ray:KvatlasKVAwareRouter needs Ray Serve LLM and an engine (pip install 'ray[llm]'). Without them use "
            f"kvatlas.ray:KvatlasRequestRouter, and give it request_token_ids: {error}"
        ) from error

    class KvatlasKVAwareRouter(_Routing, KVAwareRouter):  # type: ignore[misc]
        """Routes by the tokens that Ray Serve LLM has made of the prompt; salt and adapter are the request's own.

        Ray Serve LLM takes the first replica, whatever its queue, and has its proxy send the request there. No queue tells of that, so
        that choices are counted here.
        """

        __qualname__ = "KvatlasKVAwareRouter"

        def initialize_state(self, **kwargs: Any) -> None:
            super().initialize_state(**kwargs)
            self._recent = RecentChoices()

        def update_replicas(self, replicas: list[Any]) -> None:
            self._recent.keep(replica.replica_id for replica in replicas)
            super().update_replicas(replicas)

        async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> _Groups:
            groups = await super().choose_replicas(candidate_replicas, pending_request)
            if groups and groups[0]:
                self._recent.add(groups[0][0].replica_id, monotonic())
            return groups

        def _queue(self, replica: Any) -> float:
            return self._recent.of(replica.replica_id, monotonic())

        def _prompt(self, pending_request: Any) -> Prompt | None:
            prompt = super()._prompt(pending_request)
            if prompt is None:
                return None
            [payload, *_] = pending_request.args or [None]
            # As the client has sent it: of any type.
            salt = getattr(payload, "cache_salt", None)
            adapter = pending_request.metadata.multiplexed_model_id
            return Prompt(prompt.tokens, adapter or None, salt if isinstance(salt, str) else None)

    return KvatlasKVAwareRouter


def __getattr__(name: str) -> Any:
    # Only who asks for this class needs an engine. Ray finds it by its name, and so it has to be the same one each time.
    if name != "KvatlasKVAwareRouter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    router = globals()[name] = _kv_aware_router()
    return router
