"""What is wrong, as the page of the admin listener tells it: who, since when, and what to do."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import kvatlas
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from site_of_tests import (
    DESK,
    NAMESPACE,
    PHONE,
    Broker,
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


def test_what_is_wrong_stands_first_with_who_and_what_to_do(browser: Chrome, daemon: Daemon, fleet: Fleet) -> None:
    opened(browser, daemon, fleet)

    def told_of_gaps() -> str | None:
        # Those that are broken are asked now and then, and are «resyncing», too, while they are.
        rows = eventually_there(lambda: [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#troubles li")])
        return next((row for row in rows if row.startswith("gap ")), None)

    told = eventually("the trouble is told", told_of_gaps)
    assert told.startswith(f"gap {fleet.broken[0]}/0, {fleet.broken[1]}/0 of llama"), told
    assert "What to do: nothing if the publisher answers questions" in told and "kvatlas explain gap" in told
    assert f"kvatlas admin resync llama {fleet.broken[0].removesuffix('/0')} 0 copy" in told, told
    eventually("its cost is told", lambda: re.search(r"Cost: .*\d+ % of answers inexact", told_of_gaps() or ""))
    eventually("its age is told", lambda: re.search(r" since \d\d:\d\d:\d\d \(", told_of_gaps() or ""))
    above = browser.execute_script(
        "return document.getElementById('trouble').getBoundingClientRect().bottom <= document.getElementById('fleet').getBoundingClientRect().top"
    )
    assert above, "the trouble is not above the fleet"


def end(daemon: Daemon, browser: Chrome) -> None:
    """Ends a daemon whose page is open: the page asks for it again."""
    browser.expected_messages += ["ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING"]  # type: ignore[attr-defined]
    daemon.kill()


def rows_of_trouble(browser: Chrome) -> list[str]:
    return eventually_there(lambda: [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#troubles li") if row.is_displayed()])


def row_of_trouble(browser: Chrome, beginning: str) -> str:
    """The row of what is wrong that begins so, once it is there."""
    return eventually(beginning, lambda: next((row for row in rows_of_trouble(browser) if row.startswith(beginning)), None))


def test_a_daemon_that_is_not_ready_says_why_and_what_to_do(browser: Chrome, tmp_path: Path) -> None:
    broker = Broker(tmp_path / "broker", "")
    daemon = Daemon(nats=f"nats://{broker.address}")
    try:
        browser.get(daemon.admin + "/")
        eventually("it is ready", lambda: text(browser, "#readiness") == "ready")
        broker.stop()
        told = row_of_trouble(browser, "not ready waiting for a NATS server to be reached")
        assert "What to do: see that a NATS server runs at nats.url and takes the credentials" in told, told
        assert "kvatlas explain KvatlasNotReady" in told, told
    finally:
        end(daemon, browser)


def test_snapshots_that_fail_are_told_until_one_is_written(browser: Chrome, tmp_path: Path) -> None:
    directory, away = tmp_path / "snapshots", tmp_path / "away"
    daemon = Daemon("--snapshots-directory", str(directory), "--snapshots-interval-seconds", "1")
    try:
        browser.get(daemon.admin + "/")
        eventually("it is ready", lambda: text(browser, "#readiness") == "ready")
        assert rows_of_trouble(browser) == []
        directory.rename(away)
        # Not even root can write to a directory that is none.
        directory.touch()
        told = row_of_trouble(browser, f"snapshots fail cannot create {directory}")
        assert "What to do: see to the snapshot directory" in told and "kvatlas explain KvatlasSnapshotsFail" in told, told
        assert re.search(r" since \d\d:\d\d:\d\d \(", told), told
        directory.unlink()
        away.rename(directory)
        eventually("one is written again", lambda: not browser.find_element(By.ID, "trouble").is_displayed())
    finally:
        end(daemon, browser)


def test_who_has_no_holder_is_told_with_since_when_and_what_to_do(browser: Chrome, daemon: Daemon) -> None:
    now = int(time.time() * 1e6)
    dropped = [("odd", "undecodable", 60), ("old", "stale_epoch", 60), ("tall", "other_settings", 3), ("wide", "other_settings", 240)]
    refused = [{"worker": worker, "reason": reason, "since_us": now - age * 1_000_000} for worker, reason, age in dropped]
    clocks = {"ahead": ["early/0"], "epochs_ahead": 1, "ahead_since_us": now - 7_200_000_000}
    broken = [{"worker": "vllm-3", "rank": 1, "promised_blocks": 1000, "missing_blocks": 119}]
    known = [namespace("n", 0, refused=refused, broken_promises=broken, **clocks)]
    strays = [{"namespace": "new", "worker": "a", "reason": "undecodable", "detail": "no map", "messages": 7, "since_us": now - 5_000_000}]
    stub = Stub(daemon, lambda: iter([frame({}, 0, known, ready=True, now_us=now, strays=strays)]))
    browser.get(stub.url)
    stray = row_of_trouble(browser, "nothing is taken of namespace new, lastly from a (undecodable): no map since ")
    assert "(5.00 s)" in stray and "What to do: correct it. kvatlas explain undecodable" in stray, stray
    undecodable = row_of_trouble(browser, "all batches dropped odd (undecodable) of n since ")
    assert "(1 min)" in undecodable, undecodable
    assert "What to do: correct it. kvatlas explain undecodable" in undecodable, undecodable
    old = row_of_trouble(browser, "all batches dropped old (stale_epoch) of n since ")
    assert "What to do: name it anew; kvatlas admin forget n old. kvatlas admin forget n old copy" in old, old
    settings = row_of_trouble(browser, "all batches dropped tall, wide (other_settings) of n since ")
    assert "(4 min)" in settings and "What to do: give it the size. kvatlas explain other_settings" in settings, settings
    clock = row_of_trouble(browser, "clock ahead early/0 of n since ")
    assert "(2 h)" in clock and "What to do: run an NTP client." in clock, clock
    promises = row_of_trouble(browser, "promises broken 11 % of what exact answers promise of vllm-3/1 of n is not found")
    assert "kvatlas admin resync n vllm-3 1 copy" in promises, promises
    assert len(rows_of_trouble(browser)) == 6
    stub.close()


def test_a_shard_that_refuses_is_not_one_to_start(browser: Chrome, daemon: Daemon) -> None:
    silent = {"shard": 0, "shards": 2, "since_us": 0}
    missing = [silent, silent | {"shard": 1, "namespace": "n", "refusal": "all is dropped"}]
    outage = {"since_us": 0, "error": "no daemon listens"}
    stub = Stub(daemon, lambda: iter([frame({}, 0, ready=True, missing_shards=missing, shard_outage=outage)]))
    browser.get(stub.url)
    row_of_trouble(browser, "no answers no daemon listens since ")
    row_of_trouble(browser, "shard missing shard 0/2 since ")
    refuses = row_of_trouble(browser, "shard refuses shard 1/2 about n: all is dropped since ")
    assert "What to do: mend what the shard says" in refuses, refuses
    stub.close()


def test_a_silent_broker_is_the_trouble_of_all_holders(browser: Chrome, daemon: Daemon) -> None:
    now = int(time.time() * 1e6)
    change = {"added": [[1, "n", "gpu-1", 0], [2, "n", "gpu-2", 0]], "facts": [[1, 1, 256, 0, 0, 0], [2, 1, 257, 0, 0, 0]]}
    stub = Stub(daemon, lambda: iter([frame(change, 2, [namespace("n", 0, 2)], ready=True, now_us=now, broker_silent_us=9_000_000)]))
    browser.get(stub.url)
    silent = row_of_trouble(browser, "NATS server silent nothing comes from it")
    assert "(9.00 s)" in silent and "What to do: see whether the NATS server runs" in silent, silent
    # What does not follow from the silence is told beside it.
    assert [row.split(" ")[0] for row in rows_of_trouble(browser)] == ["NATS", "gap"]
    assert rows_of_trouble(browser)[1].startswith("gap gpu-2/0 of n")
    stub.close()


def test_a_stream_without_a_leader_is_no_silent_broker(browser: Chrome, daemon: Daemon) -> None:
    now = int(time.time() * 1e6)
    silence = {"broker_silent_us": 9_000_000, "stream_trouble": "the stream S has no leader"}
    stub = Stub(daemon, lambda: iter([frame({}, 0, ready=True, now_us=now, **silence)]))
    browser.get(stub.url)
    silent = row_of_trouble(browser, "stream silent the stream S has no leader")
    assert "(9.00 s)" in silent and "What to do: correct what it names" in silent, silent
    stub.close()


def test_a_refused_stream_is_told_in_the_words_of_the_daemon(browser: Chrome, daemon: Daemon) -> None:
    refusal = {"error": "too many pages are open; close one, or try again later"}
    stub = Stub(daemon, lambda: iter([]), answers={"/page/frames": (503, refusal)})
    browser.expected_messages.append("status of 503")  # type: ignore[attr-defined]
    browser.get(stub.url)
    eventually("it is told", lambda: text(browser, "#readiness") == f"no connection: {refusal['error']}")
    stub.close()


def test_rows_without_room_are_counted(browser: Chrome, daemon: Daemon) -> None:
    refused = [{"worker": "odd", "reason": "undecodable", "since_us": 0}]
    many = [namespace(f"n-{number}", 0, refused=refused) for number in range(9)]
    stub = Stub(daemon, lambda: iter([frame({}, 0, many)]))
    browser.get(stub.url)
    eventually("all are told", lambda: len(rows_of_trouble(browser)) == 9)
    *rows, last = rows_of_trouble(browser)
    assert rows[0].startswith("not ready ") and rows[7].startswith("all batches dropped odd (undecodable) of n-6"), rows
    assert last == "and 2 more: all batches dropped kvatlas doctor copy", last
    stub.close()


def test_a_sound_daemon_has_no_trouble(browser: Chrome) -> None:
    sound = Daemon()
    try:
        browser.get(sound.admin + "/")
        eventually("it is ready", lambda: text(browser, "#readiness") == "ready")
        assert not browser.find_element(By.ID, "trouble").is_displayed()
    finally:
        end(sound, browser)


async def tell_outcomes(nats: str) -> None:
    """Tells what requests found: of one holder less than was promised, of the other more."""
    connection = await kvatlas.connect(nats)
    found = {"gpu-0": 16 * 210, "gpu-1": 16 * 150}
    outcomes = [kvatlas.Outcome(worker, 0, 200, tokens, None, exact=True) for worker, tokens in found.items()]
    await kvatlas.QueryClient(connection).tell(NAMESPACE, outcomes)
    await connection.flush()
    await connection.close()


def test_promised_and_found_are_compared_where_routers_tell(browser: Chrome) -> None:
    daemon = Daemon()
    fleet = Fleet(daemon.nats, 2)
    try:
        opened(browser, daemon, fleet)
        panel = browser.find_element(By.ID, "promises")
        assert not panel.is_displayed(), "nobody has told anything"

        def rows() -> list[list[str]] | None:
            # The daemon may not hear yet of what is told: it is told again.
            asyncio.run(tell_outcomes(daemon.nats))
            said = browser.execute_script("""
                return [...document.querySelectorAll('table.promised tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText.trim()))
            """)
            return said if panel.is_displayed() and len(said) == 2 else None

        short, whole = eventually("both are told", rows)
        assert (short[0], short[3], short[5]) == ("gpu-1/0", "25 %", ""), short
        assert (whole[0], whole[3]) == ("gpu-0/0", "0 %"), whole
        blocks = [[int(number.replace(",", "")) for number in row[1:3]] for row in (short, whole)]
        assert all(promised > 0 and promised % 200 == 0 for promised, _ in blocks), blocks
        assert [found * 4 for _, found in blocks] == [blocks[0][0] * 3, blocks[1][0] * 4], blocks
        assert int(whole[5].replace(",", "")) * 20 == blocks[1][0], whole
        assert "2 holders of llama" in text(browser, "#promises-note")
        assert "state-degraded" in browser.find_element(By.CSS_SELECTOR, "table.promised tbody td:nth-child(4)").get_attribute("class")
        told = row_of_trouble(browser, "promises broken 25 % of what exact answers promise of gpu-1/0 of llama is not found")
        assert "What to do: compare the engine's version" in told and "kvatlas admin resync llama gpu-1 0 copy" in told, told
        for width in (DESK, PHONE):
            resize(browser, width, 1000)
            require_in_reach(browser, width)
    finally:
        fleet.stop()
        end(daemon, browser)
