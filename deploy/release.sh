#!/bin/sh
# Builds the release of the commit that is checked out, so that whoever builds it gets the same bytes:
#   deploy/release.sh DIRECTORY            kvatlas-VERSION-TARGET.tar.gz, the wheel that pip installs, the Debian package, a bill of
#                                          materials, and SHA256SUMS
#   deploy/release.sh --check DIRECTORY    builds it twice, at two places, and compares
#
# The Debian package needs cargo-deb (cargo install cargo-deb); without it the package is left out, and that is said. deploy/scenario-release.sh tries all
# that was made.
# The same bytes need the same commit, toolchain (releasing.md), C compiler and C library. Paths, times, users and the environment do not count.
#   KVATLAS_RELEASE_PROFILE   another profile than dist, to try the script out quickly
set -eu

profile=${KVATLAS_RELEASE_PROFILE:-dist}
is_check=false
if [ "${1:-}" = --check ]; then
    is_check=true
    shift
fi
[ $# -eq 1 ] || {
    echo "usage: deploy/release.sh [--check] DIRECTORY" >&2
    exit 64
}
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."

if [ -n "$(git status --porcelain --untracked-files=no)" ]; then
    echo "release: the checkout has changes; a release is of a commit" >&2
    exit 1
fi
commit=$(git rev-parse --short=12 HEAD)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH LC_ALL=C TZ=UTC
target=$(rustc -vV | sed -n 's/^host: //p')
cargo_home=${CARGO_HOME:-$HOME/.cargo}
sysroot=$(rustc --print sysroot)

# Builds the commit in the directory $1, and leaves the archive in $2.
build() {
    mkdir -p "$1/source" "$2"
    git archive HEAD | tar -x -C "$1/source"
    (
        cd "$1/source"
        # A path of this machine would be in panic messages and in debug information.
        RUSTFLAGS="--remap-path-prefix=$1/source=/kvatlas --remap-path-prefix=$1/target=/target \
--remap-path-prefix=$cargo_home=/cargo --remap-path-prefix=$sysroot=/rust"
        CFLAGS="-ffile-prefix-map=$1=/kvatlas -ffile-prefix-map=$cargo_home=/cargo"
        export RUSTFLAGS CFLAGS
        KVATLAS_COMMIT=$commit CARGO_INCREMENTAL=0 CARGO_TARGET_DIR=$1/target \
            cargo build --locked --profile "$profile" --bin kvatlas
    )
    case $profile in
    dev) built=$1/target/debug/kvatlas ;;
    *) built=$1/target/$profile/kvatlas ;;
    esac
    version=$("$built" --version | cut -d' ' -f2)
    name=kvatlas-$version-$target
    mkdir -p "$1/$name/man"
    install -m 755 "$built" "$1/$name/kvatlas"
    "$built" man --directory "$1/$name/man"
    for shell in bash zsh fish; do "$built" completions "$shell" >"$1/$name/kvatlas.$shell"; done
    (
        cd "$1/source"
        cp LICENSE README.md CHANGELOG.md deploy/licences.md "$1/$name/"
        cp -R deploy/systemd deploy/nats deploy/prometheus "$1/$name/"
    )
    chmod -R u=rwX,go=rX "$1/$name"
    tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$1" -cf - "$name" |
        gzip --no-name --best >"$2/$name.tar.gz"
    # From the archive, too: pip packs whatever lies beside the sources.
    "$1/source/deploy/wheel.sh" "$built" "$2" >/dev/null
    if cargo deb --version >/dev/null 2>&1; then
        KVATLAS_BIN=$built deploy/debian/build.sh "$2" >/dev/null
    else
        echo "SKIPPED: the Debian package: there is no cargo-deb" >&2
    fi
    python3 deploy/sbom.py >"$2/kvatlas-$version.cdx.json"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
build "$work/first" "$out"
if [ "$is_check" = true ]; then
    # A longer path, and another name.
    build "$work/the-second-time" "$work/again"
    for archive in "$work"/again/*; do
        if ! cmp "$archive" "$out/${archive##*/}"; then
            echo "release: ${archive##*/} is not the same when it is built again" >&2
            exit 1
        fi
        echo "release: ${archive##*/} is the same, built at two places"
    done
fi
(cd "$out" && find . -maxdepth 1 -name 'kvatlas[-_]*' -printf '%P\n' | sort | xargs sha256sum >SHA256SUMS && cat SHA256SUMS)
