"""What callers give, checked where it is given."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import TypeVar

from .errors import InvalidValueError

_T = TypeVar("_T")


def check_type(value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Refuses a value of another type."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(known.__name__ for known in kinds)
        raise InvalidValueError(f"{what} must be of type {names}, not {value!r}")


def whole(value: int, what: str) -> int:
    """A whole number of any type, as an ``int``."""
    try:
        return index(value)
    except TypeError:
        raise InvalidValueError(f"{what} must be a whole number, not {value!r}") from None


def unsigned(value: int, what: str, bits: int = 64) -> int:
    """A whole number of any type that fits an unsigned integer of so many bits, as an ``int``."""
    number = whole(value, what)
    if not 0 <= number < 1 << bits:
        raise InvalidValueError(f"{what} must be an unsigned integer of {bits} bits, not {value!r}")
    return number


def flag(value: bool, what: str) -> bool:
    """True or false, of Python or of NumPy, as a ``bool``."""
    kind = type(value)
    if kind is not bool and (kind.__module__, kind.__name__.rstrip("_")) != ("numpy", "bool"):
        raise InvalidValueError(f"{what} must be True or False, not {value!r}")
    return bool(value)


def encoded(text: str | None, what: str) -> bytes:
    """A text as UTF-8; empty where it is absent."""
    if text is None:
        return b""
    check_type(text, str, what)
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidValueError(f"{what} {text!r} is no text in UTF-8") from None


def all_of(values: Iterable[_T], kind: type[_T] | tuple[type[_T], ...], what: str) -> list[_T]:
    """The values as a list, each of which is of this type."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise InvalidValueError(f"{what} must be a list, not {values!r}")
    listed = list(values)
    for value in listed:
        check_type(value, kind, f"each of {what}")
    return listed
