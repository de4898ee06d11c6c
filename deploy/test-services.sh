#!/bin/sh
# What deploy/test.sh checks beside the tests of cargo, with real processes, against the debug build of the daemon: genuine engines, the
# Python package and the Go module, the page of the admin listener, dashboards, alerts, compose and packages. All of it, whatever fails;
# ends with a failure if anything has failed.
set -eu

cd "$(dirname "$0")/.."
# For each check: what it says, and which have failed.
said=$(mktemp -d)
beside=""
finish() {
    for each in $beside; do kill "$each" 2>/dev/null || true; done
    rm -rf "$said"
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

check() {
    log=$said/$(basename "$1")
    { echo "== $*" && "$@"; } >"$log" 2>&1 || echo "$1" >>"$said/failed"
}

check_engines() {
    # The engines' wheels are large: they are fetched only on request, and by CI.
    if [ "${CI:-}" = true ] || [ -d .tools/engines/vllm ]; then
        check deploy/scenario-engines.sh --short
    else
        line="SKIPPED: genuine engines: deploy/scenario-engines.sh --short fetches 375 MB for them"
        echo "$line" >"$said/scenario-engines.sh"
        echo "$line" >>"${KVATLAS_TEST_SKIPS:-/dev/null}"
    fi
}

# Routers that are here already: nothing large is fetched for them. The others are skipped, each with its line.
check_routers() {
    check deploy/scenario-routers.sh --present --short
}

# All of it mostly waits, so three checks run at a time.
{
    check deploy/test-deploy.sh
    check_engines
    check_routers
} &
beside=$!
check deploy/test-python.sh &
beside="$beside $!"
check deploy/test-page.sh
check deploy/test-wheel.sh
check deploy/test-go.sh
for each in $beside; do wait "$each" || echo "the checks beside it" >>"$said/failed"; done
beside=""

cat "$said"/*.sh
if [ -s "$said/failed" ]; then
    echo "== failed: $(tr '\n' ' ' <"$said/failed")"
    exit 1
fi
