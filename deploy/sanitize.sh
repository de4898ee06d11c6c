#!/bin/sh
# Runs the tests of the index under AddressSanitizer, and where the toolchain has what they need, under ThreadSanitizer and Miri. Not a part of
# deploy/test.sh: they need a nightly toolchain, and take a quarter of an hour. What cannot be run is said.
#
#   deploy/sanitize.sh                 the index's tests
#   deploy/sanitize.sh words::         those with that text in their names
set -eu

cd "$(dirname "$0")/.."
target=$(rustc -vV | sed -n 's/^host: //p')
only=${1:-index::}
failed=0

nightly() { cargo +nightly "$@"; }
has_source() { [ -d "$(rustc +nightly --print sysroot)/lib/rustlib/src/rust/library" ]; }

if ! nightly --version >/dev/null 2>&1; then
    echo "SKIPPED: there is no nightly toolchain: rustup toolchain install nightly" >&2
    exit 0
fi

echo "== AddressSanitizer"
# Memory that is kept for the life of a process is no leak.
ASAN_OPTIONS=detect_leaks=0 RUSTFLAGS="-Zsanitizer=address" \
    nightly test --locked --package kvatlas-core --lib --target "$target" --target-dir target/asan -- "$only" || failed=1

echo "== ThreadSanitizer"
# Without the standard library's source its own locks are not seen, and everything looks like a race.
if has_source; then
    RUSTFLAGS="-Zsanitizer=thread" TSAN_OPTIONS=halt_on_error=1 \
        nightly test --locked --package kvatlas-core --lib -Zbuild-std --target "$target" --target-dir target/tsan -- "$only" || failed=1
else
    echo "SKIPPED: rustup component add rust-src --toolchain nightly" >&2
fi

echo "== Miri"
if nightly miri --version >/dev/null 2>&1; then
    for small in words:: epoch:: split_map:: sync::; do
        MIRIFLAGS=-Zmiri-disable-isolation nightly miri test --locked --package kvatlas-core --lib -- "$small" || failed=1
    done
else
    echo "SKIPPED: rustup component add miri --toolchain nightly" >&2
fi
exit "$failed"
