"""Imports a few modules of an engine as they are, and puts stubs in the place of everything else that they import."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `tops`: the `genuine` ones in `folder`, the others as stubs, which `fill` may give what must be real."""

    def __init__(self, folder: Path, tops: set[str], genuine: set[str], fill: Callable[[Any], None]) -> None:
        self._folder, self._tops, self._genuine, self._fill = folder, tops, genuine, fill

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self._tops:
            return None
        if name in self._genuine:
            file = str(self._folder.joinpath(*name.split("."))) + ".py"
            loader = importlib.machinery.SourceFileLoader(name, file)
            return importlib.machinery.ModuleSpec(name, loader)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Stub(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        self._fill(module)

    def install(self) -> None:
        """From now on imports go this way."""
        sys.meta_path.insert(0, self)
