#!/usr/bin/env python3
"""Prints each name that two types of the product share, with their places. Fails where there is one. Types of tests do not count."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# At the start of a line: types inside of functions and macros have a scope of their own.
TYPE = re.compile(r"(?:pub(?:\([^)]*\))? )?(?:struct|enum|trait|type|union) (\w+)")
# A module of tests is the last item of its file.
TEST = re.compile(r"#\[cfg\(test\)\]\s*(?:(?:pub\S* )?use [^;]*;|mod \w+\s*\{.*)", re.DOTALL)
OF_TESTS = re.compile(r"/(?:tests|examples|loom)(?:/|\.rs$)|_tests\.rs$")


def types(path: Path) -> Iterator[tuple[str, int]]:
    """Names of the types in a file, each with its line."""
    text = TEST.sub(lambda test: "\n" * test[0].count("\n"), path.read_text())
    for number, line in enumerate(text.splitlines(), 1):
        if declared := TYPE.match(line):
            yield declared[1], number


def main() -> None:
    places = defaultdict(list)
    for path in sorted((ROOT / "src").rglob("*.rs")):
        where = path.relative_to(ROOT).as_posix()
        if "target" in path.parts or OF_TESTS.search(where):
            continue
        for name, number in types(path):
            places[name].append(f"{where}:{number}")
    shared = [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]
    if shared:
        sys.exit("\n".join([f"{len(shared)} names stand for two types or more:", *shared]))


if __name__ == "__main__":
    main()
