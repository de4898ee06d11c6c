#!/bin/sh
# Checks everything that a change must pass, cheapest first, and stops at the first failure.
set -eu

cd "$(dirname "$0")/.."

step() {
    echo "== $*"
    "$@"
}

step deploy/setup.sh
step cargo fmt --check
step cargo clippy --locked --all-targets -- -D warnings
export RUSTDOCFLAGS="-D warnings"
step cargo doc --locked --no-deps
# The library, the binary, the integration tests, and the examples in the documentation.
step cargo test --locked
step cargo bench --locked --no-run
