# shellcheck shell=sh
# What the scripts that test share. It is sourced, in the root of the repository; the caller sets $checks, the name of what it checks.
: "${checks:?}"

# Says why something is left out, and has deploy/test.sh count it. With CI=true it is a failure.
skip() {
    if [ "${CI:-}" = true ]; then
        echo "$checks: $*" >&2
        exit 1
    fi
    line="SKIPPED: $checks: $*"
    echo "$line" >&2
    if [ -n "${KVATLAS_TEST_SKIPS:-}" ]; then echo "$line" >>"$KVATLAS_TEST_SKIPS"; fi
}

# Leaves out everything that the script checks.
skip_all() {
    skip "$@"
    exit 0
}

# Makes a virtual environment of Python in the folder $1, unless it is there; $2 is the least minor version.
make_environment() {
    python3 -c "import sys; sys.exit(sys.version_info < (3, $2))" 2>/dev/null ||
        skip_all "there is no Python 3.$2 or later; install it, on Debian with: apt-get install python3 python3-venv"
    if "$1/bin/python" -c '' 2>/dev/null; then return; fi
    rm -rf "$1"
    python3 -m venv "$1" || skip_all "no virtual environment could be made; on Debian: apt-get install python3-venv"
}

# Installs with pip into the environment $1; the rest are the arguments of pip.
pip_install() {
    into=$1
    shift
    "$into/bin/pip" install --quiet --disable-pip-version-check "$@" ||
        skip_all "pip could not install what is needed: see what it said above"
}

# Installs with pip into the environment $1 what the file $2 requires, unless that was done.
install_requirements() {
    if cmp -s "$2" "$1/requirements.txt"; then return; fi
    pip_install "$1" -r "$2"
    cp "$2" "$1/requirements.txt"
}

# Installs the Python package of this repository into the environment $1, with the extra $2 if it is not empty, unless it is there as it is.
install_kvatlas() {
    made_of=$(find src/python/pyproject.toml src/python/README.md src/python/kvatlas -type f ! -name '*.pyc' -exec cksum {} + | sort)
    if [ "$(cat "$1/made-of" 2>/dev/null)" = "$made_of" ]; then return; fi
    pip_install "$1" "./src/python${2:+[$2]}"
    # The version stays the same while the sources change.
    pip_install "$1" --no-deps --force-reinstall ./src/python
    echo "$made_of" >"$1/made-of"
}

# The binary under test. With KVATLAS_TEST_PREPARE=1 a script ends here, when it has made its environment.
need_kvatlas() {
    if [ "${KVATLAS_TEST_PREPARE:-}" = 1 ]; then exit 0; fi
    export KVATLAS_BIN="${KVATLAS_BIN:-$PWD/target/debug/kvatlas}"
    [ -x "$KVATLAS_BIN" ] || cargo build --locked
}

# An etcd in ETCD_BIN, which is empty without one. Not a failure in CI either.
need_etcd() {
    export ETCD_BIN="${ETCD_BIN:-$(command -v etcd || true)}"
    [ -n "$ETCD_BIN" ] || (CI="" skip "there is no etcd: Dynamo's records are in files only; on Debian: apt-get install etcd-server, or give ETCD_BIN")
}

# Tests with real processes miss a deadline now and then where a machine is busy. Such a test has a second try, alone, and is counted
# as flaky. There is none after a wrong answer, none where more than this many have failed, none for a test in tests/flaky.txt, and none
# with KVATLAS_TEST_STRICT=1.
FLAKY_MAX=5
FLAKY_BEFORE="$PWD/tests/flaky.txt"

# Whether one of these tests has been flaky before.
flaky_before() {
    for name in "$@"; do
        if grep -q -x -F -e "$name" "$FLAKY_BEFORE"; then
            echo "$name has had its second try (tests/flaky.txt): find out why it fails" >&2
            return 0
        fi
    done
    return 1
}

# Counts tests that passed with their second try.
flaky() {
    line="FLAKY: $checks: passed with the second try only; find out why, and add to tests/flaky.txt: $*"
    echo "$line" >&2
    if [ -n "${KVATLAS_TEST_SKIPS:-}" ]; then echo "$line" >>"$KVATLAS_TEST_SKIPS"; fi
}

# Whether these tests, of which the log is in the file $1, may have a second try.
may_try_again() {
    log=$1
    shift
    [ "${KVATLAS_TEST_STRICT:-}" != 1 ] && [ "$#" -gt 0 ] && [ "$#" -le "$FLAKY_MAX" ] && ! flaky_before "$@" &&
        ! grep -q 'answers were wrong' "$log"
}

# Runs a command, and keeps what it says in the file $1, too.
logged() {
    log=$1
    shift
    { "$@" 2>&1 || echo "failed with status $?"; } | tee "$log"
    ! tail -n 1 "$log" | grep -q '^failed with status '
}

# Runs pytest with the interpreter $1 in this folder; the rest are its arguments.
pytest_twice() {
    interpreter=$1
    shift
    cache=$(mktemp -d)
    tried=0
    logged "$cache/log" "$interpreter" -B -m pytest -q -o cache_dir="$cache" "$@" || tried=1
    if [ "$tried" -ne 0 ]; then
        failed=$("$interpreter" -c 'import json, sys; print(*json.load(open(sys.argv[1])))' "$cache/v/cache/lastfailed" 2>/dev/null) || failed=
        # shellcheck disable=SC2086
        if may_try_again "$cache/log" $failed; then
            echo "== a second try of: $failed"
            if logged "$cache/log" "$interpreter" -B -m pytest -q -o cache_dir="$cache" --last-failed --last-failed-no-failures none "$@"; then
                tried=0
                flaky "$failed"
            fi
        fi
    fi
    rm -r "$cache"
    return "$tried"
}

# Runs the integration tests of the workspace. They mostly wait: eight at a time keep two cores busy.
integration_twice() {
    said=$(mktemp)
    tried=0
    cores=$(getconf _NPROCESSORS_ONLN)
    RUST_TEST_THREADS="${RUST_TEST_THREADS:-$((cores > 8 ? cores : 8))}" \
        logged "$said" cargo test --locked --workspace --no-fail-fast --test '*' || tried=1
    if [ "$tried" -ne 0 ]; then
        failed=$(sed -n 's/^test \([^ ]*\) \.\.\. FAILED$/\1/p' "$said" | sort -u | tr '\n' ' ')
        count=$(($(printf '%s' "$failed" | wc -w)))
        # shellcheck disable=SC2086
        if may_try_again "$said" $failed; then
            echo "== a second try of: $failed"
            # Those with real processes only: one of another binary has no such excuse, and is missed in the count.
            # shellcheck disable=SC2086
            if RUST_TEST_THREADS=1 logged "$said" cargo test --locked --workspace --test integration -- --exact $failed &&
                grep -q "^test result: ok\. $count passed" "$said"; then
                tried=0
                flaky "$failed"
            fi
        fi
    fi
    rm -f "$said"
    return "$tried"
}
