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
said_by_units=$(mktemp)
services=""
units=""
finish() {
    for beside in $services $units; do kill "$beside" 2>/dev/null || true; done
    rm -f "$KVATLAS_TEST_SKIPS" "$said_by_services" "$said_by_units"
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
# Beside clippy: where nothing has changed, each needs one core.
echo "== cargo fmt --check"
cargo fmt --check &
formatted=$!
# Benches are checked here and not built: a release build of all of them takes longer than everything else.
step cargo clippy --locked --workspace --all-targets -- -D warnings
# What deploy/demo.sh builds: without the default features.
step cargo clippy --locked --no-default-features --bin kvatlas -- -D warnings
wait "$formatted" || failed "cargo fmt --check"
export RUSTDOCFLAGS="-D warnings"
step cargo doc --locked --workspace --no-deps
step cargo test --locked --workspace --no-run
# What was just built is what everything below runs.
export KVATLAS_BIN="$PWD/target/debug/kvatlas"
# What is missing now is said below.
wait "$services" || true
# All of it mostly waits, so three things run beside each other. `timeout` makes one a group of processes, which ends as one.
timeout 1800 deploy/test-services.sh >"$said_by_services" 2>&1 </dev/null &
services=$!
timeout 1800 deploy/test-units.sh >"$said_by_units" 2>&1 </dev/null &
units=$!
outcome=0
step integration_twice || outcome=1
wait "$units" || outcome=1
units=""
wait "$services" || outcome=1
services=""
cat "$said_by_units" "$said_by_services"
[ "$outcome" = 0 ] || failed "the tests of cargo or those beside them"

if [ -s "$KVATLAS_TEST_SKIPS" ]; then
    skipped=$(sort -u "$KVATLAS_TEST_SKIPS")
    echo "== $(printf '%s\n' "$skipped" | wc -l | tr -d ' ') checks were left out"
    printf '%s\n' "$skipped"
else
    echo "== no check was left out"
fi
