#!/bin/sh
# Builds the program, and lays out what the image has of it in a directory:
#   deploy/container/build.sh DIRECTORY
# KVATLAS_BIN may name a program that is built already.
set -eu

image=$1
cd "$(dirname "$0")/../.."
if [ -z "${KVATLAS_BIN:-}" ]; then
    cargo build --profile dist --locked --bin kvatlas
    KVATLAS_BIN=target/dist/kvatlas
fi
mkdir -p "$image/usr/local/bin" "$image/var/lib"
install -m 755 "$KVATLAS_BIN" "$image/usr/local/bin/kvatlas"
install -d -m 700 "$image/var/lib/kvatlas"
