#!/bin/sh
# Runs the fault scenarios in their long form: fifty seeded runs unless told otherwise. Takes some minutes.
#   deploy/faults.sh        fifty runs
#   deploy/faults.sh 10     ten
set -eu

cd "$(dirname "$0")/.."
deploy/setup.sh
KVATLAS_FAULT_RUNS="${1:-50}"
export KVATLAS_FAULT_RUNS
# One after the other: a scenario that waits for the machine shows less.
exec cargo test --locked --test faults -- --nocapture --test-threads=1
