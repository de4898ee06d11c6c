"""The records by which Dynamo's processes find each other: files in a folder, or keys in etcd."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

Record = dict[str, Any]


class Records(Protocol):
    """A place for records."""

    # As kvatlas names it.
    place: str
    # The variables that tell Dynamo of it.
    environment: dict[str, str]

    def below(self, bucket: str) -> dict[str, Record]:
        """The records of a bucket, such as `v1/instances`, by their keys."""
        ...


class Files:
    """A folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.place = folder, f"file:{folder}"
        self.environment = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(folder)}

    def below(self, bucket: str) -> dict[str, Record]:
        """The records of a bucket by their keys."""
        folder = self._folder / bucket
        texts = {}
        for path in folder.iterdir() if folder.exists() else ():
            # Files come and go; one that is being written has a name of its own.
            with contextlib.suppress(FileNotFoundError):
                if not path.name.startswith("."):
                    texts[f"{bucket}/{unquote(path.name)}"] = path.read_text()
        # A file may be just about to be written.
        return {key: json.loads(text) for key, text in texts.items() if text}


class Etcd:
    """A server."""

    def __init__(self, url: str) -> None:
        self._url, self.place = url, f"etcd:{url}"
        self.environment = {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": url}

    def below(self, bucket: str) -> dict[str, Record]:
        """The records of a bucket by their keys."""
        # All keys from the first one with a slash on, before those with the character behind it.
        first, last = (base64.b64encode(f"{bucket}{end}".encode()).decode() for end in "/0")
        asked = json.dumps({"key": first, "range_end": last}).encode()
        request = urllib.request.Request(f"{self._url}/v3/kv/range", asked, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            found = json.load(answer).get("kvs", [])
        return {base64.b64decode(one["key"]).decode(): json.loads(base64.b64decode(one["value"])) for one in found}


def records_of(environment: Mapping[str, str] = os.environ) -> Records:
    """The records that Dynamo's processes have with this environment."""
    if environment["DYN_DISCOVERY_BACKEND"] == "etcd":
        return Etcd(environment["ETCD_ENDPOINTS"])
    return Files(Path(environment["DYN_FILE_KV"]))
