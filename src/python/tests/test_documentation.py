"""The programs in the documentation run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from processes import REPOSITORY, Broker, Daemon
from world import world

from kvatlas import Stored, block_hashes, sequence_hashes


def programs(page: str) -> list[str]:
    """The blocks of Python of a page that are whole programs."""
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)
    return [block for block in blocks if "import " in block]


def run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_the_programs_of_the_clients_page(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url):
        pass
    publish, vectors = programs("deploy/clients.md")
    assert run(publish, broker.url) == "gpu-0 holds 3 of 4 blocks\n"
    assert run(vectors) == "all block hashes are the contract's\n"


async def test_the_program_of_the_wire_contract(broker: Broker, daemon: Daemon) -> None:
    async with world(broker.url):
        pass
    [program] = programs("deploy/wire-contract.md")
    printed = run(program, broker.url)
    assert "'matched_blocks': 2, 'exact': True" in printed
    assert "'matched_blocks': 1, 'exact': True" in printed


# What each program prints. Whether the whole of the first answer is certain depends on when it is asked for.
PRINTED = [
    r"other: 1 of 4 blocks to reuse, exact: True\ncertain as a whole: (True|False)\n",
    r"gpu-0 holds 6 of 8 blocks\nother holds 1 of 8 blocks\n",
    r"QueryReply\(.*'worker': 'gpu-0', 'rank': 0, 'matched_blocks': 2, .*\)\n",
]


@pytest.mark.parametrize("which", [1, 2])
async def test_the_programs_that_publish_need_nobody_else(broker: Broker, daemon: Daemon, which: int) -> None:
    async with world(broker.url) as here:
        await here.unknown("llama")
        program = programs("src/python/README.md")[which].replace("nats://127.0.0.1:4222", broker.url)
        expected = PRINTED[which].removesuffix(r"other holds 1 of 8 blocks\n")
        assert re.fullmatch(expected, run(program), re.DOTALL)


@pytest.mark.parametrize("which", range(len(PRINTED)))
async def test_the_programs_of_the_package_page(broker: Broker, daemon: Daemon, which: int) -> None:
    async with world(broker.url) as here:
        # So that the namespace is there to be asked about.
        chain = sequence_hashes(block_hashes(list(range(1, 65))))
        await (await here.publisher("other")).publish(Stored(chain[:1]))
        await here.matching(chain, [("other", 0, 1, True)])
        pages = programs("src/python/README.md")
        assert len(pages) == len(PRINTED)
        assert "nats://127.0.0.1:4222" in pages[which]
        # A router's patience is short; that of a test on a busy machine is not.
        program = pages[which].replace("patience=0.05", "patience=30")
        printed = run(program.replace("nats://127.0.0.1:4222", broker.url))
        assert re.fullmatch(PRINTED[which], printed, re.DOTALL), printed
