#!/usr/bin/env python3
"""Compares the descriptions of the alerts with their entries in the runbook, deploy/operating.md#alerts, as `kvatlas explain` prints them.

    deploy/prometheus/annotate.py            says which file is to be written again, and ends with 1 then
    deploy/prometheus/annotate.py --write    writes them: in alerts.yml, in what alerts_test.yml expects, and in the chart's copy
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RULES, TESTS, CHART = HERE / "alerts.yml", HERE / "alerts_test.yml", HERE.parent / "helm/kvatlas/files/alerts.yml"


def plain(markdown: str) -> str:
    """A text without Markdown's marks, in one line. Of a link, its text remains."""
    return " ".join(re.sub(r"\[([^\[\]]*)\]\([^)]*\)", r"\1", markdown).translate({ord("`"): None, ord("*"): None}).split())


def entries() -> dict[str, str]:
    """What the runbook says of each alert."""
    runbook = (HERE.parent / "operating.md").read_text()
    sections = re.findall(r"^### (Kvatlas\w+)\n(.*?)(?=^##)", runbook, re.MULTILINE | re.DOTALL)
    return {alert: plain(text) for alert, text in sections}


def annotated(text: str, said: dict[str, str]) -> str:
    """The rules, or their tests, with these descriptions."""
    lines, alert = [], ""
    for line in text.splitlines():
        if named := re.search(r"\balert(?:name)?: (Kvatlas\w+)", line):
            alert = named.group(1)
        if described := re.match(r" +description: ", line):
            line = described.group(0) + json.dumps(said[alert], ensure_ascii=False)
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    said = entries()
    rules = annotated(RULES.read_text(), said)
    wanted = {RULES: rules, TESTS: annotated(TESTS.read_text(), said), CHART: rules}
    wrong = [path for path, text in wanted.items() if path.read_text() != text]
    for path in wrong:
        if "--write" in sys.argv:
            path.write_text(wanted[path])
        else:
            print(f"{path}: the descriptions are not those of the runbook; run deploy/prometheus/annotate.py --write")
    sys.exit(1 if wrong and "--write" not in sys.argv else 0)


if __name__ == "__main__":
    main()
