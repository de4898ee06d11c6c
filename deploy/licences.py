#!/usr/bin/env python3
"""Writes licences.md, the licences of everything that is linked into the program. With --check, compares it instead.

Either way it holds the licences and the duplicates of all dependencies, tests and benches included, against deny.toml, and fails where
that does not allow one. Advisories need cargo-deny.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "deploy/licences.md"
DENY = tomllib.loads((ROOT / "deny.toml").read_text())

Package = dict[str, Any]


def cargo(*arguments: str) -> str:
    return subprocess.run(["cargo", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def packages() -> dict[tuple[str, str], Package]:
    found = json.loads(cargo("metadata", "--locked", "--format-version=1"))["packages"]
    return {(package["name"], package["version"]): package for package in found}


def built(edges: str, *of: str) -> set[tuple[str, str]]:
    """The crates of a build of these packages for the platforms of deny.toml."""
    crates = set()
    for target in DENY["graph"]["targets"]:
        tree = cargo("tree", "--locked", *of, "--target", target, "--edges", edges, "--prefix", "none", "--format", "{p}")
        for line in filter(None, tree.splitlines()):
            name, version = line.split()[:2]
            crates.add((name, version.removeprefix("v")))
    return crates


def is_allowed(expression: str) -> bool:
    """Whether an SPDX expression can be met by the licences that deny.toml allows."""
    words = re.findall(r"[()]|[^\s()/]+|/", expression)
    at = 0

    def term() -> bool:
        nonlocal at
        word = words[at]
        at += 1
        if word == "(":
            met = either()
            at += 1
            return met
        if at < len(words) and words[at] == "WITH":
            word = f"{word} WITH {words[at + 1]}"
            at += 2
        return word in DENY["licenses"]["allow"]

    def both() -> bool:
        nonlocal at
        met = term()
        while at < len(words) and words[at] == "AND":
            at += 1
            met = term() and met
        return met

    def either() -> bool:
        nonlocal at
        met = both()
        while at < len(words) and words[at] in ("OR", "/"):
            at += 1
            met = both() or met
        return met

    return either()


def check_licences(crates: set[tuple[str, str]], known: dict[tuple[str, str], Package]) -> list[str]:
    troubles = []
    used = set()
    for crate in sorted(crates):
        licence = known[crate]["license"] or "none"
        used |= set(re.findall(r"[^\s()/]+(?: WITH [^\s()/]+)?", licence))
        if not is_allowed(licence):
            troubles.append(f"{crate[0]} {crate[1]}: the licence {licence} is not allowed by deny.toml")
    unused = set(DENY["licenses"]["allow"]) - used
    return troubles + [f"deny.toml allows {licence}, which no dependency has" for licence in sorted(unused)]


def check_duplicates(crates: set[tuple[str, str]]) -> list[str]:
    skipped = [skip["crate"].split("@") for skip in DENY["bans"]["skip"]]
    versions: dict[str, list[str]] = {}
    for name, version in crates:
        versions.setdefault(name, []).append(version)
    troubles = []
    for name, found in sorted(versions.items()):
        left = [version for version in found if not any(name == other and f"{version}.".startswith(f"{prefix}.") for other, prefix in skipped)]
        if len(found) > 1 and len(left) > 1:
            troubles.append(f"{name} comes in the versions {', '.join(sorted(left))}; deny.toml skips none of them")
    for name, prefix in skipped:
        found = versions.get(name, [])
        if len(found) < 2 or not any(f"{version}.".startswith(f"{prefix}.") for version in found):
            troubles.append(f"deny.toml skips {name} {prefix}, which is no duplicate")
    return troubles


def page(crates: set[tuple[str, str]], known: dict[tuple[str, str], Package]) -> str:
    rows = [
        f"| `{name}` | {version} | {known[name, version]['license']} | {known[name, version]['repository'] or ''} |"
        for name, version in sorted(crates)
        if known[name, version]["source"]
    ]
    head = [
        "# Licences",
        "",
        "The crates that are linked into `kvatlas` on Linux, made by [licences.py](licences.py) from `Cargo.lock`. kvatlas itself is Apache-2.0.",
        "What may come in is in [deny.toml](../deny.toml).",
        "",
        "| crate | version | licence | source |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def main() -> None:
    known = packages()
    everything = built("normal,build,dev", "--workspace")
    troubles = check_licences(everything, known) + check_duplicates(everything)
    text = page(built("normal,no-proc-macro", "--package", "kvatlas"), known)
    if "--check" in sys.argv:
        if not PAGE.exists() or PAGE.read_text() != text:
            troubles.append("deploy/licences.md is not as Cargo.lock is; write it anew with deploy/licences.py")
    else:
        PAGE.write_text(text)
    if troubles:
        sys.exit("licences: " + "\nlicences: ".join(troubles))
    print(f"licences: {len(everything)} crates are allowed by deny.toml; {text.count(chr(10)) - 7} are linked into the program")


if __name__ == "__main__":
    main()
