"""The bridge by itself: batches a second that a bare subscriber of NATS gets from it, beside a bare subscriber of the engine.

    relayed.py --kvatlas BINARY [--rounds N] [--batches N] [--seed N]

The publisher is pyzmq's, with payloads as vLLM sends them, as fast as one process can. Prints a table in Markdown. compare.py has the same
measurement in its table.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
from publisher import BLOCK, Publisher

TICKS = os.sysconf("SC_CLK_TCK")


def payloads_of(seeded: random.Random, batches: int) -> list[bytes]:
    """Batches of four blocks each, all different."""
    payloads = []
    for _ in range(batches):
        names = [seeded.getrandbits(63) for _ in range(4)]
        tokens = [seeded.randrange(128_000) for _ in range(4 * BLOCK)]
        payloads.append(msgspec.msgpack.encode([0.0, [["BlockStored", names, None, tokens, BLOCK, None, "GPU"]], 0]))
    return payloads


class Relayed:
    """A publisher, a bridge that follows it, and a broker. No daemon."""

    def __init__(self, context: zmq.Context[Any], kvatlas: str, folder: Path) -> None:
        self._publisher = Publisher(context, 0)
        free = context.socket(zmq.PUB)
        self._port = free.bind_to_random_port("tcp://127.0.0.1")
        free.close(0)
        server = os.environ.get("NATS_SERVER_BIN", ".tools/nats-server")
        publishing, replaying = self._publisher.ports
        engine = f"0=tcp://127.0.0.1:{publishing},replay=tcp://127.0.0.1:{replaying}"
        url = f"nats://127.0.0.1:{self._port}"
        bridge = [kvatlas, "bridge", "--nats-url", url, "--admin-listen", "off", "--model", "m", "--engine", engine]
        log = (folder / "relayed.log").open("wb")
        commands = [[server, "--addr", "127.0.0.1", "--port", str(self._port)], bridge]
        self.processes = [subprocess.Popen(command, stdout=log, stderr=log) for command in commands]

    def pause(self) -> None:
        """Nothing of it runs, until it is measured again."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    def rate(self, payloads: list[bytes]) -> float:
        """How many of these batches a second arrive as events, from the first that is sent."""
        self._signal(signal.SIGCONT)
        counter = [sys.executable, str(Path(__file__).with_name("count_nats.py")), str(self._port), str(len(payloads))]
        with subprocess.Popen(counter, stdout=subprocess.PIPE) as counting:
            assert counting.stdout is not None
            self._await(counting.stdout.readline(), b"subscribed\n")
            # What was stored before is forgotten, and the counter sees that the bridge follows.
            self._publisher.clear()
            self._await(counting.stdout.readline(), b"follows\n")
            begun = time.monotonic()
            for payload in payloads:
                self._publisher.send(payload)
            self._await(counting.stdout.readline(), b"done\n")
            return len(payloads) / (time.monotonic() - begun)

    @staticmethod
    def _await(line: bytes, expected: bytes) -> None:
        if line != expected:
            raise RuntimeError(f"the counter of NATS said {line!r} instead of {expected!r}")

    def processor_seconds(self) -> list[float]:
        """What the broker and the bridge have used of the processors."""
        used = []
        for process in self.processes:
            fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
            used.append((int(fields[11]) + int(fields[12])) / TICKS)
        return used

    def close(self) -> None:
        """Ends both."""
        for process in self.processes:
            process.kill()
            process.wait()


def main() -> int:
    """One table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kvatlas", required=True)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--batches", type=int, default=60_000)
    arguments.add_argument("--seed", type=int, default=1)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        relayed = Relayed(zmq.Context(), given.kvatlas, folder)
        rates: dict[str, list[float]] = {"bare subscriber": [], "relayed by the bridge": []}
        used = []
        try:
            for number in range(given.rounds):
                payloads = payloads_of(random.Random(given.seed + number), given.batches)
                before = relayed.processor_seconds()
                rates["relayed by the bridge"].append(relayed.rate(payloads))
                used.append([1e6 * (two - one) / given.batches for one, two in zip(before, relayed.processor_seconds(), strict=True)])
                relayed.pause()
                rates["bare subscriber"].append(Publisher.bare(payloads))
        except BaseException:
            print((folder / "relayed.log").read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            relayed.close()
    print("| batches of 4 blocks | a second | least | most |\n|---|---|---|---|")
    for title, all_rates in rates.items():
        middle = sorted(all_rates)[len(all_rates) // 2]
        print(f"| {title} | {middle:,.0f} | {min(all_rates):,.0f} | {max(all_rates):,.0f} |")
    for name, values in zip(("broker", "bridge"), zip(*used, strict=True), strict=True):
        print(f"{name}: {sorted(values)[len(values) // 2]:.1f} µs of a processor a batch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
