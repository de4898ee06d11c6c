#!/bin/sh
# Checks the Go module of src/go and deploy/go-example: their form, the contract's vectors, and scenarios with faults against the debug
# build of the daemon. Takes the modules of their go.mod, or Debian's where these cannot be had. Without Go or modules it says so and
# skips; with CI=true that is a failure.
#
#   KVATLAS_BIN       a kvatlas to test against instead of target/debug/kvatlas
#   NATS_SERVER_BIN   a nats-server to use instead of one in PATH or .tools/
set -eu

cd "$(dirname "$0")/.."
root=$PWD
checks="the tests of the Go module"
. deploy/testing.sh

command -v go >/dev/null ||
    skip_all "there is no Go; install 1.22 or later, or on Debian: apt-get install golang-go golang-github-nats-io-go-nats-dev golang-github-vmihailenco-msgpack.v5-dev"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# Takes what is in go.mod as it is, with the Go that there is.
export GOTOOLCHAIN=local GOFLAGS="-mod=readonly -buildvcs=false"
debian=/usr/share/gocode
if ! (cd src/go && go list -deps -test ./... && cd ../../deploy/go-example && go list -deps ./...) >"$work/list" 2>&1; then
    if [ ! -d "$debian/src/github.com/nats-io/nats.go" ] || [ ! -d "$debian/src/github.com/vmihailenco/msgpack" ]; then
        cat "$work/list" >&2
        skip_all "$(go version) cannot get the modules of src/go, and Debian's are not installed"
    fi
    # Without go.mod, a module is found by its place.
    mkdir -p "$work/gopath/src/github.com/kvatlas"
    ln -s "$root" "$work/gopath/src/github.com/kvatlas/kvatlas"
    export GO111MODULE=off GOPATH="$work/gopath:$debian" GOFLAGS=
    root=$work/gopath/src/github.com/kvatlas/kvatlas
fi
need_kvatlas

formatted=$(gofmt -l src/go deploy/go-example)
[ -z "$formatted" ] || { echo "gofmt would change: $formatted" >&2; exit 1; }
(cd "$root/deploy/go-example" && go vet . && go build -o "$work/example" . && go test -count=1 .)
cd "$root/src/go"
go vet .
# They mostly wait: six at a time keep two cores busy.
if ! logged "$work/log" go test -count=1 -parallel 6 "$@" .; then
    failed=$(sed -n 's/^--- FAIL: \([A-Za-z0-9]*\) .*/\1/p' "$work/log" | sort -u)
    # shellcheck disable=SC2086
    may_try_again "$work/log" $failed || exit 1
    echo "== a second try of: $failed"
    # shellcheck disable=SC2086
    logged "$work/log" go test -count=1 -parallel 1 -run "^($(echo $failed | tr ' ' '|'))\$" . || exit 1
    # shellcheck disable=SC2086
    flaky $failed
fi
