#!/bin/sh
# Times the first build of the demonstration from nothing, and what it would take without each saving, as a table. Twenty minutes on two idle
# cores; nothing is fetched but crates that are missing:
#
#   benches/record.sh first-build benches/first_build.sh          all rows
#   benches/first_build.sh demo                                   what deploy/demo.sh builds, alone
set -eu

cd "$(dirname "$0")/.."
root=$PWD
target=$(mktemp -d "${TMPDIR:-/tmp}/kvatlas-first-build.XXXXXX")
trap 'rm -rf "$target"' EXIT INT TERM
cargo fetch --locked --quiet

# One row: NAME, and the arguments of cargo build.
row() {
    name=$1
    shift
    rm -rf "$target/build"
    # Seconds of the clock, of the processor, and crates that were compiled.
    CARGO_TARGET_DIR="$target/build" python3 - "$root" "$@" <<'PYTHON' > "$target/figures"
import resource, subprocess, sys, time
begun = time.monotonic()
built = subprocess.run(["cargo", "build", "--offline", "--locked", *sys.argv[2:]], cwd=sys.argv[1], stderr=subprocess.PIPE, text=True)
if built.returncode:
    sys.exit(built.stderr)
spent = resource.getrusage(resource.RUSAGE_CHILDREN)
crates = built.stderr.count("Compiling ")
print(f"{time.monotonic() - begun:.0f} s | {spent.ru_utime + spent.ru_stime:.0f} s | {crates}")
PYTHON
    echo "| $name | $(cat "$target/figures") |"
}

echo "| what is built | time | processor time | crates |"
echo "|---|---|---|---|"
row "what \`deploy/demo.sh\` builds" --profile demo --no-default-features --bin kvatlas
[ "${1:-}" = demo ] && exit
row "with all features, in the profile \`demo\`" --profile demo --bin kvatlas
row "without features, in the profile \`release\`" --release --no-default-features --bin kvatlas
row "all features, in the profile \`release\`" --release --bin kvatlas
