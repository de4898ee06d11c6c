"""Profiles: where requests for a holder go, and how it is labelled."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ._checks import check_type
from .errors import InvalidValueError

_ADDRESS_BYTES_MAX: Final = 256
_LABELS_MAX: Final = 16
_LABEL_BYTES_MAX: Final = 512
_KEY: Final = re.compile(r"[A-Za-z0-9._/-]{1,64}")
_VALUE: Final = re.compile(r"[ -~]{0,128}")
_ADDRESS: Final = re.compile(
    r"(?P<scheme>(?:https?|grpcs?)://)?"
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|[A-Za-z0-9._-]+)"
    r"(?P<port>:[0-9]+)?"
    r"(?P<path>/[A-Za-z0-9/.~%_-]*)?"
)


def _is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    if found is None or len(text) > _ADDRESS_BYTES_MAX:
        return False
    port, path, six = found["port"], found["path"], found["six"]
    if found["scheme"] is None and (port is None or path is not None):
        return False
    if port is not None and not 0 < int(port[1:]) < 1 << 16:
        return False
    if six is None:
        return True
    try:
        ipaddress.IPv6Address(six)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Profile:
    """A holder's address and labels.

    :param address: where requests for it go: ``HOST:PORT``, or a URL with ``http``, ``https``, ``grpc`` or ``grpcs``; ``None`` where
        that is not known.
    :param labels: such as its role, zone and model: at most 16 with 512 bytes together.
    :raises InvalidValueError: for what the contract does not take.
    """

    address: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_type(self.labels, Mapping, "labels")
        if self.address is not None:
            check_type(self.address, str, "address")
        # What is told must not change with the caller's map.
        object.__setattr__(self, "labels", dict(self.labels))
        if self.address is not None and not _is_address(self.address):
            raise InvalidValueError(
                f"address {self.address!r} is neither HOST:PORT nor a URL with http, https, grpc or grpcs"
            )
        if len(self.labels) > _LABELS_MAX:
            raise InvalidValueError(f"there are {len(self.labels)} labels; at most {_LABELS_MAX} are allowed")
        for key, value in self.labels.items():
            check_type(key, str, "the key of a label")
            check_type(value, str, f"the value of label {key!r}")
            if not _KEY.fullmatch(key):
                raise InvalidValueError(f"label {key!r} is not 1 to 64 characters out of A-Z a-z 0-9 . _ - /")
            if not _VALUE.fullmatch(value):
                raise InvalidValueError(
                    f"the value of label {key!r} is not at most 128 printable characters of ASCII"
                )
        size = sum(len(key) + len(value) for key, value in self.labels.items())
        if size > _LABEL_BYTES_MAX:
            raise InvalidValueError(f"the labels have {size} bytes; at most {_LABEL_BYTES_MAX} are allowed")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known."""
        return self.address is None and not self.labels

    def entries(self) -> dict[str, Any]:
        """The keys by which a batch tells it. One without anything has an empty address."""
        if self.is_empty:
            return {"address": ""}
        entries: dict[str, Any] = {}
        if self.address is not None:
            entries["address"] = self.address
        if self.labels:
            entries["labels"] = dict(sorted(self.labels.items()))
        return entries
