#!/usr/bin/env bash
# Runs the side-by-side comparison and prints Markdown tables: run.sh [PART] [--quick] [--repetitions N]
set -euo pipefail
cd "$(dirname "$0")"
exec cargo run --release --locked --quiet --package kvatlas-peers-index -- "$@"
