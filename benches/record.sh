#!/bin/sh
# Runs a bench and keeps what it prints in benches/records, with the command, the date, the machine and the versions:
#
#   benches/record.sh peers-latency benches/peers/run.sh latency
#
# The figures of README.md and benches/README.md come from there, or from the files that benches write themselves.
set -eu

if [ $# -lt 2 ]; then
    echo "usage: benches/record.sh NAME COMMAND [ARGUMENT...]" >&2
    exit 2
fi
cd "$(dirname "$0")/.."
name=$1
shift
record=benches/records/$name.txt
{
    echo "# $name"
    echo
    echo "\`$*\`"
    echo
    echo "- $(date -u +%Y-%m-%d), at commit $(git describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null || echo unknown)"
    echo "- $(nproc) × $(sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1), $(uname -sm), load before $(cut -d ' ' -f 1 /proc/loadavg 2>/dev/null || echo unknown)"
    echo "- $(rustc --version)"
    echo
} > "$record.new"
if "$@" >> "$record.new"; then
    mv "$record.new" "$record"
    echo "written: $record" >&2
else
    code=$?
    rm -f "$record.new"
    echo "benches/record.sh: $1 has failed with $code; $record is as before" >&2
    exit "$code"
fi
