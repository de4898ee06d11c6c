"""Takes out of the wheels of vLLM and SGLang the few Python files that their caches and publishers are made of.

    python3 fetch.py FOLDER

The wheels are fetched by pip, and thrown away. FOLDER gets vllm/ and sglang/. Does nothing where both are there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

VLLM = "0.33.0"
SGLANG = "0.5.23"


def _is_of_vllm(name: str) -> bool:
    folders = ("vllm/v1/core/", "vllm/utils/", "vllm/v1/engine/__init__", "vllm/v1/hisparse/block_pool", "vllm/v1/kv_cache_", "vllm/v1/metrics/")
    files = ("vllm/distributed/kv_events.py", "vllm/v1/outputs.py", "vllm/v1/request.py", "vllm/v1/utils.py")
    return name in files or (name.startswith(folders) and name.endswith(".py"))


def _is_of_sglang(name: str) -> bool:
    events = "sglang/srt/disaggregation/kv_events.py"
    return name == events or (name.startswith("sglang/srt/mem_cache/") and name.endswith(".py"))


def _fetch(package: str, is_needed: Callable[[str], bool], folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        platform = ["--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_34_x86_64"]
        platform += ["--platform", "manylinux_2_28_x86_64", "--platform", "any"]
        subprocess.run([*pip, *platform, "--no-cache-dir", "--dest", wheels, package], check=True)
        [wheel] = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            fresh = Path(wheels) / "files"
            archive.extractall(fresh, [name for name in archive.namelist() if is_needed(name)])
        # Renamed last, so that what is there is whole.
        [top] = fresh.iterdir()
        top.rename(folder / top.name)


def main() -> None:
    """Fetches what is missing."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "vllm/v1/request.py").exists():
        # Of a version of this file that took fewer.
        shutil.rmtree(folder / "vllm", ignore_errors=True)
        _fetch(f"vllm=={VLLM}", _is_of_vllm, folder)
    if not (folder / "sglang").exists():
        _fetch(f"sglang=={SGLANG}", _is_of_sglang, folder)


main()
