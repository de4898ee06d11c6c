"""Models as names of namespaces, and instances as names of workers.

A namespace is a subject token of at most 64 bytes, and ``meta-llama/Llama-3.1-8B-Instruct`` is none. This mapping makes one
of it that people can still read, and every such token leads back to its model. Letters, digits and ``-`` stand for themselves;
``_`` begins a code: ``__`` is ``/``, ``_d`` a dot, ``_u`` an underscore, ``_c`` a colon, ``_t`` ends the model and begins the
tenant, and ``_xHH`` is any other byte of the UTF-8 text. Adapters share the namespace of their base model.

>>> ModelKey("meta-llama/Llama-3.1-8B-Instruct").namespace()
'meta-llama__Llama-3_d1-8B-Instruct'
>>> ModelKey.of_namespace("Qwen__Qwen3_clatest_tacme")
ModelKey(model='Qwen/Qwen3:latest', tenant='acme')
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from .errors import InvalidValueError
from .subjects import check_name

DEFAULT_TENANT: Final = "default"
"""The tenant that is meant where none is named."""

_CODES: Final = {"/": "__", ".": "_d", "_": "_u", ":": "_c"}
_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-")
_TEXTS: Final = {code: text for text, code in _CODES.items()}
_PIECE: Final = re.compile(r"[A-Za-z0-9-]+|_[_duc]|_x([0-9a-f]{2})")


def _encode(text: str) -> str:
    def piece(byte: int) -> str:
        if byte in _PLAIN:
            return chr(byte)
        return _CODES.get(chr(byte)) or f"_x{byte:02x}"

    return "".join(map(piece, text.encode()))


def _decode(name: str) -> str | None:
    """The text that a name stands for; none where the name is not what :func:`_encode` makes."""
    encoded = bytearray()
    at = 0
    while at < len(name):
        found = _PIECE.match(name, at)
        if found is None:
            return None
        digits = found.group(1)
        if digits is not None:
            encoded.append(int(digits, 16))
        else:
            encoded += _TEXTS.get(found.group(), found.group()).encode()
        at = found.end()
    try:
        text = encoded.decode()
    except UnicodeDecodeError:
        return None
    return text if _encode(text) == name else None


@dataclass(frozen=True, slots=True)
class ModelKey:
    """A model's cache, as engines and gateways name it.

    :param model: the name under which the model is served; adapters count as their base model.
    :param tenant: the tenant or routing group that it is kept apart for.
    """

    model: str
    tenant: str = DEFAULT_TENANT

    def __post_init__(self) -> None:
        if not self.tenant:
            object.__setattr__(self, "tenant", DEFAULT_TENANT)

    def namespace(self) -> str:
        """The namespace of the cache.

        :raises InvalidValueError: where the codes take more than 64 bytes: serve the model under a shorter name.
        """
        if not self.model:
            raise InvalidValueError("a model must have a name")
        name = _encode(self.model)
        if self.tenant != DEFAULT_TENANT:
            name += f"_t{_encode(self.tenant)}"
        return check_name(name, "the namespace of the model")

    @classmethod
    def of_namespace(cls, namespace: str) -> ModelKey | None:
        """The cache whose namespace this is; none for a name that the mapping does not make."""
        # The first `_t` that begins a code, and is not the end of one.
        split = re.match(r"((?:[^_]|_[^t])*)_t(.*)", namespace, re.DOTALL)
        model = _decode(split.group(1) if split else namespace)
        tenant = _decode(split.group(2)) if split else DEFAULT_TENANT
        if not model or not tenant or (split and tenant == DEFAULT_TENANT):
            return None
        return cls(model, tenant)


def namespace_of(namespace: str | None, model: str | None, tenant: str = DEFAULT_TENANT) -> str:
    """The namespace that is meant, by its own name or by a model's.

    :raises InvalidValueError: where both are given, or neither.
    """
    if (namespace is None) == (model is None):
        raise InvalidValueError("give either a namespace or a model")
    if model is not None:
        return ModelKey(model, tenant).namespace()
    try:
        return check_name(str(namespace), "namespace")
    except InvalidValueError as error:
        raise InvalidValueError(f"{error}; the name of a model is given as model=") from None


def worker_of_instance(instance: str) -> str:
    """The worker that a gateway calls ``instance``, by the same codes.

    :raises InvalidValueError: where the codes take more than 64 bytes.
    """
    return check_name(_encode(instance), "the worker of the instance")


def instance_of_worker(worker: str) -> str:
    """What a gateway calls ``worker``; the worker's own name where no instance has it."""
    return _decode(worker) or worker
