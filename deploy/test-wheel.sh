#!/bin/sh
# Makes the wheel that carries the program, installs it with pip into an environment of its own, and uses both of its halves as a newcomer
# would: the command and the client library. Without Python 3.10 or pip it says so and skips; with CI=true that is a failure.
#
#   KVATLAS_BIN       a kvatlas to pack instead of target/debug/kvatlas
#   NATS_SERVER_BIN   a nats-server to use instead of one in PATH or .tools/
set -eu

cd "$(dirname "$0")/.."
checks="the wheel with the program"
. deploy/testing.sh
make_environment "$PWD/.tools/wheel-python" 10
need_kvatlas

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
wheel=$(deploy/wheel.sh "$KVATLAS_BIN" "$work" | tail -n 1)
make_environment "$work/environment" 10
here=$work/environment/bin
begun=$(date +%s)
pip_install "$work/environment" "$wheel"
# The server that pip would put there.
cp "${NATS_SERVER_BIN:-$(command -v nats-server || echo .tools/nats-server)}" "$here/nats-server"
(cd "$work" && env -u NATS_SERVER_BIN PATH=/usr/bin:/bin "$here/kvatlas" demo --requests 500) >"$work/said" 2>&1 || true
grep -q 'of which wrong: 0' "$work/said" || { echo "wheel: the demo did not end as it should" >&2; cat "$work/said" >&2; exit 1; }
took=$(($(date +%s) - begun))
[ "$("$here/kvatlas" --version)" = "$("$KVATLAS_BIN" --version)" ] || { echo "wheel: the command is another program" >&2; exit 1; }
(cd "$work" && "$here/python" -W error -c 'import kvatlas, kvatlas.sync; assert kvatlas.__file__')
"$here/pip" uninstall --quiet --yes kvatlas
[ ! -e "$here/kvatlas" ] || { echo "wheel: uninstalling leaves the command" >&2; exit 1; }
echo "the wheel $(basename "$wheel") installs a command and a library, and goes without a trace"
# A new user's minute. A busy machine takes longer, so it is said and not required. Without what pip keeps: PIP_NO_CACHE_DIR=1.
echo "from pip install to checked answers: $took s"
