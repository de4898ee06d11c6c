#!/bin/sh
# Tests the page of the admin listener in a headless Chromium against the debug build of the daemon. Without Chromium, its driver, Python
# 3.10 or pip it says so and skips; with CI=true that is a failure.
#
#   KVATLAS_BIN                 a kvatlas to test against instead of target/debug/kvatlas
#   NATS_SERVER_BIN             a nats-server to use instead of one in PATH or .tools/
#   KVATLAS_TEST_WRITE_PAGES=1  also write the pictures of the documentation
set -eu

cd "$(dirname "$0")/.."
environment=$PWD/.tools/page
checks="the tests of the page"
. deploy/testing.sh

for program in chromium chromedriver; do
    command -v "$program" >/dev/null 2>&1 ||
        skip_all "there is no $program; install it, on Debian with: apt-get install chromium chromium-driver"
done
make_environment "$environment" 10
install_requirements "$environment" tests/page/requirements.txt
install_kvatlas "$environment" ""
need_kvatlas

cd tests/page
pytest_twice "$environment/bin/python" -s "$@"
