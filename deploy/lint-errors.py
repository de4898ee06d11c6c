#!/usr/bin/env python3
"""Compares the texts of errors in the product's sources with tests/errors.txt, which has each of them.

    deploy/lint-errors.py            prints the lines that differ, and ends with 1 then
    deploy/lint-errors.py --write    writes the file

The texts are those of the attribute `#[error(…)]`. One that hands on the text of another error has none of its own.
"""

from __future__ import annotations

import difflib
import doctest
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests/errors.txt"
HEAD = """\
# Texts of the product's errors. Each line has the file, the type with its variant, and the text.
#
# To find where a message of a log or of a command comes from, search for a few words of it that are no name and no number.
# Braces hold the value that is inserted: a field, or an expression of the source. {0} is the first field. The text of a
# field such as {reason} is where the error is made.
#
# Made from the sources by deploy/lint-errors.py --write. A change of a text is reviewed here; tests elsewhere ask for the
# variant or the code.

"""
# A module of tests is the last item of its file.
TEST = re.compile(r"#\[cfg\(test\)\]\s*(?:(?:pub\S* )?use [^;]*;|mod \w+\s*\{.*)", re.DOTALL)
OF_TESTS = re.compile(r"/(?:tests|examples|loom)(?:/|\.rs$)|_tests\.rs$")
TOKEN = re.compile(
    r"""
    (?P<blank>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<raw>b?r(?P<marks>\#*)".*?"(?P=marks))
    |(?P<string>[bc]?"(?:[^"\\]|\\.)*")
    |(?P<character>b?'(?:\\[^']+|\\'|[^'\\])')
    |(?P<word>'?\w+)
    |(?P<sign>.)
    """,
    re.DOTALL | re.VERBOSE,
)
ESCAPE = re.compile(r"\\(?:\n\s*|u\{(\w+)\}|(.))", re.DOTALL)
# A place for a value: two braces stand for one brace.
PLACE = re.compile(r"\{\{|\}\}|\{(\w*)(:[^{}]*)?\}")
OPENING, CLOSING = set("([{"), set(")]}")


def tokens(text: str) -> list[str]:
    """The tokens of a source, without comments."""
    return [found[0] for found in TOKEN.finditer(text) if found.lastgroup != "blank"]


def unquoted(literal: str) -> str:
    r"""The text of a string literal. A line break or another invisible character stays escaped.

    >>> print(unquoted(r'"a \"b\" \\ \u{e9}\n"'))
    a "b" \ é\n
    >>> print(unquoted('"one, \\\n        two"'), unquoted('r#"a "b" \\n"#'))
    one, two a "b" \n
    """
    if literal.startswith("r"):
        return literal.strip("r#")[1:-1]

    def plain(found: re.Match[str]) -> str:
        if found[1]:
            return chr(int(found[1], 16))
        return {None: "", '"': '"', "'": "'", "\\": "\\"}.get(found[2], found[0])

    return ESCAPE.sub(plain, literal[1:-1])


def closing(found: list[str], start: int) -> int:
    """The index of the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(found)):
        depth += (found[index] in OPENING) - (found[index] in CLOSING)
        if depth == 0:
            return index
    raise ValueError("a bracket is not closed")


def arguments(found: list[str]) -> Iterator[list[str]]:
    """The arguments of a macro or an attribute, which commas separate."""
    start = depth = 0
    for index, token in enumerate([*found, ","]):
        depth += (token in OPENING) - (token in CLOSING)
        if token == "," and depth == 0:
            if index > start:
                yield found[start:index]
            start = index + 1


def expression(found: list[str]) -> str:
    """An expression in one line."""
    spaced = {",": ", "} | {sign: f" {sign} " for sign in "+-/"}
    return "".join(spaced.get(token, token) for token in found)


def filled(format_text: str, values: list[list[str]]) -> str:
    """A format string, with the expressions of its arguments in their places.

    >>> filled("{} of {last:?}: {0}, {name}, {{}}", [["a", ".", "b", "(", ")"], ["last", "=", "N", "-", "1"]])
    '{a.b()} of {N - 1:?}: {0}, {name}, {{}}'
    """
    named = {value[0]: expression(value[2:]) for value in values if value[1:2] == ["="]}
    unnamed = iter(expression(value) for value in values if value[1:2] != ["="])

    def place(found: re.Match[str]) -> str:
        if found[0] in ("{{", "}}"):
            return found[0]
        value = named.get(found[1], found[1]) if found[1] else next(unnamed)
        return f"{{{value}{found[2] or ''}}}"

    return PLACE.sub(place, format_text)


def errors(text: str) -> Iterator[tuple[str, str]]:
    r"""The errors of a source with a text of their own: the name of each, and the text.

    >>> list(errors('''
    ... enum First {
    ...     /// A comment with "half a text, and #[error("none")].
    ...     #[error(transparent)]
    ...     Other(#[from] Second),
    ...     #[error(
    ...         "it's long, {}; \\
    ...          \\"so\\"", .0.name("a", ','),
    ...     )]
    ...     #[cfg(unix)]
    ...     Long(Name),
    ... }
    ... impl<'a> First { fn it(&'a self) -> char { '"' } }
    ... #[derive(Debug, thiserror::Error)]
    ... #[error("two of {max}", max = N)]
    ... pub(crate) struct Second;
    ... '''))
    [('First::Long', 'it\'s long, {.0.name("a", \',\')}; "so"'), ('Second', 'two of {N}')]
    """
    found = tokens(text)
    of = ""
    for index, token in enumerate(found):
        if token == "enum":
            of = found[index + 1]
        if found[index : index + 4] != ["#", "[", "error", "("]:
            continue
        end = closing(found, index + 3)
        literal, *values = arguments(found[index + 4 : end])
        if literal == ["transparent"]:
            continue
        if len(literal) != 1 or not literal[0].endswith(('"', "#")):
            raise ValueError(f"an attribute is not understood: {' '.join(literal)}")
        yield name_behind(found, end + 2, of), filled(unquoted(literal[0]), values)


def name_behind(found: list[str], index: int, of: str) -> str:
    """The name of the type or of the variant that follows an attribute, in the enum `of`."""
    while found[index] in ("#", "pub"):
        if found[index] == "#":
            index = closing(found, index + 1) + 1
        elif found[index + 1] == "(":
            index = closing(found, index + 1) + 1
        else:
            index += 1
    if found[index] in ("struct", "enum"):
        return found[index + 1]
    return f"{of}::{found[index]}"


def file() -> str:
    """The text of the file, made from the sources."""
    lines = []
    for path in sorted((ROOT / "src").rglob("*.rs")):
        where = path.relative_to(ROOT).as_posix()
        if "target" in path.parts or OF_TESTS.search(where):
            continue
        try:
            lines += [f"{where}: {name}: {text}\n" for name, text in errors(TEST.sub("", path.read_text()))]
        except ValueError as error:
            sys.exit(f"{where}: {error}")
    return HEAD + "".join(lines)


def main() -> None:
    # The examples in this file come first.
    if doctest.testmod().failed:
        sys.exit(1)
    wanted, had = file(), FILE.read_text() if FILE.exists() else ""
    if "--write" in sys.argv:
        FILE.write_text(wanted)
    elif wanted != had:
        changes = difflib.unified_diff(had.splitlines(), wanted.splitlines(), "tests/errors.txt", "sources", lineterm="", n=0)
        sys.exit("\n".join(["texts of errors have changed; run deploy/lint-errors.py --write:", *changes]))


if __name__ == "__main__":
    main()
