#!/bin/sh
# What deploy/test.sh checks beside the tests of cargo, with real processes, against the debug build of the daemon: genuine engines, the
# Python package, the page of the admin listener, dashboards, alerts, compose and packages. All of it, whatever fails; ends with a
# failure if anything has failed.
set -eu

cd "$(dirname "$0")/.."
failed=""

check() {
    echo "== $*"
    "$@" || failed="$failed $1"
}

# The engines' wheels are large: they are fetched only on request, and by CI.
if [ "${CI:-}" = true ] || [ -d .tools/engines/vllm ]; then
    check deploy/scenario-engines.sh --short
else
    line="SKIPPED: genuine engines: deploy/scenario-engines.sh --short fetches 375 MB for them"
    echo "$line" >&2
    echo "$line" >>"${KVATLAS_TEST_SKIPS:-/dev/null}"
fi
check deploy/test-python.sh
check deploy/test-page.sh
check deploy/test-deploy.sh

if [ -n "$failed" ]; then
    echo "== failed:$failed"
    exit 1
fi
