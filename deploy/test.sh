#!/bin/sh
# Checks everything that a change must pass, cheapest first, and stops at the first failure. Says at the end which checks
# were left out for want of what they need. With CI=true some of those are failures instead.
set -eu

cd "$(dirname "$0")/.."
checks="deploy/test.sh"
. deploy/testing.sh

# A check that is left out appends a line to this file.
KVATLAS_TEST_SKIPS=$(mktemp)
export KVATLAS_TEST_SKIPS
trap 'rm -f "$KVATLAS_TEST_SKIPS"' EXIT
trap 'exit 1' HUP INT TERM

step() {
    echo "== $*"
    "$@"
}

step deploy/setup.sh
step cargo fmt --check
# Benches are checked here and not built: a release build of all of them takes longer than everything else.
step cargo clippy --locked --workspace --all-targets -- -D warnings
export RUSTDOCFLAGS="-D warnings"
step cargo doc --locked --workspace --no-deps
# The library, the binary, the integration tests, and the examples in the documentation. Integration tests mostly wait: six at
# a time keep two cores busy.
cores=$(getconf _NPROCESSORS_ONLN)
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$((cores > 6 ? cores : 6))}"
step cargo_test_twice
# What was just built is what everything below runs.
export KVATLAS_BIN="$PWD/target/debug/kvatlas"
# Genuine engines beside it, in the short form. Their wheels are large: they are fetched only on request, and by CI.
if [ "${CI:-}" = true ] || [ -d .tools/engines/vllm ]; then
    step deploy/scenario-engines.sh --short
else
    line="SKIPPED: genuine engines: deploy/scenario-engines.sh --short fetches 375 MB for them"
    echo "$line" >&2
    echo "$line" >>"$KVATLAS_TEST_SKIPS"
fi
# The Python package, against the daemon that was just built.
step deploy/test-python.sh
# The page of the admin listener, in a real browser.
step deploy/test-page.sh
# Dashboards, alerts, compose, packages: against the same daemon.
step deploy/test-deploy.sh

if [ -s "$KVATLAS_TEST_SKIPS" ]; then
    skipped=$(sort -u "$KVATLAS_TEST_SKIPS")
    echo "== $(printf '%s\n' "$skipped" | wc -l | tr -d ' ') checks were left out"
    printf '%s\n' "$skipped"
else
    echo "== no check was left out"
fi
