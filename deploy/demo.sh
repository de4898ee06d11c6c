#!/bin/sh
# Builds kvatlas and runs its demonstration; arguments go to `kvatlas demo`. It runs in the checkout's root.
set -eu

cd "$(dirname "$0")/.."
deploy/setup.sh
# Not quiet: the first build takes minutes.
cargo build --release --locked
exec cargo run --release --locked --quiet -- demo "$@"
