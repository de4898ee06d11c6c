#!/usr/bin/env python3
"""Prints the bill of materials of the program as CycloneDX 1.5 JSON: the crates that are linked into it, by Cargo.lock.

    deploy/sbom.py > kvatlas-VERSION.cdx.json

The same commit gives the same bytes.
"""

from __future__ import annotations

import json
import tomllib

from licences import ROOT, Package, built, packages


def component(package: Package, checksums: dict[tuple[str, str], str]) -> dict[str, object]:
    """A crate."""
    name, version = package["name"], package["version"]
    purl = f"pkg:cargo/{name}@{version}"
    found: dict[str, object] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if package["license"]:
        # Old crates write a slash for «or».
        found["licenses"] = [{"expression": package["license"].replace("/", " OR ").replace("  ", " ")}]
    if (name, version) in checksums:
        found["hashes"] = [{"alg": "SHA-256", "content": checksums[name, version]}]
    if package["repository"]:
        found["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return found


def main() -> None:
    known = packages()
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
    checksums = {(each["name"], each["version"]): each["checksum"] for each in lock["package"] if "checksum" in each}
    crates = sorted(built("normal,no-proc-macro", "--package", "kvatlas"))
    program = next(package for package in known.values() if package["name"] == "kvatlas")
    whole = component(program, {}) | {"type": "application"}
    parts = [component(known[crate], checksums) for crate in crates if crate[0] != "kvatlas"]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": whole},
        "components": parts,
        "dependencies": [{"ref": whole["bom-ref"], "dependsOn": [part["bom-ref"] for part in parts]}],
    }
    print(json.dumps(bill, indent=1))


if __name__ == "__main__":
    main()
