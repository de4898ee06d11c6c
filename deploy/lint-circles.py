#!/usr/bin/env python3
"""Prints each circle of more than two files of a crate, with the names that tie it. Fails where there is one.

Files are in a circle where each uses an item of each other one, over whatever path. A name counts for the file that defines it, so that a
re-export is no use. A folder's own file (`mod.rs`) consists of the folder's files, and does not use them. Tests do not count.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES_MAX = 2
NO_SOURCES = {"benches", "examples", "target", "tests"}
COMMENT = re.compile(r"(?<!:)//.*")
# A module of tests is the last item of its file.
TEST = re.compile(r"#\[cfg\(test\)\]\s*(?:(?:pub\S* )?use [^;]*;|mod \w+\s*\{.*)", re.DOTALL)
USE = re.compile(r"\b(pub(?:\([^)]*\))? )?use ([\w\s:,*{}]+);")
LIST = re.compile(r"([\w:]*)\{([^{}]*)\}")
PATH = re.compile(r"(?<![\w:])\w+(?:::\w+)+")

# The names on the way from a crate's root to a module, or from a module to an item.
Names = tuple[str, ...]
Arrows = dict[Names, dict[Names, set[str]]]


def expanded(use: str) -> Iterator[tuple[Names, str]]:
    """The single paths of a `use`, whose lists may be nested, each with the name that it binds."""

    def parts(found: re.Match[str]) -> str:
        return ",".join(found[1] + part.strip() for part in found[2].split(",") if part.strip())

    while LIST.search(use):
        use = LIST.sub(parts, use)
    for part in use.split(","):
        path, _, alias = part.partition(" as ")
        names = tuple(path.strip().removesuffix("::self").split("::"))
        yield names, alias.strip() or names[-1]


class Crate:
    """The files of a crate, by module, and the names that each file binds by `use`."""

    def __init__(self, root: Path) -> None:
        self.texts: dict[Names, str] = {}
        self.bound: dict[Names, dict[str, Names]] = {}
        for path in sorted(root.rglob("*.rs")):
            inner = path.relative_to(root).with_suffix("").parts
            if NO_SOURCES & set(inner) or inner[-1].endswith("_tests"):
                continue
            module = inner[:-1] if inner[-1] in ("lib", "mod") else inner
            text = self.texts[module] = TEST.sub("", COMMENT.sub("", path.read_text()))
            self.bound[module] = {name: names for _, use in USE.findall(text) for names, name in expanded(use)}

    def item(self, module: Names, path: Names) -> tuple[Names, str] | None:
        """The item that `path` names in `module`, with the module whose file defines it; None if another crate does."""
        first, rest = path[0], path[1:]
        if first in ("crate", "self", "super"):
            at = {"crate": (), "self": module, "super": module[:-1]}[first]
            while rest[:1] == ("super",):
                at, rest = at[:-1], rest[1:]
        elif module + (first,) in self.texts:
            at = module + (first,)
        else:
            bound = self.bound[module].get(first, path)
            return None if bound == path[: len(bound)] else self.item(module, bound + rest)
        while rest and at + rest[:1] in self.texts:
            at, rest = at + rest[:1], rest[1:]
        own = rest[:1]
        # A macro is bound to its own name.
        exported = self.bound[at].get(own[0], own) if own else own
        return (at, "".join(own or at[-1:])) if exported == own else self.item(at, exported + rest[1:])

    def arrows(self) -> Arrows:
        """The names that each file uses of each other one."""
        arrows: Arrows = defaultdict(lambda: defaultdict(set))
        for module, text in self.texts.items():
            paths = [path for public, use in USE.findall(text) if not public for path, _ in expanded(use)]
            paths += [tuple(path.split("::")) for path in PATH.findall(USE.sub("", text))]
            for home, name in filter(None, (self.item(module, path) for path in paths)):
                if home[: len(module)] != module:
                    arrows[module][home].add(name)
        return arrows


def reached(arrows: Arrows, module: Names) -> set[Names]:
    """The files that a file uses, directly or through others."""
    seen, left = set[Names](), [module]
    while left:
        new = arrows.get(left.pop(), {}).keys() - seen
        seen, left = seen | new, [*left, *new]
    return seen


def circles(arrows: Arrows) -> Iterator[list[Names]]:
    """The circles of more than two files."""
    ahead = {module: reached(arrows, module) for module in arrows}
    while ahead:
        module, used = ahead.popitem()
        circle = sorted({module, *(other for other in used & ahead.keys() if module in ahead[other])})
        ahead = {other: used for other, used in ahead.items() if other not in circle}
        if len(circle) > FILES_MAX:
            yield circle


def main() -> None:
    found = []
    for crate in sorted(path.parent for path in ROOT.glob("src/*/Cargo.toml")):
        arrows = Crate(crate).arrows()
        for circle in circles(arrows):
            found.append(f"{crate.relative_to(ROOT)}: {len(circle)} files use each other")
            for one, other in ((one, other) for one in circle for other in circle if other in arrows[one]):
                names = ", ".join(sorted(arrows[one][other]))
                found.append(f"    {'/'.join(one) or 'lib'} -> {'/'.join(other) or 'lib'}: {names}")
    if found:
        sys.exit("\n".join([f"a circle has at most {FILES_MAX} files:", *found]))


if __name__ == "__main__":
    main()
