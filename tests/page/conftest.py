"""A daemon with a thousand workers, and a browser that looks at it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from site_of_tests import PATIENCE, Daemon, Fleet

WORKERS = 1000


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds a skipped test to those that deploy/test.sh counts."""
    file = os.environ.get("KVATLAS_TEST_SKIPS")
    if report.skipped and file:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        with open(file, "a", encoding="utf-8") as skips:
            skips.write(f"SKIPPED: {report.nodeid}: {why}\n")


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    running = Daemon()
    yield running
    running.kill()


@pytest.fixture(scope="session")
def fleet(daemon: Daemon) -> Iterator[Fleet]:
    fleet = Fleet(daemon.nats, WORKERS)
    yield fleet
    fleet.stop()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """The browser, with a tab that no test uses."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or os.environ["CHROMIUM_BIN"]
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--window-size=1440,1000",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium') / 'profile'}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, ChromeService(shutil.which("chromedriver")))
    # On a busy machine, the rules of axe take longer than the 30 s that are the default.
    driver.set_script_timeout(PATIENCE)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def browser(chromium: Chrome) -> Iterator[Chrome]:
    """The browser at a new tab, without a past: nothing is stored or cached. At the end of a test nothing may stand in its console."""
    unused = chromium.current_window_handle
    chromium.switch_to.new_window("tab")
    # One that a test expects is taken off this list by the test.
    chromium.expected_messages = []  # type: ignore[attr-defined]
    try:
        yield chromium
        messages = [entry["message"] for entry in chromium.get_log("browser")]
        expected = chromium.expected_messages  # type: ignore[attr-defined]
        assert [text for text in messages if not any(part in text for part in expected)] == []
    finally:
        origin = chromium.execute_script("return location.origin")
        chromium.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
        chromium.execute_cdp_cmd("Network.clearBrowserCache", {})
        chromium.close()
        chromium.switch_to.window(unused)
