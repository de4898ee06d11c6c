#!/bin/sh
# Builds kvatlas and runs its demonstration; arguments go to `kvatlas demo`. It runs in the checkout's root.
set -eu

cd "$(dirname "$0")/.."
deploy/setup.sh
exec cargo run --release --quiet -- demo "$@"
