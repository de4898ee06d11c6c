#!/bin/sh
# Compares kvatlas with toktrie on a real vocabulary of 131,072 tokens: fetches it into .tools/ unless it is there, checks that masks are
# equal, and measures. With `--check` or `--measure` it does only one of them.
set -eu

cd "$(dirname "$0")/../../.."

version=1.13.1
name=mistral_common/data/tekken_240911.json
vocabulary=$PWD/.tools/tekken_240911.json

fetch() {
    mkdir -p .tools
    fetched=$(mktemp -d .tools/fetch.XXXXXX)
    trap 'rm -rf "$fetched"' EXIT
    trap 'exit 1' HUP INT TERM
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --dest "$fetched" "mistral-common==$version"
    python3 - "$fetched" "$name" "$fetched/tekken.json" <<'PYTHON'
import pathlib, sys, zipfile

directory, name, target = sys.argv[1:]
[wheel] = pathlib.Path(directory).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    pathlib.Path(target).write_bytes(archive.read(name))
PYTHON
    # Renamed last, so that what is there is whole.
    mv -f "$fetched/tekken.json" "$vocabulary"
    rm -rf "$fetched"
}

[ -f "$vocabulary" ] || fetch
exec cargo run --quiet --release --locked --manifest-path benches/peers/Cargo.toml --package kvatlas-peers-tokens -- "$vocabulary" "$@"
