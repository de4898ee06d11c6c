#!/bin/sh
# Installs the Python package of src/python into .tools/python, checks its types and those of deploy/router-example, and runs the
# tests of both, and of deploy/go-example where Go is, against the debug build of the daemon. Without Python 3.10 or pip it says so
# and skips; with CI=true that is a failure.
#
#   KVATLAS_BIN       a kvatlas to test against instead of target/debug/kvatlas
#   NATS_SERVER_BIN   a nats-server to use instead of one in PATH or .tools/
set -eu

cd "$(dirname "$0")/.."
root=$PWD
environment=$root/.tools/python
checks="the tests of the Python package"
. deploy/testing.sh

make_environment "$environment" 10
install_requirements "$environment" deploy/router-example/requirements.txt
install_kvatlas "$environment" test
need_kvatlas

# Each has a cache of its own: what is known with other options is of no use.
(cd deploy/router-example && "$environment/bin/mypy" --cache-dir "$root/.tools/mypy/router-example" --strict --ignore-missing-imports ./*.py)
cd src/python
"$environment/bin/mypy" --cache-dir "$root/.tools/mypy/package"
pytest_twice "$environment/bin/python" "$@"
