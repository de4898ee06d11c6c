#!/bin/sh
# Checks everything that a change must pass, cheapest first, and stops at the first failure; what runs at the same time is carried to its
# end. Says at the end which checks were left out for want of what they need. With CI=true some of those are failures instead.
set -eu

cd "$(dirname "$0")/.."
checks="deploy/test.sh"
. deploy/testing.sh

# A check that is left out appends a line to this file.
KVATLAS_TEST_SKIPS=$(mktemp)
export KVATLAS_TEST_SKIPS
said_by_services=$(mktemp)
services=""
finish() {
    if [ -n "$services" ]; then kill "$services" 2>/dev/null || true; fi
    rm -f "$KVATLAS_TEST_SKIPS" "$said_by_services"
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

failed() {
    echo "== failed: $*; see above" >&2
    exit 1
}

step() {
    echo "== $*"
    "$@"
}

step deploy/setup.sh
# The environments of Python are made while cargo builds.
KVATLAS_TEST_PREPARE=1 timeout 1800 deploy/test-services.sh >/dev/null 2>&1 </dev/null &
services=$!
step cargo fmt --check
# Benches are checked here and not built: a release build of all of them takes longer than everything else.
step cargo clippy --locked --workspace --all-targets -- -D warnings
export RUSTDOCFLAGS="-D warnings"
step cargo doc --locked --workspace --no-deps
step cargo test --locked --workspace --no-run
# What was just built is what everything below runs.
export KVATLAS_BIN="$PWD/target/debug/kvatlas"
# What is missing now is said below.
wait "$services" || true
# All of it mostly waits, so this and the tests of cargo run beside each other. `timeout` makes this one a group of processes, which ends as one.
timeout 1800 deploy/test-services.sh >"$said_by_services" 2>&1 </dev/null &
services=$!
# The library, the binary, the integration tests, and the examples in the documentation. Integration tests mostly wait: six at
# a time keep two cores busy.
cores=$(getconf _NPROCESSORS_ONLN)
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$((cores > 6 ? cores : 6))}"
outcome=0
step cargo_test_twice || outcome=1
wait "$services" || outcome=1
services=""
cat "$said_by_services"
[ "$outcome" = 0 ] || failed "the tests of cargo or those beside them"

if [ -s "$KVATLAS_TEST_SKIPS" ]; then
    skipped=$(sort -u "$KVATLAS_TEST_SKIPS")
    echo "== $(printf '%s\n' "$skipped" | wc -l | tr -d ' ') checks were left out"
    printf '%s\n' "$skipped"
else
    echo "== no check was left out"
fi
