"""A real broker and a real daemon for every test that asks for them."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Broker, Daemon


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in wanted}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 60))
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds a skipped test to those that deploy/test.sh counts."""
    file = os.environ.get("KVATLAS_TEST_SKIPS")
    if report.skipped and file:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        with open(file, "a", encoding="utf-8") as skips:
            skips.write(f"SKIPPED: {report.nodeid}: {why}\n")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "broker") as running:
        yield running


@pytest.fixture
def daemon(broker: Broker) -> Iterator[Daemon]:
    with Daemon(broker.url) as running:
        yield running
