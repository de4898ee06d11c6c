"""The page of the admin listener in a real browser."""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select
from site_of_tests import (
    DESK,
    PHONE,
    REPOSITORY,
    Daemon,
    Fleet,
    Stub,
    eventually,
    eventually_there,
    frame,
    namespace,
    opened,
    require_in_reach,
    resize,
    text,
)

SCREENSHOT_BYTES_MAX = 150_000


def tiles(browser: Chrome) -> dict[str, str]:
    """The numbers of the overview by what they count."""
    shown = eventually_there(lambda: [tile.text for tile in browser.find_elements(By.CSS_SELECTOR, ".tile")])
    return {lines[1]: lines[0] for lines in (tile.split("\n") for tile in shown)}


def names(browser: Chrome) -> list[str]:
    """The workers in the rows that can be seen, from the top."""
    rows = browser.execute_script("""
        return [...document.querySelectorAll('#grid-body .row')].filter((row) => !row.hidden)
            .map((row) => [Number(row.getAttribute('aria-rowindex')), row.querySelector('.name').textContent])
    """)
    return [name for _, name in sorted(rows)]


def active(browser: Chrome, selector: str) -> Any:
    """The element that the keyboard is at within a widget."""
    current = browser.find_element(By.CSS_SELECTOR, selector).get_attribute("aria-activedescendant")
    return browser.execute_script("return document.getElementById(arguments[0])", current) if current else None


def press(browser: Chrome, *keys: str) -> None:
    ActionChains(browser).send_keys(*keys).perform()


def test_the_fleet_loads_from_the_daemon_alone(browser: Chrome, daemon: Daemon, fleet: Fleet) -> None:
    opened(browser, daemon, fleet)
    assert browser.title == "kvatlas"
    eventually("it is ready", lambda: text(browser, "#readiness") == "ready")
    exact = f"{len(fleet.workers) - len(fleet.broken):,}"
    eventually("the exact are counted", lambda: tiles(browser).get("exact holders") == exact)
    assert tiles(browser)["degraded holders"] == str(len(fleet.broken))
    eventually("rates are shown", lambda: "/s" in text(browser, "#plots figcaption"))
    paths = browser.execute_script("return [...document.querySelectorAll('.plot path')].map((path) => path.getAttribute('d'))")
    eventually("a line is drawn", lambda: any(path and "L" in path for path in paths) or paths_of(browser))
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded and all(url.startswith(daemon.admin) for url in loaded), loaded
    # The broken ones stand first, and say why.
    assert names(browser)[: len(fleet.broken)] == fleet.broken
    assert "gap" in text(browser, "#grid-body .state-degraded")


def paths_of(browser: Chrome) -> bool:
    return browser.execute_script(
        "return [...document.querySelectorAll('.plot path')].some((path) => (path.getAttribute('d') ?? '').includes('L'))"
    )


def test_only_visible_rows_exist_and_filters_find_the_others(browser: Chrome, daemon: Daemon, fleet: Fleet) -> None:
    opened(browser, daemon, fleet)
    assert len(browser.find_elements(By.CSS_SELECTOR, "#grid-body .row")) < 60
    browser.find_element(By.ID, "filter-name").send_keys("GPU-99")
    expected = [name for name in fleet.workers if "gpu-99" in name]
    eventually("only these are left", lambda: text(browser, "#fleet-count") == f"{len(expected)} holders")
    assert sorted(names(browser)) == sorted(expected)
    browser.find_element(By.ID, "filter-name").clear()
    press(browser, "x", Keys.BACKSPACE)
    state = Select(browser.find_element(By.ID, "filter-state"))
    for choice, count in (("degraded: gap", 2), ("degraded", 2), ("degraded: stale", 0), ("exact", 998), ("all", 1000)):
        state.select_by_visible_text(choice)
        wanted = f"{count:,} holders"
        eventually(choice, lambda wanted=wanted: text(browser, "#fleet-count") == wanted)
    # The same over HTTP, for scripts.
    with urlopen(daemon.admin + "/workers?state=degraded&reason=gap&limit=1") as answer:
        page = json.load(answer)
    assert (page["holders_total"], page["holders"][0]["worker"]) == (2, fleet.broken[0])
    with urlopen(f"{daemon.admin}/workers?state=degraded&reason=gap&limit=1&after={page['next']}") as answer:
        page = json.load(answer)
    assert (page["holders"][0]["worker"], page["next"]) == (fleet.broken[1], None)


