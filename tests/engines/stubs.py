"""Imports a few modules of an engine as they are, and puts stubs in the place of everything else that they import."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _AnyClass(type):
    """Classes that have any attribute: enumerations, for example."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{cls.__name__}.{name}")
        setattr(cls, name, value)
        return value


def _any_class(name: str) -> Any:
    members = {
        "__init__": lambda self, *_, **__: None,
        "__class_getitem__": classmethod(lambda cls, _: cls),
        "__hash__": object.__hash__,
    }
    return _AnyClass(name, (), members)


class _ClassyStub(_Stub):
    """A stub whose names in capitals may be bases of classes, and stand in isinstance()."""

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            return super().__getattr__(name)
        value = _any_class(name)
        setattr(self, name, value)
        return value


class Options(SimpleNamespace):
    """A configuration: what is not set is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `tops`: the `genuine` ones in `folder`, the others as stubs, which `fill` may give what must be real.

    With `has_classes`, the stubs have classes where a name begins with a capital.
    """

    def __init__(
        self, folder: Path, tops: set[str], genuine: set[str], fill: Callable[[Any], None], has_classes: bool = False
    ) -> None:
        self._folder, self._tops, self._genuine, self._fill = folder, tops, genuine, fill
        self._stub = _ClassyStub if has_classes else _Stub

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self._tops:
            return None
        if name in self._genuine:
            place = self._folder.joinpath(*name.split("."))
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            loader = importlib.machinery.SourceFileLoader(name, str(file))
            return importlib.machinery.ModuleSpec(name, loader, is_package=place.is_dir())
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = self._stub(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        self._fill(module)

    def install(self) -> None:
        """From now on imports go this way."""
        sys.meta_path.insert(0, self)
