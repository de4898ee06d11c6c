#!/bin/sh
# Makes a Python wheel that carries the program beside the client library, from a program that has been built:
#   deploy/wheel.sh PROGRAM DIRECTORY      kvatlas-VERSION-py3-none-PLATFORM.whl
#
# Who installs it has `kvatlas` as a command, and compiles nothing. The platform is this machine's, with the least C library that the program
# runs with. The same program gives the same bytes where SOURCE_DATE_EPOCH is the same.
set -eu

[ $# -eq 2 ] || {
    echo "usage: deploy/wheel.sh PROGRAM DIRECTORY" >&2
    exit 64
}
program=$(realpath "$1")
mkdir -p "$2"
out=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
checks="the wheel with the program"
. deploy/testing.sh

environment=$PWD/.tools/wheel-python
make_environment "$environment" 10
"$environment/bin/python" -c 'import flit_core, wheel' 2>/dev/null || pip_install "$environment" 'flit_core==3.12.0' 'wheel==0.48.0'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}
export SOURCE_DATE_EPOCH

"$environment/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$work" ./src/python
"$environment/bin/python" -m wheel unpack --dest "$work/unpacked" "$work"/kvatlas-*.whl >/dev/null
root=$(echo "$work"/unpacked/kvatlas-*)
mkdir -p "$root/${root##*/}.data/scripts"
install -m 755 "$program" "$root/${root##*/}.data/scripts/kvatlas"
cp LICENSE deploy/licences.md "$root"/*.dist-info/
sed -i 's/^Root-Is-Purelib: true$/Root-Is-Purelib: false/' "$root"/*.dist-info/WHEEL
# Whatever the umask was.
chmod -R u=rwX,go=rX "$root"

# The newest version of a symbol that the program takes from the C library.
least=$(grep -aoE 'GLIBC_2\.[0-9]+' "$program" | sort -t. -k2 -nu | tail -n 1 | cut -d. -f2)
case $(uname -s) in
Linux) platform=manylinux_2_${least:?"the program is not linked to the GNU C library"}_$(uname -m) ;;
*) platform=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_platform().translate({45: 95, 46: 95}))') ;;
esac
rm "$work"/kvatlas-*.whl
"$environment/bin/python" -m wheel pack --dest-dir "$work" "$root" >/dev/null
"$environment/bin/python" -m wheel tags --remove --platform-tag "$platform" "$work"/kvatlas-*.whl >/dev/null
mv "$work"/kvatlas-*.whl "$out"
echo "$out"/kvatlas-*"$platform".whl
