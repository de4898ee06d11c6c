#!/bin/sh
# Installs the Python package of src/python into .tools/python, checks its types and those of deploy/router-example, and runs the
# tests of both, and of deploy/go-example where Go is, against the debug build of the daemon. Without Python 3.10 or pip it says so
# and skips; with CI=true that is a failure.
#
#   KVATLAS_BIN       a kvatlas to test against instead of target/debug/kvatlas
#   NATS_SERVER_BIN   a nats-server to use instead of one in PATH or .tools/
set -eu

cd "$(dirname "$0")/.."
root=$PWD
environment=$root/.tools/python

skip() {
    if [ "${CI:-}" = true ]; then
        echo "test-python: $*" >&2
        exit 1
    fi
    line="SKIPPED: the tests of the Python package: $*"
    echo "$line" >&2
    if [ -n "${KVATLAS_TEST_SKIPS:-}" ]; then echo "$line" >>"$KVATLAS_TEST_SKIPS"; fi
    exit 0
}

python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    skip "there is no Python 3.10 or later; install it, on Debian with: apt-get install python3 python3-venv"

if ! "$environment/bin/python" -c '' 2>/dev/null; then
    rm -rf "$environment"
    python3 -m venv "$environment" ||
        skip "no virtual environment could be made; on Debian: apt-get install python3-venv"
fi

# From a copy: pip leaves its work beside what it builds.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
trap 'exit 1' HUP INT TERM
cp -R src/python/pyproject.toml src/python/README.md src/python/kvatlas "$copy"
"$environment/bin/pip" install --quiet --disable-pip-version-check "$copy[test]" -r deploy/router-example/requirements.txt ||
    skip "pip could not install the package: see what it said above"
# The version stays the same while the sources change.
"$environment/bin/pip" install --quiet --disable-pip-version-check --no-deps --force-reinstall "$copy"

export KVATLAS_BIN="${KVATLAS_BIN:-$root/target/debug/kvatlas}"
[ -x "$KVATLAS_BIN" ] || cargo build --locked

(cd deploy/router-example && "$environment/bin/mypy" --cache-dir "$root/.tools/mypy" --strict --ignore-missing-imports *.py)
cd src/python
"$environment/bin/mypy" --cache-dir "$root/.tools/mypy"
"$environment/bin/pytest" -q -p no:cacheprovider "$@"
