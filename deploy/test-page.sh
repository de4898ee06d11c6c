#!/bin/sh
# Tests the page of the admin listener in a headless Chromium against the debug build of the daemon. Without Chromium, its driver, Python
# 3.10 or pip it says so and skips; with CI=true that is a failure.
#
#   KVATLAS_BIN                 a kvatlas to test against instead of target/debug/kvatlas
#   NATS_SERVER_BIN             a nats-server to use instead of one in PATH or .tools/
#   KVATLAS_TEST_WRITE_PAGES=1  also write the pictures of the documentation
set -eu

cd "$(dirname "$0")/.."
root=$PWD
environment=$root/.tools/page

skip() {
    if [ "${CI:-}" = true ]; then
        echo "test-page: $*" >&2
        exit 1
    fi
    line="SKIPPED: the tests of the page: $*"
    echo "$line" >&2
    if [ -n "${KVATLAS_TEST_SKIPS:-}" ]; then echo "$line" >>"$KVATLAS_TEST_SKIPS"; fi
    exit 0
}

for program in chromium chromedriver; do
    command -v "$program" >/dev/null 2>&1 ||
        skip "there is no $program; install it, on Debian with: apt-get install chromium chromium-driver"
done
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
"$environment/bin/pip" install --quiet --disable-pip-version-check -r tests/page/requirements.txt "$copy" ||
    skip "pip could not install what the tests need: see what it said above"
"$environment/bin/pip" install --quiet --disable-pip-version-check --no-deps --force-reinstall "$copy"

export KVATLAS_BIN="${KVATLAS_BIN:-$root/target/debug/kvatlas}"
[ -x "$KVATLAS_BIN" ] || cargo build --locked

cd tests/page
"$environment/bin/python" -B -m pytest -q -s -p no:cacheprovider "$@"
