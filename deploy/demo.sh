#!/bin/sh
# Builds what the demonstration runs, and runs it in the checkout's root; arguments go to `kvatlas demo`. The build leaves out what the
# demonstration does not need, and is optimised less: see [features] and [profile.demo] in Cargo.toml.
set -eu

cd "$(dirname "$0")/.."
deploy/setup.sh
# Not quiet: the first build takes minutes.
exec cargo run --locked --profile demo --no-default-features --bin kvatlas -- demo "$@"
