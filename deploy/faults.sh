#!/bin/sh
# Runs all fault scenarios in their long form, with a real broker: fifty seeded runs of those that are random
# unless told otherwise, which takes about three quarters of an hour. Prints each scenario's line again at the end, and ends
# with 1 if any failed.
#   deploy/faults.sh        fifty runs
#   deploy/faults.sh 5      five
# KVATLAS_TEST_OLD_NATS_SERVER may name an older nats-server to test against as well; KVATLAS_TEST_ATTACK_SECONDS says how long
# hostile publishers and routers attack.
set -eu

cd "$(dirname "$0")/.."
deploy/setup.sh
KVATLAS_TEST_FAULT_RUNS="${1:-50}"
KVATLAS_TEST_KILLS=$KVATLAS_TEST_FAULT_RUNS
KVATLAS_TEST_ATTACK_SECONDS="${KVATLAS_TEST_ATTACK_SECONDS:-600}"
export KVATLAS_TEST_FAULT_RUNS KVATLAS_TEST_KILLS KVATLAS_TEST_ATTACK_SECONDS

log=$(mktemp)
trap 'rm -f "$log"' EXIT
trap 'exit 1' HUP INT TERM

# One after the other: a scenario that waits for the machine shows less. What a failing one says is in between.
set -- faults:: attacker:: resync:: jetstream:: crash:: liveness:: capacity:: object_store:: transitions::
{
    cargo test --locked --test integration -- "$@" --nocapture --test-threads=1 2>&1 || echo "FAULTS: failed"
} | tee "$log"

echo
echo "== scenarios, with $KVATLAS_TEST_FAULT_RUNS seeded runs"
grep -E '^[^ ].*: queries [0-9]+, exact ' "$log" | grep -v ', seed ' || true
echo
if grep -q '^FAULTS: failed' "$log"; then
    echo "some scenarios failed: see above" >&2
    exit 1
fi
echo "all scenarios passed"
