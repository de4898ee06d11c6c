#!/bin/sh
# Builds kvatlas and runs its demonstration; arguments go to `kvatlas demo`. It runs in the checkout's root.
set -eu

cd "$(dirname "$0")/.."
deploy/setup.sh
# Not quiet: the first build takes minutes.
cargo build --profile dist --locked
exec cargo run --profile dist --locked --quiet -- demo "$@"