def test_the_keyboard_reaches_everything(browser: Chrome, daemon: Daemon, fleet: Fleet) -> None:
    opened(browser, daemon, fleet)
    press(browser, Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("class") == "skip"
    reached = set()
    for _ in range(60):
        press(browser, Keys.TAB)
        reached.add(browser.switch_to.active_element.get_attribute("id"))
    wanted = {"namespace", "theme", "namespaces", "filter-name", "filter-state", "matrix", "grid", "lens", "icicle", "ask-text"}
    assert wanted <= reached, wanted - reached

    browser.execute_script("document.getElementById('grid').focus()")
    press(browser, Keys.END)
    last = max(name for name in fleet.workers if name not in fleet.broken)
    eventually("the last row", lambda: active(browser, "#grid").get_attribute("aria-rowindex") == "1001")
    press(browser, Keys.ARROW_UP)
    assert active(browser, "#grid").get_attribute("aria-rowindex") == "1000"
    press(browser, Keys.HOME, Keys.ARROW_DOWN, Keys.ENTER)
    eventually("a holder is told", lambda: text(browser, "#holder").startswith(fleet.broken[1]))
    assert "gap" in text(browser, "#holder") and last
    eventually("how its state has changed", lambda: "degraded: " in text(browser, "#changes"))

    eventually("the atlas is drawn", lambda: active(browser, "#icicle"))
    browser.execute_script("document.getElementById('icicle').focus()")
    press(browser, Keys.ARROW_DOWN)
    assert active(browser, "#icicle").get_attribute("aria-level") == "2"
    press(browser, Keys.ARROW_UP)
    assert active(browser, "#icicle").get_attribute("aria-level") == "1"
    press(browser, Keys.ENTER)
    eventually("a prefix is explained", lambda: "would compute" in text(browser, "#explained"))


def cells(browser: Chrome, selector: str = "#matrix .cell") -> list[str]:
    """The names of cells of the matrix."""
    return browser.execute_script("return [...document.querySelectorAll(arguments[0])].map((cell) => cell.getAttribute('aria-label'))", selector)


def test_a_matrix_has_a_cell_for_each_holder(browser: Chrome, daemon: Daemon, fleet: Fleet) -> None:
    opened(browser, daemon, fleet)
    eventually("all have a cell", lambda: len(cells(browser)) == len(fleet.workers))
    assert [cell.split("/")[0] for cell in cells(browser)] == sorted(fleet.workers, key=lambda name: int(name.split("-")[1]))

    def doubtful() -> list[str]:
        named = (re.fullmatch(r"(.*)/0: degraded: gap(, resyncing)? since .*", cell) for cell in cells(browser, "#matrix .cell:not(.exact)"))
        return [match[1] for match in named if match]

    eventually("those in doubt are named", lambda: doubtful() == fleet.broken)
    shown = browser.execute_script("""
        const list = document.getElementById('matrix').getBoundingClientRect();
        return [...document.querySelectorAll('#matrix .cell')].filter((cell) => {
            const { top, bottom, left, right } = cell.getBoundingClientRect();
            return top >= list.top && bottom <= list.bottom && left >= list.left && right <= list.right && right - left >= 10;
        }).length
    """)
    assert shown == len(fleet.workers), "not all cells are seen at once"

    browser.execute_script("arguments[0].click()", browser.find_element(By.CSS_SELECTOR, "#matrix .cell.doubt, #matrix .cell.passing"))
    eventually("the holder is told", lambda: text(browser, "#holder").startswith("gpu-3/0 of llama: degraded: gap"))
    eventually("the numbers at its gap", lambda: "expected batch 2, got 3" in text(browser, "#numbers"))
    numbers = text(browser, "#numbers")
    assert "of answers inexact" in numbers and "Blocks" in numbers and "Epoch and number" in numbers, numbers
    eventually("how its state has changed", lambda: "degraded: gap" in text(browser, "#changes"))
    assert browser.find_elements(By.CSS_SELECTOR, "#timeline rect")
    assert "kvatlas admin resync llama gpu-3 0" in text(browser, "#holder-mend")

    browser.execute_script("document.getElementById('matrix').focus()")
    press(browser, Keys.END, Keys.ARROW_LEFT, Keys.ENTER)
    eventually("the last but one", lambda: text(browser, "#holder") == "gpu-998/0 of llama: exact")
    browser.find_element(By.ID, "detail-close").click()
    assert not browser.find_element(By.ID, "detail").is_displayed()


def test_the_address_shows_others_the_same(browser: Chrome, daemon: Daemon, fleet: Fleet) -> None:
    opened(browser, daemon, fleet)
    browser.find_element(By.ID, "filter-name").send_keys("gpu-5")
    eventually("reasons are known", lambda: len(Select(browser.find_element(By.ID, "filter-state")).options) > 3)
    Select(browser.find_element(By.ID, "filter-state")).select_by_value("degraded")
    eventually("one is left", lambda: names(browser) == ["gpu-503"])
    browser.find_element(By.XPATH, "//div[@role='columnheader'][.='Blocks']/button").click()
    Select(browser.find_element(By.ID, "lens")).select_by_value("held")
    browser.execute_script("document.querySelector('#matrix .cell').click()")
    address = browser.current_url
    assert address == f"{daemon.admin}/?name=gpu-5&state=degraded&sort=blocks-down&lens=held&holder=gpu-503%2F0", address
    browser.get("about:blank")
    browser.get(address)
    eventually("the same holder is told", lambda: text(browser, "#holder").startswith("gpu-503/0"))
    assert names(browser) == ["gpu-503"]
    assert browser.find_element(By.ID, "lens").get_attribute("value") == "held"
    assert browser.find_element(By.CSS_SELECTOR, "[aria-sort=descending]").text == "Blocks"
    # What is not there is no trouble.
    browser.get(f"{daemon.admin}/?state=none&holder=none&sort=none&lens=none&namespace=none")
    eventually("the fleet is shown", lambda: text(browser, "#fleet-count") == f"{len(fleet.workers):,} holders")


def three_namespaces() -> dict[str, Any]:
    """A frame of three namespaces: one sound, one whose batches are dropped, one with two holders in doubt."""
    added = [[number, name, f"{name}-{number}", 0] for number, name in enumerate(["sound", "sound", "bad", "bad", "bad"])]
    facts = [[number, 1, bits, 0, 0, 0] for number, bits in enumerate([0, 0, 0, 1, 15])]
    cost = {"queries": 100, "finding": 0, "inexact": 62, "text": "62 % of answers inexact"}
    refused = {"refused_total": 1, "refused": [{"worker": "wide", "reason": "other_settings", "since_us": 0}], "cost": cost}
    known = [namespace("bad", 1, 2, cost=cost), namespace("dropped", 0, **refused), namespace("sound", 2)]
    costs = [[4, "31 % of queries find it, 62 % of answers inexact"]]
    return frame({"added": added, "facts": facts}, 5, known, costs=costs)


def test_namespaces_stand_worst_first_with_what_they_answered(browser: Chrome, daemon: Daemon) -> None:
    bars = {"bad": [[10, 0], [20, 5]], "sound": [[0, 0]]}
    stub = Stub(daemon, lambda: iter([three_namespaces()]), before={"sparks": {"bars": 60, "seconds": 15, "namespaces": bars}})
    browser.get(stub.url)

    def rows() -> list[list[str]]:
        return browser.execute_script("""
            return [...document.querySelectorAll('table.namespaces tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText.trim()))
        """)

    eventually("all are there", lambda: len(rows()) == 3)
    assert [row[:3] for row in rows()] == [
        ["bad", "2 holders in doubt", "1 of 3"],
        ["dropped", "all batches dropped of 1 publisher", "0 of 0"],
        ["sound", "all exact", "2 of 2"],
    ]
    assert rows()[0][4] == "62 % of answers inexact"
    said = browser.find_element(By.CSS_SELECTOR, "table.namespaces svg").get_attribute("aria-label")
    assert said == "bad: 30 answers, 16 % of them inexact, at most 1.33 a second"
    paths = browser.execute_script("return [...document.querySelectorAll('table.namespaces tr:nth-child(1) path')].map((path) => path.getAttribute('d'))")
    assert [path.count("M") for path in paths] == [2, 1], paths
    # It opens on what is worst, and says there what it costs and why.
    assert browser.find_element(By.ID, "namespace").get_attribute("value") == "bad"
    told = text(browser, "#troubles")
    assert "all batches dropped wide (other_settings) of dropped Cost: 62 % of answers inexact." in told, told
    assert "gap bad-3/0, bad-4/0 of bad Cost: 31 % of queries find it, 62 % of answers inexact (bad-4/0)." in told, told
    assert "ask again: kvatlas admin resync bad bad-3 0" in told, told
    browser.find_element(By.XPATH, "//table[@class='namespaces']//button[.='sound']").click()
    eventually("that is shown", lambda: sorted(names(browser)) == ["sound-0", "sound-1"])
    assert browser.current_url.endswith("?namespace=sound")
    stub.close()


def test_reasons_are_never_cut_off(browser: Chrome, daemon: Daemon) -> None:
    stub = Stub(daemon, lambda: iter([three_namespaces()]))
    browser.get(stub.url)
    eventually("all are shown", lambda: len(names(browser)) == 3)
    for width in (DESK, PHONE):
        resize(browser, width, 1000)
        eventually("it is laid out", lambda width=width: browser.execute_script("return innerWidth") == width)
        cell = browser.find_element(By.XPATH, "//div[@role='gridcell'][contains(., 'upstream_gap')]")
        assert cell.text == "degraded: gap, undecodable, unknown_parent, upstream_gap"
        cut = browser.execute_script("return [arguments[0].scrollWidth > arguments[0].clientWidth, arguments[0].scrollHeight > arguments[0].clientHeight + 1]", cell)
        assert cut == [False, False], width
        beyond = "return arguments[0].getBoundingClientRect().bottom - arguments[0].parentElement.getBoundingClientRect().bottom"
        assert browser.execute_script(beyond, cell) <= 1, width
    stub.close()


def test_charts_have_axes_and_the_minutes_before(browser: Chrome, daemon: Daemon) -> None:
    def frames() -> Iterator[dict[str, Any]]:
        yield frame({}, 0) | {"rates": dict.fromkeys(RATES, 4.0)}

    now = time.time() * 1e6
    rows = [[now - age * 1e6, [float(age)] * len(RATES)] for age in range(880, 0, -5)]
    stub = Stub(daemon, frames, before={"past": {"names": RATES, "rows": rows}})
    browser.get(stub.url)
    eventually("lines are drawn", lambda: paths_of(browser))
    drawn = browser.execute_script("return document.querySelector('.plot path').getAttribute('d')")
    points = [tuple(map(float, point.split(","))) for point in drawn.removeprefix("M").split("L")]
    assert len(points) == len(rows) + 1
    width = browser.execute_script("return document.querySelector('.plot').clientWidth")
    assert points[0][0] < 70 and points[-1][0] > width - 5, "it does not begin before the page was opened"
    # The highest value is the oldest: it stands above all others.
    assert points[0][1] == min(y for _, y in points)
    labels = browser.execute_script("return [...document.querySelectorAll('.plot:first-of-type text')].map((label) => label.textContent)")
    assert labels[:3] == ["0", "500/s", "1K/s"]
    assert len([label for label in labels[3:] if re.fullmatch(r"\d\d:\d\d", label)]) >= 3, labels
    stub.close()


RATES = ["queries", "failed", "exact", "degraded", "empty", "stored", "removed", "batches", "dropped", "query_p50_us", "query_p99_us", "apply_p99_us"]


def test_the_daemon_remembers_the_last_minutes(daemon: Daemon, fleet: Fleet) -> None:
    def told() -> dict[str, Any] | None:
        events: dict[str, Any] = {}
        name = ""
        with urlopen(daemon.admin + "/page/frames") as stream:
            for line in stream:
                key, _, value = line.decode().strip().partition(": ")
                name = value if key == "event" else name
                if key == "data":
                    events[name] = json.loads(value)
                if name == "frame" and key == "data":
                    break
        queries = events["past"]["names"].index("queries") if events["past"]["names"] else None
        has_rates = queries is not None and any(row[queries] for _, row in events["past"]["rows"])
        return events if has_rates and any(events["sparks"]["namespaces"].get("llama", [])) else None

    events = eventually("rates and answers from before", told)
    assert all(len(row) == len(events["past"]["names"]) for _, row in events["past"]["rows"])
    assert any(answers > 0 for answers, _ in events["sparks"]["namespaces"]["llama"])


def test_the_atlas_says_who_holds_a_prefix(browser: Chrome, daemon: Daemon, fleet: Fleet) -> None:
    opened(browser, daemon, fleet)
    eventually("the atlas is drawn", lambda: active(browser, "#icicle"))
    eventually("queries are sampled", lambda: "sampled queries over" in text(browser, "#atlas-note"))
    # The hottest prefix is the first family's.
    eventually("the hottest", lambda: chosen_hottest(browser, len(fleet.families[0])))
    eventually("it is explained", lambda: "What its loss would cost" in text(browser, "#explained"))
    chain = fleet.families[0]
    key = ",".join(f'"{number:016x}"' for number in chain)
    target = f"{daemon.admin}/page/ask?namespace=llama&query=%7B%22sequence_hashes%22:[{key.replace(chr(34), '%22')}]%7D"
    with urlopen(target) as answer:
        reply = json.load(answer)
    said = text(browser, "#explained")
    assert f"{len(chain)} blocks deep, {16 * len(chain)} tokens" in said
    total = reply["holders_total"]
    # Workers go on storing meanwhile.
    assert int(said.split(" holders have all of it")[0].split("\n")[-1].replace(",", "")) <= total
    assert "could no longer be found" in said and "sampled queries" in said
    Select(browser.find_element(By.ID, "lens")).select_by_value("held")
    eventually("copies", lambda: "copies of blocks" in text(browser, "#atlas-note"))
    eventually("the atlas is drawn", lambda: active(browser, "#icicle"))


def chosen_hottest(browser: Chrome, blocks: int) -> bool:
    node = browser.execute_script("""
        return [...document.querySelectorAll('[role=treeitem][aria-level="1"]')].find((node) => parseFloat(node.style.left) === 0)
    """)
    if node is None or not node.text.startswith(f"{blocks} blocks "):
        return False
    browser.execute_script("arguments[0].click()", node)
    return True


def test_the_query_box_answers_tokens_and_hashes(browser: Chrome, daemon: Daemon, fleet: Fleet) -> None:
    opened(browser, daemon, fleet)
    form = Select(browser.find_element(By.ID, "ask-form-of"))
    box = browser.find_element(By.ID, "ask-text")
    form.select_by_value("sequence_hashes")
    box.send_keys(" ".join(f"{number:016x}" for number in fleet.families[0][:4]))
    box.send_keys(Keys.CONTROL, Keys.ENTER)
    eventually("an answer", lambda: "4 blocks asked for" in text(browser, "#answer"))
    assert "gpu-" in text(browser, "#answer table")
    form.select_by_value("tokens")
    box.clear()
    box.send_keys(", ".join(map(str, range(1, 41))))
    browser.find_element(By.CSS_SELECTOR, "#ask-form button").click()
    eventually("an answer", lambda: "2 blocks asked for; 0 holders" in text(browser, "#answer"))
    # They do not tell how many tokens their blocks have.
    assert f"{len(fleet.workers):,} holders not in this list may hold more than is known" in text(browser, "#answer")
    form.select_by_value("sequence_hashes")
    browser.execute_script("arguments[0].value = '00000000000000ff'", box)
    browser.find_element(By.CSS_SELECTOR, "#ask-form button").click()
    eventually("an answer", lambda: "1 block asked for; 0 holders" in text(browser, "#answer"))
    assert f"\n{len(fleet.broken)} holders not in this list" in text(browser, "#answer")
    form.select_by_value("tokens")
    for bad, says in (("1, two", "is no token"), ("", "at least one"), ("1 " * 9000, "too long for the page")):
        browser.execute_script("arguments[0].value = arguments[1]", box, bad)
        browser.find_element(By.CSS_SELECTOR, "#ask-form button").click()
        eventually(says, lambda says=says: says in text(browser, "#answer [role=alert]"))
    form.select_by_value("block_hashes")
    browser.execute_script("arguments[0].value = 'zz'", box)
    browser.expected_messages.append("status of 400")
    browser.find_element(By.CSS_SELECTOR, "#ask-form button").click()
    eventually("a refusal", lambda: "the query: " in text(browser, "#answer [role=alert]"))


HOSTILE = [
    "<img src=x onerror=pwned()>",
    "</div><script>pwned()</script>",
    '" onfocus="pwned()" autofocus="',
    "javascript:pwned()",
    "constructor",
    "__proto__",
    "\u202egnp.exe",
    "a" * 4000,
    "{{7*7}}${7*7}",
    "&lt;b&gt;",
]


def test_hostile_names_are_text(browser: Chrome, daemon: Daemon) -> None:
    added = [[number, "n", name, 0] for number, name in enumerate(HOSTILE)]
    facts = [[number, 1, 129, 0, 0, 0] for number in range(len(HOSTILE))]
    node = {
        "parent": None, "start": 0, "end": 1, "weight": 1, "some": 1, "all": 1, "exact": 0, "usable": 0,
        "names": ["<img src=x onerror=pwned()>/0"], "block": "\" onclick=\"pwned()",
    }  # fmt: skip
    atlas = {"total": 1, "seconds": 1, "partial": False, "left_out": 0, "block_size": 16, "nodes": [node]}
    stub = Stub(daemon, lambda: iter([frame({"added": added, "facts": facts}, len(HOSTILE))]), atlas)
    browser.expected_messages.append("status of 410")
    browser.get(stub.url)
    eventually("all are shown", lambda: sorted(names(browser)) == sorted(HOSTILE))
    eventually("the atlas is drawn", lambda: active(browser, "#icicle"))
    browser.execute_script("document.querySelector('[role=treeitem]').click()")
    eventually("the refusal is text", lambda: "<img src=x" in text(browser, "#explained"))
    browser.execute_script("document.querySelector('#grid-body .row').click()")
    eventually("the holder is told", lambda: text(browser, "#holder"))
    assert browser.execute_script("return typeof pwned") == "undefined"
    assert browser.execute_script("return document.scripts.length") == 1
    assert browser.execute_script("return document.images.length") == 1, "the one in the heading"
    assert browser.find_elements(By.CSS_SELECTOR, "[onerror], [onfocus], [onclick], main b > b, main script") == []
    assert "<script>" in browser.find_element(By.ID, "readiness").get_attribute("title")
    stub.close()


def test_ten_thousand_holders_stay_smooth(browser: Chrome, daemon: Daemon, record_property: Any) -> None:
    count, frames = 10_000, 8

    def changing() -> Iterator[dict[str, Any]]:
        added = [[number, "n", f"gpu-{number}", 0] for number in range(count)]
        for tick in range(frames):
            now = int(time.time() * 1e6)
            facts = [[number, number + tick, number % 7 == 0, 100 + tick, now, 0] for number in range(count)]
            first = {"added": added, "facts": facts}
            yield frame(first if tick == 0 else {"whole": False, "facts": facts}, count)
            time.sleep(0.5)

    nothing = {"total": 0, "seconds": 0, "partial": False, "left_out": 0, "block_size": 16, "nodes": []}
    stub = Stub(daemon, changing, nothing)
    browser.get(stub.url)
    eventually("all are counted", lambda: text(browser, "#fleet-count") == "10,000 holders")
    # Every frame of the animation while the table scrolls and everything changes.
    times = browser.execute_async_script("""
        const [done] = arguments, grid = document.getElementById('grid'), times = [];
        let last = performance.now();
        const step = (now) => {
            times.push(now - last);
            last = now;
            grid.scrollTop += 900;
            if (times.length < 150) requestAnimationFrame(step); else done(times);
        };
        requestAnimationFrame(step);
    """)
    times.sort()
    record_property("frame_ms_p50_p99", (times[75], times[148]))
    print(f"10,000 holders: a frame takes {times[75]:.1f} ms (p50), {times[148]:.1f} ms (p99)")
    assert len(browser.find_elements(By.CSS_SELECTOR, "#grid-body .row")) < 60
    browser.execute_script("document.getElementById('grid').focus()")
    press(browser, Keys.END)
    eventually("the last row", lambda: active(browser, "#grid").get_attribute("aria-rowindex") == "10001")
    stub.close()


def test_another_site_gets_nothing(daemon: Daemon) -> None:
    for path in ("/page/frames", "/page/page.js", "/page/ask?namespace=llama&query=%7B%7D"):
        request = Request(daemon.admin + path, headers={"sec-fetch-site": "cross-site"})
        with pytest.raises(Exception, match="403"):
            urlopen(request)
    request = Request(daemon.admin + "/", headers={"accept": "text/html"})
    with urlopen(request) as page:
        policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "trusted-types" in policy


def test_streams_are_few_and_come_back(daemon: Daemon) -> None:
    held = [urlopen(daemon.admin + "/page/frames") for _ in range(16)]
    with pytest.raises(Exception, match="503"):
        urlopen(daemon.admin + "/page/frames")
    assert urlopen(daemon.admin + "/livez").read() == b"ok"
    for stream in held:
        assert stream.readline().startswith(b"retry"), "no stream was closed for the requests beside it"
        stream.close()

    def room() -> bool:
        try:
            urlopen(daemon.admin + "/page/frames").close()
        except OSError:
            return False
        return True

    eventually("there is room again", room)


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_everything_on_the_page_is_in_reach(browser: Chrome, daemon: Daemon, fleet: Fleet, width: int) -> None:
    """What the rules of axe find: names, roles, contrast, in both colour schemes. Nothing is wider than the screen."""
    resize(browser, width, 1000)
    opened(browser, daemon, fleet)
    show_all(browser, fleet)
    require_in_reach(browser, width)


def show_all(browser: Chrome, fleet: Fleet) -> None:
    """Opens a holder and a prefix."""
    eventually("the atlas is drawn", lambda: chosen_hottest(browser, len(fleet.families[0])))
    eventually("it is explained", lambda: "What its loss would cost" in text(browser, "#explained"))
    browser.execute_script("document.querySelector('#matrix .cell.doubt, #matrix .cell.passing').click()")
    eventually("a holder is told", lambda: "Epoch and number" in text(browser, "#numbers"))


def test_screenshots(browser: Chrome, daemon: Daemon, fleet: Fleet, tmp_path: Path) -> None:
    """Pictures for the documentation; KVATLAS_TEST_WRITE_PAGES=1 puts them there."""
    opened(browser, daemon, fleet)
    show_all(browser, fleet)
    seconds = 20 if os.environ.get("KVATLAS_TEST_WRITE_PAGES") else 1
    wanted = time.monotonic() + seconds
    eventually("some seconds of rates", lambda: time.monotonic() > wanted)
    directory = REPOSITORY / "deploy" if os.environ.get("KVATLAS_TEST_WRITE_PAGES") else tmp_path
    for theme in ("light", "dark"):
        Select(browser.find_element(By.ID, "theme")).select_by_value(theme)
        for name, width, height in ((f"page-{theme}", DESK, 1700), (f"page-phone-{theme}", PHONE, 1700)):
            resize(browser, width, height)
            drawn = "return document.querySelector('.plot').viewBox.baseVal.width === document.querySelector('.plot').clientWidth"
            eventually("it is drawn in that size", lambda drawn=drawn: browser.execute_script(drawn))
            shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "webp", "quality": 70})
            picture = base64.b64decode(shot["data"])
            assert 10_000 < len(picture) < SCREENSHOT_BYTES_MAX
            (directory / f"{name}.webp").write_bytes(picture)


def test_an_open_page_delays_no_stop(browser: Chrome) -> None:
    daemon = Daemon()
    try:
        browser.get(daemon.admin + "/")
        eventually("it is ready", lambda: text(browser, "#readiness") == "ready")
        browser.expected_messages += ["ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING"]
        daemon.stop()
        eventually("the page notices", lambda: text(browser, "#readiness") == "no connection")
    finally:
        daemon.kill()


def test_a_daemon_that_hangs_is_no_connection(browser: Chrome) -> None:
    # At the end the daemon goes before the page.
    browser.expected_messages += ["ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING"]
    daemon = Daemon()
    try:
        browser.get(daemon.admin + "/")
        eventually("it is ready", lambda: text(browser, "#readiness") == "ready")
        daemon.hang()
        eventually("the page notices", lambda: text(browser, "#readiness") == "no connection")
        daemon.go_on()
        eventually("it is ready again", lambda: text(browser, "#readiness") == "ready")
    finally:
        daemon.go_on()
        daemon.kill()
