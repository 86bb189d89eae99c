#!/usr/bin/env bash
# Makes .venv with everything the tests and the quickstart need. Does nothing if that was done already.
#
#   scripts/setup.sh            VENV=folder to put it elsewhere, PYTHON=interpreter (default python3, 3.10 or newer)
#
# The machine's own pip configuration (index, proxy, certificates) is used as it is.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
python=${PYTHON:-python3}
stamp=$venv/.installed
log=$venv/setup.log

mkdir -p "$venv"
if command -v flock >/dev/null; then
    exec 9>"$venv/.lock" # two callers at once: the second waits and then finds the work done
    flock 9
fi
wanted=$(pwd; (sed '/^\[tool\./,$d' pyproject.toml; cat setup.py scripts/constraints.txt scripts/setup.sh) | sha256sum)
if [ -x "$venv/bin/recycle" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
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
quietly "$python" -m venv "$venv" ||
    fail "$python cannot make a virtual environment; install its venv module (Debian: python3-venv)"

pip=("$venv/bin/python" -m pip --disable-pip-version-check)
if ! "$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    torch=$(grep '^torch==' scripts/constraints.txt)
    cpu_only=()
    # Without a GPU the default index would bring several gigabytes of CUDA libraries along: unless the configured
    # index offers a CPU build already, ask PyTorch's own.
    if ! command -v nvidia-smi >/dev/null; then
        offered=$("${pip[@]}" install --dry-run --no-deps "$torch" 2>&1 || true)
        [[ $offered == *+cpu* ]] || cpu_only=(--extra-index-url https://download.pytorch.org/whl/cpu)
    fi
    quietly "${pip[@]}" install "${cpu_only[@]}" -c scripts/constraints.txt "$torch" || fail "cannot install $torch"
fi
# deepspeed is a source package: no operator is compiled here (DS_BUILD_OPS=0, its default), it only copies files.
DS_BUILD_OPS=0 quietly "${pip[@]}" install -c scripts/constraints.txt -e '.[deepspeed,megatron,dev,docs]' ||
    fail "cannot install the package"
# etcd, for the tests of `--store`: Debian's packages, unpacked beside the rest and not installed. Without them these tests
# are skipped.
if ! command -v etcd >/dev/null && ! [ -x "$venv/etcd/usr/bin/etcd" ] && command -v apt-get dpkg-deb >/dev/null; then
    packages=$(mktemp -d)
    (cd "$packages" && timeout 60 apt-get download etcd-server etcd-client) >>"$log" 2>&1 &&
        for package in "$packages"/*.deb; do quietly dpkg-deb -x "$package" "$venv/etcd"; done
    rm -rf "$packages"
fi
echo "$wanted" >"$stamp"
