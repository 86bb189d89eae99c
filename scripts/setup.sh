#!/usr/bin/env bash
# Makes .venv with everything the tests and the quickstart need. Does nothing if that was done already.
#
#   scripts/setup.sh                   VENV=folder to put it elsewhere, PYTHON=interpreter (default python3, 3.10 or newer)
#   scripts/setup.sh --core 0.19.2     .venv-core-0.19.2 as well, with another megatron-core, for its tests; likewise
#                                      --torch 2.6.0, --deepspeed 0.19.6, and several at once
#   TE="2.10.0" scripts/setup.sh       other versions of Transformer Engine's Python for tests/te than the tested ones
#
# Such a second one is made with Python 3.12, which megatron-core declares since 0.17, where that is installed (or PYTHON
# names it) and another core is asked for. Otherwise, and with BORROW=yes, it borrows all else from the first, in seconds:
# it ignores what megatron-core declares, lends it `typing.override`, the one name of Python 3.12 that it uses, the
# compiled helper of the first one's core, and tests/borrowed/triton in place of triton's gigabyte. Good for tests alone.
#
# The machine's own pip configuration (index, proxy, certificates) is used as it is.
set -euo pipefail
cd "$(dirname "$0")/.."

wanted_versions=() name=.venv core=
while [[ ${1:-} == --* ]]; do
    package=${1#--} version=${2:?$1 wants a version}
    name+=-$package-$version
    case $package in
        core) core=$version wanted_versions+=("megatron-core==$version") ;;
        torch | deepspeed) wanted_versions+=("$package==$version") ;;
        *) echo "scripts/setup.sh: $1 is none of --core, --torch, --deepspeed" >&2; exit 2 ;;
    esac
    shift 2
