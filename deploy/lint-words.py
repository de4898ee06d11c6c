#!/usr/bin/env python3
"""Prints each doc comment that begins with What, Who, Where and the like, and not with the thing. Fails where there is one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "benches")
FIRST = re.compile(r"[\[`]*(What|Who|Whom|Whose|Where|Those|These|It|None|Of)\b(?!')")
DOC = re.compile(r"\s*(?:///(?!/)|//!) ?(.*)")


def offenders(path: Path) -> Iterator[str]:
    """First lines of doc comments that begin with one of the words, with their places."""
    is_inside = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        doc = DOC.match(line)
        if doc and not is_inside and FIRST.match(doc[1]):
            yield f"{path.relative_to(ROOT)}:{number}: {doc[1]}"
        is_inside = doc is not None


def main() -> None:
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.rs"))
    found = [line for path in files for line in offenders(path)]
    if found:
        sys.exit("\n".join(["a doc comment begins with the thing that it describes:", *found]))


if __name__ == "__main__":
    main()
