"""Counts and shares on the page, where lists are cut or a value is not known."""

from __future__ import annotations

from typing import Any

from selenium.webdriver import Chrome
from site_of_tests import Daemon, Stub, eventually, frame, namespace, text
from test_page import RATES, active, tiles


def health(browser: Chrome) -> list[list[str]]:
    """The names, healths and holders of the namespaces."""
    return browser.execute_script("""
        return [...document.querySelectorAll('table.namespaces tbody tr')].map((row) => [...row.cells].slice(0, 3).map((cell) => cell.innerText.trim()))
    """)


def test_holders_that_are_not_sent_are_counted(browser: Chrome, daemon: Daemon) -> None:
    change = {"added": [[1, "a", "gpu-1", 0]], "facts": [[1, 1, 1, 0, 0, 0]], "shown": 1, "total": 60_000}
    known = [namespace("a", 49_000, 1000), namespace("z", 9000, 1000)]
    stub = Stub(daemon, lambda: iter([frame(change, 1, known)]))
    browser.get(stub.url)
    eventually("all are there", lambda: len(health(browser)) == 2)
    assert health(browser) == [["z", "1,000 holders in doubt", "9,000 of 10,000"], ["a", "1,000 holders in doubt", "49,000 of 50,000"]]
    assert text(browser, "#namespaces-note") == "2 of 2 namespaces not sound"
    assert (tiles(browser)["exact holders"], tiles(browser)["degraded holders"]) == ("9,000", "1,000")
    stub.close()


def test_troubles_beyond_the_named_ones_are_counted(browser: Chrome, daemon: Daemon) -> None:
    names = [f"gpu-{number}" for number in range(8)]
    refused = [{"worker": name, "reason": "other_settings", "since_us": 0} for name in names]
    broken = [{"worker": name, "rank": 0, "promised_blocks": 1000, "missing_blocks": 119} for name in names]
    lists = {"refused": refused, "ahead": [f"{name}/0" for name in names], "broken_promises": broken}
    totals = {"refused_total": 11, "epochs_ahead": 12, "broken_promises_total": 13}
    stub = Stub(daemon, lambda: iter([frame({}, 0, [namespace("n", 0, 0, **lists, **totals)])]))
    browser.get(stub.url)
    eventually("it is there", lambda: health(browser))
    assert health(browser)[0][1] == "all batches dropped of 11 publishers; 13 holders break promises; 12 clocks are ahead"
    stub.close()


def test_a_namespace_without_bars_is_not_one_that_nobody_asked(browser: Chrome, daemon: Daemon) -> None:
    bars = {"quiet": [[0, 0]], "young": []}
    known = [namespace(name, 1) for name in ("other", "quiet", "young")]
    stub = Stub(daemon, lambda: iter([frame({}, 0, known)]), before={"sparks": {"bars": 60, "seconds": 15, "namespaces": bars}})
    browser.get(stub.url)
    eventually("all are there", lambda: len(health(browser)) == 3)
    said = browser.execute_script("return [...document.querySelectorAll('table.namespaces svg')].map((picture) => picture.getAttribute('aria-label'))")
    assert said == ["other: not known", "quiet: nobody asked", "young: not known"]
    stub.close()


def test_nearly_all_is_not_all_and_little_is_not_nothing(browser: Chrome, daemon: Daemon) -> None:
    rates = dict.fromkeys(RATES, 1.0) | {"exact": 996.0, "degraded": 4.0}
    bars = {"n": [[1000, 4]]}
    stub = Stub(daemon, lambda: iter([frame({}, 0) | {"rates": rates}]), before={"sparks": {"bars": 60, "seconds": 15, "namespaces": bars}})
    browser.get(stub.url)
    eventually("rates are shown", lambda: tiles(browser).get("answers exact", "–") != "–")
    assert tiles(browser)["answers exact"] == "99 %"
    said = browser.execute_script("return document.querySelector('table.namespaces svg').getAttribute('aria-label')")
    assert "under 1 % of them inexact" in said, said
    stub.close()


BLOCK = "00000000000000010000000000000001"
NODE = {"parent": None, "start": 0, "end": 300, "weight": 1, "some": 1, "all": 1, "exact": 1, "usable": 1, "names": ["deep/0"], "block": BLOCK}
ATLAS = {"total": 1, "seconds": 1, "partial": False, "left_out": 0, "block_size": 16, "nodes": [NODE]}


def explained(browser: Chrome, daemon: Daemon, holders: list[dict[str, Any]], compared: int) -> str:
    """What the page says of a prefix of 300 blocks that one holder has."""
    loss = {"below": {"blocks": 300, "copies": 300, "partial": False}, "asking": 3, "compared": compared, "sampled": 4, "seconds": 9, "tokens": 4800}
    told = {"start": 0, "end": 300, "block_size": 16, "holders": holders, "holders_total": 2, "complete": 1, "doubtful": 0, "loss": loss}
    stub = Stub(daemon, lambda: iter([frame({}, 2)]), ATLAS, answers={"/page/explain": (200, told)})
    browser.get(stub.url)
    eventually("the atlas is drawn", lambda: active(browser, "#icicle"))
    browser.execute_script("document.querySelector('[role=treeitem]').click()")
    eventually("it is explained", lambda: "What its loss would cost" in text(browser, "#explained"))
    said = text(browser, "#explained")
    stub.close()
    return said


def holder(worker: str, blocks: int, usable: int) -> dict[str, Any]:
    return {"worker": worker, "rank": 0, "blocks": blocks, "usable": usable, "limit": None, "degraded": [], "address": None, "dropped_out": None}


def test_the_only_holder_of_a_prefix_is_one_that_has_it(browser: Chrome, daemon: Daemon) -> None:
    # Of a window or a recurrent state, a request may reuse less of the holder that has more.
    said = explained(browser, daemon, [holder("shallow", 200, 200), holder("deep", 300, 0)], 300)
    assert "One loss away: only deep rank 0 has all of it." in said, said
    assert "3 of 4 sampled queries in 9 s (75 %) ask for all of it; each would compute 4,800 tokens again." in said, said


def test_of_a_deep_prefix_no_more_is_said_than_was_compared(browser: Chrome, daemon: Daemon) -> None:
    said = explained(browser, daemon, [holder("shallow", 200, 200)], 256)
    assert "One loss away: only one holder has all of it." in said, said
    assert "(75 %) ask for its first 256 blocks." in said and "again" not in said, said
