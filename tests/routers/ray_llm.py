"""Ray Serve LLM's own `KVAwareRouter`, without the engine that importing Ray Serve LLM wants."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ray

# Packages of which only these folders are wanted, and not what they import at their beginning.
PACKAGES = ("ray.llm", "ray.llm._internal", "ray.llm._internal.serve", "ray.llm._internal.serve.routing_policies", "ray.serve.llm")
# What the router's modules take of the rest: a name in annotations.
CONFIGURATION = ("ray.llm._internal.serve.core", "ray.llm._internal.serve.core.configs", "ray.llm._internal.serve.core.configs.llm_config")


def install() -> bool:
    """From now on `ray.serve.llm.request_router` can be imported. Whether it is all of Ray Serve LLM, with an engine that is installed."""
    try:
        importlib.import_module("ray.serve.llm.request_router")
        return True
    except ImportError:
        for name in [name for name in sys.modules if name.startswith(("ray.llm", "ray.serve.llm"))]:
            del sys.modules[name]
    root = Path(ray.__file__).parent
    for name in (*PACKAGES, *CONFIGURATION):
        module: Any = ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        module.LLMConfig = object
        sys.modules[name] = module
    return False
