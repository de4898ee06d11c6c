"""Holders on the page keep their names over restarts of the daemon, which numbers them anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from site_of_tests import Daemon, Stub, eventually, eventually_there, frame, namespace, text


def of_workers(workers: list[str]) -> dict[str, Any]:
    """A frame with the whole state of degraded holders, numbered in this order from 1."""
    numbered = list(enumerate(workers, 1))
    added = [[number, "n", worker, 0] for number, worker in numbered]
    facts = [[number, 7, 1, 0, 0, 0] for number, _ in numbered]
    since = [[number, 1_800_000_000_000_000] for number, _ in numbered]
    return frame({"added": added, "facts": facts, "since": since}, len(workers), [namespace("n", 0, len(workers))])


def cells(browser: Chrome) -> list[str]:
    return browser.execute_script("return [...document.querySelectorAll('#matrix .cell')].map((cell) => cell.title.split('/')[0])")


def test_a_restarted_daemon_changes_no_names(browser: Chrome, daemon: Daemon) -> None:
    restart = threading.Event()

    def frames() -> Iterator[dict[str, Any]]:
        yield of_workers(["gpu-1", "gpu-2", "gpu-3"])
        assert restart.wait(60)
        yield of_workers(["gpu-0", "gpu-1", "gpu-3"])
        yield of_workers(["gpu-2", "gpu-0", "gpu-1"])

    stub = Stub(daemon, frames)
    browser.expected_messages.append("status of 400")  # type: ignore[attr-defined]
    browser.get(stub.url)
    eventually("all have a cell", lambda: cells(browser) == ["gpu-1", "gpu-2", "gpu-3"])
    browser.execute_script("document.querySelectorAll('#matrix .cell')[1].click()")
    eventually("the holder is told", lambda: text(browser, "#holder").startswith("gpu-2/0 of n: degraded: gap"))
    restart.set()
    eventually("the cells have the new names", lambda: cells(browser) == ["gpu-0", "gpu-1", "gpu-2"])
    assert text(browser, "#holder").startswith("gpu-2/0 of n"), text(browser, "#holder")
    assert "kvatlas admin resync n gpu-2 0" in text(browser, "#holder-mend")
    chosen = browser.find_element(By.CSS_SELECTOR, "#matrix [aria-selected=true]").get_attribute("title")
    assert chosen.startswith("gpu-2/0"), chosen
    browser.execute_script("document.querySelectorAll('#matrix .cell')[0].click()")
    eventually("the cell is its holder's", lambda: text(browser, "#holder").startswith("gpu-0/0 of n"))
    stub.close()


def test_a_cell_says_when_a_doubt_began_and_no_age(browser: Chrome, daemon: Daemon) -> None:
    stub = Stub(daemon, lambda: iter([of_workers(["gpu-1"]) | {"now_us": int(time.time() * 1e6)}]))
    browser.get(stub.url)
    eventually("it has a cell", lambda: cells(browser) == ["gpu-1"])
    cell = eventually_there(lambda: browser.find_element(By.CSS_SELECTOR, "#matrix .cell"))
    for said in (cell.get_attribute("title"), cell.get_attribute("aria-label")):
        assert ": degraded: gap since " in said and "(" not in said, said
    stub.close()
