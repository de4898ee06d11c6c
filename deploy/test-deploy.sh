#!/bin/sh
# Exercises what deploys kvatlas, each piece with its real tool, against the debug build. What cannot be done for want of a tool is said
# and counted; with CI=true it is a failure. The Python packages that are needed go into .tools/deploy.
#
#   KVATLAS_BIN       a kvatlas to test with instead of target/debug/kvatlas
#   NATS_SERVER_BIN   a nats-server to use instead of one in PATH or .tools/
set -eu

cd "$(dirname "$0")/.."
root=$PWD
python=$root/.tools/deploy/bin/python

checks="deploy/"
. deploy/testing.sh

has() { command -v "$1" >/dev/null 2>&1; }

check_scripts() {
    # Each file is checked as the script that it is; what they import lies beside compose.yaml.
    MYPYPATH=deploy/compose:deploy "$python" -m mypy --cache-dir .tools/mypy/deploy --strict deploy/compose/*.py deploy/drill.py deploy/licences.py deploy/lint-circles.py deploy/lint-errors.py deploy/lint-locks.py deploy/lint-words.py deploy/prometheus/annotate.py deploy/sbom.py deploy/scenario-healthy.py deploy/sizing.py deploy/test-*.py
    if has shellcheck; then
        shellcheck --external-sources deploy/test*.sh deploy/scenario-*.sh deploy/release.sh deploy/wheel.sh deploy/demo.sh deploy/compose/env.sh deploy/container/build.sh deploy/debian/build.sh deploy/debian/p*
    else
        skip "shellcheck, which checks the scripts of deploy/, is not installed"
    fi
}

# The bill of materials, by the library of those who made its form.
check_bill() {
    "$python" deploy/sbom.py | "$python" -c '
import json, sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
text = sys.stdin.read()
error = JsonStrictValidator(SchemaVersion.V1_5).validate_str(text)
crates = len(json.loads(text)["components"])
sys.exit(f"sbom: {error}") if error else print(f"the bill of materials is sound: {crates} crates")'
}

# What licences.py cannot know: advisories. The database is fetched, so that this is no failure where there is no network.
check_advisories() {
    if cargo deny --version >/dev/null 2>&1; then
        cargo deny --locked check bans licenses sources
        cargo deny --locked check advisories || echo "advisories were not looked at, or there are some: see above"
    else
        echo "cargo-deny is not installed: advisories are not looked at (deploy/releasing.md does)"
    fi
}

# The configuration that the Debian package brings.
check_debian() {
    env -i "$KVATLAS_BIN" serve --config deploy/debian/kvatlas.toml --check-config
}

check_compose() {
    deploy/compose/env.sh 2>/dev/null
    if docker compose version >/dev/null 2>&1; then
        compose="docker compose"
    elif has docker-compose; then
        compose=docker-compose
    else
        skip "docker compose, which checks deploy/compose, is not installed"
        return 0
    fi
    $compose -f deploy/compose/compose.yaml config --quiet
    $compose -f deploy/compose/compose.yaml -f deploy/compose/extras.yaml config --quiet
}

# Each shell completes a word with the script made for it.
check_completions() {
    scripts=$(mktemp -d)
    for shell in bash zsh fish; do "$KVATLAS_BIN" completions "$shell" >"$scripts/kvatlas.$shell"; done
    check_completed bash "$(bash --norc -c "source '$scripts/kvatlas.bash'; COMP_WORDS=(kvatlas ser); COMP_CWORD=1
        _kvatlas kvatlas ser kvatlas; echo \"\${COMPREPLY[*]}\"")"
    if has fish; then
        check_completed fish "$(fish --no-config -c "source '$scripts/kvatlas.fish'; complete -C 'kvatlas ser'")"
    else
        skip "fish, which tries its completions, is not installed"
    fi
    if has zsh; then
        check_completed zsh "$(timeout 30 zsh -f deploy/complete.zsh "$scripts/kvatlas.zsh" 'kvatlas ser' 'kvatlas serve')"
    else
        skip "zsh, which tries its completions, is not installed"
    fi
    rm -r "$scripts"
}

check_completed() {
    echo "$1 completes: $2"
    case $2 in
    *serve*) ;;
    *)
        echo "test-deploy: $1 completes 'kvatlas ser' with: $2" >&2
        exit 1
        ;;
    esac
}

check_manual() {
    if ! has man; then
        skip "man, which renders the manual pages, is not installed"
        return 0
    fi
    pages=$(mktemp -d)
    "$KVATLAS_BIN" man --directory "$pages"
    for page in "$pages"/*.1; do
        # Where a long word leaves nothing to justify, that is no mistake.
        said=$(MANWIDTH=80 MANROFFOPT=-Wbreak man --warnings --local-file "$page" 2>&1 >"$page.txt") || said="man fails: $said"
        if [ -n "$said" ] || ! grep -q '^SYNOPSIS' "$page.txt"; then
            echo "test-deploy: ${page##*/}: $said" >&2
            exit 1
        fi
    done
    rm -r "$pages"
}

# Runs a check that needs services as processes in namespaces of their own. It ends with 2 where there can be none.
check_as_processes() {
    status=0
    why=$("$python" "$2") || status=$?
    echo "$why"
    case $status in
    0) ;;
    2) skip "$1: $why" ;;
    *) exit 1 ;;
    esac
}

make_environment "$root/.tools/deploy" 10
install_requirements "$root/.tools/deploy" deploy/test-requirements.txt
need_kvatlas

check_completions
check_manual
check_scripts
check_compose
check_debian
"$python" deploy/licences.py --check
"$python" deploy/prometheus/annotate.py
check_bill
check_advisories
"$python" deploy/test-commands.py
"$python" deploy/test-sizing.py
"$python" deploy/test-reload.py
"$python" deploy/test-helm.py
check_as_processes "the steps of the container's file" deploy/test-container.py
check_as_processes "the guide to systemd" deploy/test-systemd.py
check_as_processes "the deployment of deploy/compose" deploy/test-monitoring.py
