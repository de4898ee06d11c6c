#!/usr/bin/env python3
"""Checks the command lines of kvatlas in the files of deploy/ and in the README, against what `--help` says of each command.

Looked at are the code of Markdown pages, the text of all other files, and the lists `args` and `command` in YAML that begin with a command.
Values are not looked at.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Iterator

ROOT = Path(__file__).resolve().parent.parent
KVATLAS = os.environ["KVATLAS_BIN"]

# The program, by its name, its path, or the variable that the scripts name it by.
NAME = r"(?:^|[\s/\"'(=])(?:kvatlas|\$KVATLAS(?:_BIN)?|\$\{KVATLAS(?:_BIN)?\})\"?[ \t]+(?=[a-z-])"
# Where a command line ends for a shell, or in a sentence, or in a text in quotes.
END = re.compile(r"[`|;&<>()\"'\n#]")
FLAG = re.compile(r"--?[A-Za-z][A-Za-z0-9-]*")


@functools.cache
def help_of(command: tuple[str, ...]) -> str:
    said = subprocess.run([KVATLAS, *command, "--help"], capture_output=True, text=True)
    assert said.returncode == 0, f"kvatlas {' '.join(command)} --help: {said.stderr}"
    return said.stdout


@functools.cache
def commands_of(command: tuple[str, ...]) -> set[str]:
    """The commands below a command."""
    listed = help_of(command).partition("\nCommands:\n")[2].partition("\n\n")[0]
    return set(re.findall(r"^  ([a-z][a-z-]*)(?:  |$)", listed, re.MULTILINE))


@functools.cache
def flags_of(command: tuple[str, ...]) -> set[str]:
    """The flags that a command has, with their other names."""
    text = help_of(command)
    named = re.findall(r"^ {2,6}(-[A-Za-z]), (--[a-z0-9-]+)|^ {2,6}(--?[A-Za-z0-9-]+)", text, re.MULTILINE)
    aliases = re.findall(r"\[alias(?:es)?: ([^\]]*)\]", text)
    return {name for names in named for name in names if name} | {name for alias in aliases for name in FLAG.findall(alias)}


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file, of a page only what is code in them, with their numbers. A line that goes on is one."""
    begun, number_begun, is_code = "", 0, False
    for number, line in enumerate(path.read_text().split("\n"), 1):
        if path.suffix == ".md" and line.lstrip().startswith("```"):
            is_code = not is_code
        elif path.suffix == ".md" and not is_code:
            yield number, "\n".join(re.findall(r"`([^`]*)`", line))
        else:
            begun, number_begun = begun + line.removesuffix("\\"), number_begun or number
            if not line.endswith("\\"):
                yield number_begun, begun
                begun, number_begun = "", 0


def command_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The words after `kvatlas` of each command line, with the number of the line."""
    for number, line in lines_of(path):
        # To helm it is the name of a release.
        for found in re.finditer(NAME, "" if "helm " in line else line, re.MULTILINE):
            yield number, END.split(re.sub(r"\"[^\"]*\"|'[^']*'", "TEXT", line[found.end() :]))[0].split()
        for listed in re.findall(r"(?:args|command): \[([^\]]*)\]", line):
            words = [word.strip(" \"'") for word in listed.split(", ")]
            if words[0] in commands_of(()):
                yield number, words


def fault_of(words: list[str], is_prose: bool) -> str | None:
    """What is wrong with a command line."""
    command: tuple[str, ...] = ()
    rest = list(words)
    while rest and rest[0] in commands_of(command):
        command = (*command, rest.pop(0))
    if not command and (is_prose or not rest[0].startswith("-")):
        # Comments say the name for other reasons, too, and scripts name a package by it.
        return None if is_prose else f"there is no command {rest[0]}"
    for word in rest:
        if word == "--":
            break
        flag = FLAG.match(word)
        if flag and flag.group(0) not in flags_of(command):
            return f"there is no {flag.group(0)}"
    return None


def main() -> None:
    tracked = subprocess.run(["git", "ls-files", "deploy", "README.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    faults, number_of_lines = [], 0
    for name in tracked.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".webp", ".json") or path == Path(__file__).resolve():
            continue
        for number, words in command_lines(path):
            number_of_lines += 1
            if fault := fault_of(words, is_prose=path.suffix != ".md"):
                faults.append(f"{name}:{number}: {fault}: kvatlas {' '.join(words)}")
    if faults:
        sys.exit("\n".join(faults))
    print(f"{number_of_lines} command lines of kvatlas have only commands and flags that there are")


if __name__ == "__main__":
    main()
