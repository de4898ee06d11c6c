#!/bin/sh
# What deploy/test.sh checks beside the integration tests: the words of doc comments, names of types, circles of files, texts of errors, the examples in the
# documentation, the libraries, and the binary. All of it, whatever fails.
set -eu

cd "$(dirname "$0")/.."
checks="deploy/test-units.sh"
. deploy/testing.sh

outcome=0
cargo test --locked --workspace --doc || outcome=1
# The tests of these libraries only compute, without a clock: they take what the others leave. A scenario with real processes is under
# load as long as it lasts, so that it costs more where it is held up.
# shellcheck disable=SC2016
run='case $1 in */kvatlas_core-* | */kvatlas_lab-* | */kvatlas_vocab-*) exec nice -n 19 "$@" ;; esac; exec "$@"'
cargo test --config "target.'cfg(all())'.runner = ['sh', '-c', '''$run''', 'run']" \
    --locked --workspace --no-fail-fast --lib --bins || outcome=1
if python3 -c '' 2>/dev/null; then
    deploy/lint-words.py || outcome=1
    deploy/lint-names.py || outcome=1
    deploy/lint-circles.py || outcome=1
    deploy/lint-errors.py || outcome=1
    deploy/lint-locks.py || outcome=1
else
    skip "there is no python3 for deploy/lint-words.py, deploy/lint-names.py, deploy/lint-circles.py, deploy/lint-errors.py and deploy/lint-locks.py"
fi
exit "$outcome"
