#!/usr/bin/env python3
"""Fails where a lock file beside the main one names other dependencies of our crates than their `Cargo.toml`.

Benches with contenders are a workspace of their own, which tests do not build. With an outdated lock file, `cargo build --locked` refuses it.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ["benches/peers/Cargo.lock"]


def locked(path: Path) -> dict[str, set[str]]:
    """The names of the dependencies of each crate that has no source, so that it lies in a folder."""
    packages: list[dict[str, Any]] = tomllib.loads(path.read_text())["package"]
    return {
        package["name"]: {dependency.split()[0] for dependency in package.get("dependencies", [])}
        for package in packages
        if "source" not in package
    }


def needed(manifest: Path) -> set[str]:
    """The names of the dependencies that a crate always has."""
    entries: dict[str, Any] = tomllib.loads(manifest.read_text())["dependencies"]
    return {name for name, entry in entries.items() if not entry.get("optional")}


def main() -> int:
    known = locked(ROOT / "Cargo.lock")
    outdated = False
    for lock in LOCKS:
        for name, names in locked(ROOT / lock).items():
            manifest = ROOT / "src" / name.removeprefix("kvatlas-") / "Cargo.toml"
            if name not in known or not manifest.exists():
                continue
            # The main lock file has the dependencies of tests, too.
            wrong = (needed(manifest) - names) | (names - known[name])
            for dependency in sorted(wrong):
                print(f"{lock}: `{dependency}` of {name} differs from its Cargo.toml")
                outdated = True
    return int(outdated)


if __name__ == "__main__":
    sys.exit(main())
