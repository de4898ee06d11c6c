#!/bin/sh
# Builds the Debian package from a release build, with cargo-deb (cargo install cargo-deb):
#   deploy/debian/build.sh DIRECTORY
# KVATLAS_BIN may name a program that is built already.
set -eu

mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."
if [ -z "${KVATLAS_BIN:-}" ]; then
    cargo build --profile dist --locked --bin kvatlas
    KVATLAS_BIN=target/dist/kvatlas
fi

# What [package.metadata.deb] in Cargo.toml takes from here is made by the program itself.
made=target/debian-made
rm -rf "$made"
mkdir -p "$made/man"
"$KVATLAS_BIN" man --directory "$made/man"
gzip --no-name --best "$made"/man/*.1
for shell in bash zsh fish; do "$KVATLAS_BIN" completions "$shell" >"$made/kvatlas.$shell"; done
install -m 755 "$KVATLAS_BIN" "$made/kvatlas"
gzip --no-name --best --stdout CHANGELOG.md >"$made/changelog.gz"
version=$("$KVATLAS_BIN" --version | cut -d' ' -f2)
cat >"$made/changelog.Debian" <<CHANGELOG
kvatlas ($version-1) unstable; urgency=medium

  * Version $version: see changelog.gz.

 -- The authors of kvatlas <kvatlas@users.noreply.github.com>  $(git log -1 --format=%cD)
CHANGELOG
cargo deb --no-build --no-strip --package kvatlas --output "$out/"
