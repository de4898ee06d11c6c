#!/bin/sh
# Runs kvatlas with a real Kubernetes API, without a cluster: kube-apiserver and etcd on loopback, pods as objects that the scenario makes and
# deletes, genuine caches of vLLM behind some of them. Then the chart: installed by Helm, upgraded to shards and back, and every variant of it
# applied by kubectl. Prints a line a check, with what was measured. Arguments are those of tests/kubernetes/__main__.py:
#
#   deploy/scenario-kubernetes.sh                everything: about eight minutes
#   deploy/scenario-kubernetes.sh --short        the API is away for less time, and fewer variants are applied
#   deploy/scenario-kubernetes.sh --only pods    or chart
#
# The binaries are built once, with Go, by ../shared/kubernetes/build.sh, into .tools/kubernetes: about ten minutes. Without Go or that
# folder it says so and skips; with CI=true that is a failure.
#
#   KVATLAS_KUBERNETES  a folder with kube-apiserver, etcd, kubectl and helm, instead of .tools/kubernetes
#   KVATLAS_SHARED      the folder with kubernetes/build.sh and start.sh, instead of ../shared
#   KVATLAS_BIN         a kvatlas to test instead of target/debug/kvatlas
#   NATS_SERVER_BIN     a nats-server to use instead of one in PATH or .tools/
set -eu

cd "$(dirname "$0")/.."
root=$PWD
environment=$root/.tools/engines-python

checks="Kubernetes"
. deploy/testing.sh

helm=v3.22.0
export KVATLAS_SHARED="${KVATLAS_SHARED:-$root/../shared}"
binaries=${KVATLAS_KUBERNETES:-$root/.tools/kubernetes}

[ -x "$KVATLAS_SHARED/kubernetes/start.sh" ] || skip_all "there is no kubernetes/start.sh in $KVATLAS_SHARED: name its folder in KVATLAS_SHARED"
for binary in kube-apiserver etcd kubectl helm; do
    [ -x "$binaries/$binary" ] || missing=$binary
done
if [ -n "${missing:-}" ]; then
    command -v go >/dev/null || skip_all "there is no $missing in $binaries, and no Go to build it with"
    "$KVATLAS_SHARED/kubernetes/build.sh" "$binaries"
    [ -x "$binaries/helm" ] || GOBIN=$binaries go install "helm.sh/helm/v3/cmd/helm@$helm"
fi

make_environment "$environment" 11
"$environment/bin/python" -c 'import msgspec, zmq, cbor2, xxhash, numpy, pydantic' 2>/dev/null ||
    pip_install "$environment" msgspec pyzmq cbor2 xxhash numpy pydantic
# Not a failure in CI either: so much cannot be fetched everywhere.
"$environment/bin/python" tests/engines/fetch.py .tools/engines || CI="" skip_all "the wheel of vLLM could not be fetched: see what pip said above"
make_environment "$root/.tools/deploy" 10
install_requirements "$root/.tools/deploy" deploy/test-requirements.txt

deploy/setup.sh
need_kvatlas
values=$(mktemp)
trap 'rm -f "$values"' EXIT
"$root/.tools/deploy/bin/python" deploy/test-helm.py --print-values >"$values"
KVATLAS_ENGINES=$root/.tools/engines KVATLAS_CHART_VALUES=$values "$environment/bin/python" tests/kubernetes "$binaries" "$@"
