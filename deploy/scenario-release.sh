#!/bin/sh
# Tries what deploy/release.sh has made, each by its real tool: checksums, the archive and its manual, the wheel by pip, the Debian package by lintian and by
# apt in a Debian of its own, the container file by buildah, the bill of materials against its schema.
#
#   deploy/scenario-release.sh DIRECTORY      what deploy/release.sh DIRECTORY has made; some minutes
#
# Wants root, for debootstrap and buildah. The bases of the container file are fetched where their registries can be reached; otherwise a Debian stands in for
# them, and it says so. What else cannot be had is skipped, and said.
set -eu

[ $# -eq 1 ] || {
    echo "usage: deploy/scenario-release.sh DIRECTORY" >&2
    exit 64
}
made=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
checks="the release"
. deploy/testing.sh

work=$(mktemp -d)
debian=$work/debian
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

one() {
    if [ $# -ne 1 ] || [ ! -f "$1" ]; then
        echo "$checks: there is not one such file: $*" >&2
        exit 1
    fi
    echo "$1"
}

echo "== checksums"
(cd "$made" && sha256sum --check --quiet SHA256SUMS)

echo "== the archive"
archive=$(one "$made"/kvatlas-*.tar.gz)
tar -xzf "$archive" -C "$work"
unpacked=$(echo "$work"/kvatlas-*)
program=$unpacked/kvatlas
"$program" --version
# The runbook is in the program.
"$program" explain upstream_gap | grep -q . && "$program" doctor --help >/dev/null
for page in "$unpacked"/man/*.1; do
    # A long word in a narrow column is no mistake.
    said=$(MANWIDTH=80 man --warnings -l "$page" 2>&1 >/dev/null | grep -v 'cannot adjust line' || true)
    [ -z "$said" ] || {
        echo "$page: $said" >&2
        exit 1
    }
done
bash -n "$unpacked/kvatlas.bash"

echo "== the wheel"
make_environment "$work/python" 10
pip_install "$work/python" "$(one "$made"/kvatlas-*.whl)"
"$work/python/bin/kvatlas" --version
"$work/python/bin/python" -c 'import kvatlas'

echo "== the bill of materials"
if "$work/python/bin/pip" install --quiet --disable-pip-version-check 'cyclonedx-python-lib[json-validation]==11.11.0'; then
    "$work/python/bin/python" - "$(one "$made"/kvatlas-*.cdx.json)" <<'PYTHON'
import json
import sys
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

text = Path(sys.argv[1]).read_text()
version = SchemaVersion[f"V{json.loads(text)['specVersion'].replace('.', '_')}"]
error = JsonStrictValidator(version).validate_str(text)
sys.exit(f"the bill of materials: {error}" if error else 0)
PYTHON
else
    skip "the bill of materials was not compared with its schema"
fi

echo "== the Debian package"
package=$(one "$made"/kvatlas_*.deb)
if command -v lintian >/dev/null; then lintian --fail-on error "$package"; else skip "there is no lintian: apt-get install lintian"; fi
if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
    skip "the package was not installed, and the container file not built: that needs root and debootstrap"
    exit 0
fi
# shellcheck disable=SC2016
mirror=$(apt-get indextargets --format '$(SITE)' | head -n 1)
debootstrap --variant=minbase bookworm "$debian" "$mirror" >"$work/debootstrap.log" 2>&1 || {
    tail -n 5 "$work/debootstrap.log" >&2
    skip "no Debian could be made by debootstrap: the package was not installed, and the container file not built"
    exit 0
}
cp "$package" "$debian/kvatlas.deb"
inside() { chroot "$debian" env DEBIAN_FRONTEND=noninteractive LC_ALL=C "$@"; }
inside apt-get install -y -q --no-install-recommends systemd-standalone-sysusers ./kvatlas.deb >"$work/apt.log" 2>&1 || {
    cat "$work/apt.log" >&2
    exit 1
}
inside kvatlas --version
inside getent passwd kvatlas
[ "$(inside stat -c '%G %a' /etc/kvatlas/kvatlas.toml)" = "kvatlas 640" ]
inside kvatlas serve --config /etc/kvatlas/kvatlas.toml --check-config >/dev/null
[ -f "$debian/lib/systemd/system/kvatlas.service" ] || [ -f "$debian/usr/lib/systemd/system/kvatlas.service" ]
echo '# kept' >>"$debian/etc/kvatlas/kvatlas.toml"
inside dpkg --install /kvatlas.deb >/dev/null
grep -q '# kept' "$debian/etc/kvatlas/kvatlas.toml"
inside apt-get remove -y -q kvatlas >/dev/null
[ -f "$debian/etc/kvatlas/kvatlas.toml" ] && [ ! -e "$debian/usr/bin/kvatlas" ]
echo 'KVATLAS_NATS_PASSWORD=x' >"$debian/etc/kvatlas/bridge.env"
inside apt-get purge -y -q kvatlas >/dev/null
[ ! -e "$debian/etc/kvatlas" ]

echo "== the container file"
if ! command -v buildah >/dev/null; then
    skip "the container file was not built: apt-get install buildah"
    exit 0
fi
export BUILDAH_ISOLATION=chroot
buildah() { command buildah --root "$work/images" --runroot "$work/run" "$@"; }
if ! buildah pull "$(sed -n 's/^FROM \(gcr.*\)/\1/p' deploy/container/Dockerfile)" >/dev/null 2>&1; then
    echo "the registries cannot be reached: a Debian stands in for both bases, and the program that is built is that of the archive"
    rm "$debian/kvatlas.deb"
    sed -n 's/^FROM \([^ ]*\).*/\1/p' deploy/container/Dockerfile | while read -r base; do
        container=$(buildah from scratch)
        buildah copy --quiet "$container" "$debian" / >/dev/null
        case $base in
        rust:*)
            # The container's own build script takes a program that is there.
            buildah copy --quiet "$container" "$program" /built/kvatlas >/dev/null
            buildah config --env KVATLAS_BIN=/built/kvatlas "$container"
            ;;
        esac
        buildah commit --quiet "$container" "$base" >/dev/null
        buildah rm "$container" >/dev/null
    done
fi
# Only this form has health checks.
buildah bud --quiet --pull-never --format docker --file deploy/container/Dockerfile --tag kvatlas:release . >/dev/null
container=$(buildah from --pull-never kvatlas:release)
buildah inspect --type image kvatlas:release >"$work/image.json"
grep -q '"/usr/local/bin/kvatlas"' "$work/image.json"
grep -q '"probe"' "$work/image.json"
[ "$(buildah inspect --format '{{.OCIv1.Config.User}}' --type image kvatlas:release)" = "65532:65532" ]
buildah run "$container" -- /usr/local/bin/kvatlas --version
buildah run "$container" -- /usr/local/bin/kvatlas serve --nats-url nats://127.0.0.1:4222 --snapshots-directory /var/lib/kvatlas --check-config >/dev/null
echo "all that was made works"
