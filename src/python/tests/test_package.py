"""An installation from the checkout leaves nothing in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import REPOSITORY

PACKAGE = REPOSITORY / "src/python"


def files() -> dict[Path, int]:
    """All that lies in the package's folder, with the times of files. What Python itself compiles is no matter of pip's."""
    found = (path for path in PACKAGE.rglob("*") if "__pycache__" not in path.parts)
    return {path: path.stat().st_mtime_ns if path.is_file() else 0 for path in found}


@pytest.mark.parametrize("way", [[], ["--editable"]])
def test_an_installation_leaves_nothing_in_the_checkout(tmp_path: Path, way: list[str]) -> None:
    before = files()
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed", "--prefix", str(tmp_path)]
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, *way]
    subprocess.run([*install, str(PACKAGE)], check=True, timeout=60)
    assert list(tmp_path.rglob("kvatlas-*.dist-info/METADATA"))
    assert files() == before