done
if [ ${#wanted_versions[@]} -gt 0 ]; then
    VENV= PYTHON= "$0" # what it may borrow
    VENV=${VENV:-$name}
    if [ "${BORROW:-}" = yes ]; then
        PYTHON=.venv/bin/python # no other can load what is compiled for it
    elif [ -z "${PYTHON:-}" ]; then
        for PYTHON in ${core:+python3.12 python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python} .venv/bin/python; do
            "$PYTHON" -c 'import ensurepip' 2>/dev/null && break
        done
    fi
fi
engines=${TE-2.9.0 2.11.0}
beside=()
venv=${VENV:-.venv}
python=${PYTHON:-python3}
stamp=$venv/.installed
log=$venv/setup.log

mkdir -p "$venv"
if command -v flock >/dev/null; then
    exec 9>"$venv/.lock" # two callers at once: the second waits and then finds the work done
    flock 9
fi
wanted=$(pwd; echo "${wanted_versions[@]}" "$engines"; (sed '/^\[tool\./,$d' pyproject.toml; cat setup.py scripts/constraints.txt scripts/setup.sh) | sha256sum)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

fail() {
    echo "scripts/setup.sh: $1; the end of $log:" >&2
    tail -n 25 "$log" >&2
    exit 1
}
quietly() { "$@" >>"$log" 2>&1; }

: >"$log"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "scripts/setup.sh: $python is too old; set PYTHON to a Python 3.10 or newer" >&2; exit 1; }
[ -t 2 ] && echo "making $venv (a few minutes the first time; log: $log)" >&2
borrows=
if [ ${#wanted_versions[@]} -gt 0 ] &&
    { [ "${BORROW:-}" = yes ] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; }; then
    borrows=yes
fi
quietly "$python" -m venv ${borrows:+--without-pip} "$venv" ||
    fail "$python cannot make a virtual environment; install its venv module (Debian: python3-venv)"

pip=("$venv/bin/python" -m pip --disable-pip-version-check)
[ -z "$borrows" ] || pip=(.venv/bin/python -m pip --python "$venv/bin/python" --disable-pip-version-check)
install=("${pip[@]}" install --no-compile) # pip compiles modules one after the other; see compile_all
compile_all() { "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" "$venv/transformer_engine" >>"$log" 2>&1 || true; } # some are no Python 3
constraints=scripts/constraints.txt
# Without a GPU the default index would bring several gigabytes of CUDA libraries along: unless the configured index offers
# a CPU build already, ask PyTorch's own.
install_torch() {
    local cpu_only=() offered
    if ! command -v nvidia-smi >/dev/null; then
        offered=$("${pip[@]}" install --dry-run --no-deps "$1" 2>&1 || true)
        [[ $offered == *+cpu* ]] || cpu_only=(--extra-index-url https://download.pytorch.org/whl/cpu)
    fi
    quietly "${install[@]}" "${cpu_only[@]}" "${@:2}" "$1" || fail "cannot install $1"
}
if [ ${#wanted_versions[@]} -gt 0 ]; then
    # What Megatron-LM's scripts import beside; newer cores import triton, which torch's CPU build does not bring.
    beside=(six regex pyyaml triton)
    if [ -n "$borrows" ]; then
        site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        borrowed=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        for one in "${wanted_versions[@]}"; do
            case $one in
                torch==*) install_torch "$one" ;; # before anything is borrowed: its own needs beside it
                deepspeed==*) DS_BUILD_OPS=0 quietly "${install[@]}" --no-deps "$one" || fail "cannot install $one" ;;
                *)  # There is no wheel for this Python, but that of another has the same modules.
                    quietly "${install[@]}" --no-deps --ignore-requires-python --python-version 3.12 \
                        --only-binary :all: --upgrade --target "$site" "$one" || fail "cannot install $one"
                    cp "$borrowed"/megatron/core/datasets/helpers_cpp.* "$site/megatron/core/datasets/"
                    echo "import typing, typing_extensions; typing.override = typing_extensions.override" >"$site/override.pth"
                    "$venv/bin/python" -c 'import triton' 2>/dev/null || echo "$PWD/tests/borrowed" >"$site/triton.pth" ;;
            esac
        done
        echo "import site; site.addsitedir('$borrowed')" >"$site/borrowed.pth"
        [ -z "${MEGATRON_LM:-}" ] || quietly "${install[@]}" --no-deps six regex pyyaml || fail "cannot install six"
        compile_all
        echo "$wanted" >"$stamp"
        exit 0
    fi
    constraints=$venv/constraints.txt
    cp scripts/constraints.txt "$constraints"
    for one in "${wanted_versions[@]}"; do sed -i "s/^${one%%==*}==.*/$one/" "$constraints"; done
fi
if ! "$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    install_torch "$(grep '^torch==' "$constraints")" -c "$constraints"
fi
# deepspeed is a source package: no operator is compiled here (DS_BUILD_OPS=0, its default), it only copies files.
DS_BUILD_OPS=0 quietly "${install[@]}" -c "$constraints" -e ".[deepspeed,megatron,dev,docs]" "${beside[@]}" ||
    fail "cannot install the package"
# etcd, for the tests of `--store`: Debian's packages, unpacked beside the rest and not installed. Without them these tests
# are skipped.
if [ ${#wanted_versions[@]} -eq 0 ] && ! command -v etcd >/dev/null && ! [ -x "$venv/etcd/usr/bin/etcd" ] && command -v apt-get dpkg-deb >/dev/null; then
    packages=$(mktemp -d)
    (cd "$packages" && timeout 60 apt-get download etcd-server etcd-client) >>"$log" 2>&1 &&
        for package in "$packages"/*.deb; do quietly dpkg-deb -x "$package" "$venv/etcd"; done
    rm -rf "$packages"
fi
# Transformer Engine's Python, for tests/te, which has its compiled module's place taken: pure packages beside the rest,
# which Python does not find by itself. Without them these tests are skipped.
for engine in $engines; do
    [ -d "$venv/transformer_engine/$engine" ] && continue
    "${install[@]}" --no-deps --target "$venv/transformer_engine/.$engine" "transformer-engine==$engine" >>"$log" 2>&1 &&
        mv "$venv/transformer_engine/.$engine" "$venv/transformer_engine/$engine"
done
compile_all
echo "$wanted" >"$stamp"
