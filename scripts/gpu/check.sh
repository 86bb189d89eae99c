#!/usr/bin/env bash
# What has to be seen on a GPU, in one command: what NCCL does (a), the project's jobs on it (b), what a split backward
# costs (c), what Transformer Engine's layers do under the plugin (d, where that is installed), and whether messages are
# logged beside computing (e). One GPU is enough. Writes runs/gpu/check.json, part by part; docs/gpu.md says how to read
# it.
#
#   scripts/gpu/check.sh                     all parts, up to 10 minutes each
#   scripts/gpu/check.sh --part a            one of them; further arguments go to its script (--list, --only NAME ...)
#   scripts/gpu/check.sh --part d --dry-run  without a GPU, on the tests' stand-in for Transformer Engine's kernels
#   scripts/gpu/check.sh --prepare [DIR]     on a machine with a network: lay the wheels there that a machine with torch,
#                                            but without a network, lacks (default DIR: runs/gpu/wheels)
#
# PYTHON=interpreter (default: .venv's or python3, whichever has a torch that sees a GPU). WHEELS=DIR where --prepare has
# laid them. For --prepare: TARGET_PYTHON=3.12, the version that the other machine has; its processor is x86-64.
set -euo pipefail
cd "$(dirname "$0")/../.."

wheels=${WHEELS:-runs/gpu/wheels}
out=runs/gpu/check.json

prepare() {
    local python=${PYTHON:-python3} version=${TARGET_PYTHON:-3.12} platforms=()
    [ -x .venv/bin/python ] && python=${PYTHON:-.venv/bin/python}
    for tag in manylinux_2_{28,27,17} manylinux{2014,1}; do platforms+=(--platform "${tag}_x86_64"); done
    mkdir -p "$1"
    "$python" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary :all: --implementation cp \
        --python-version "$version" "${platforms[@]}" -c scripts/constraints.txt -r scripts/gpu/wheels.txt -d "$1"
    # A source package; no operator is compiled.
    DS_BUILD_OPS=0 "$python" -m pip --disable-pip-version-check wheel --quiet --no-deps -w "$1" \
        "$(grep '^deepspeed==' scripts/constraints.txt)"
    du -sh "$1"
}

sees_a_gpu() { "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }

interpreter() {
    local each candidates=(.venv/bin/python python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for each in "${candidates[@]}"; do
        if sees_a_gpu "$each"; then
            echo "$each"
            return
        fi
    done
    # Its script says that there is no GPU, and has options that need none.
    for each in "${candidates[@]}"; do
        if "$each" -c 'import torch' 2>/dev/null; then
            echo "$each"
            return
        fi
    done
    echo "scripts/gpu/check.sh: no torch in ${candidates[*]}; set PYTHON to an interpreter that has one" >&2
    return 1
}

if [ "${1:-}" = --prepare ]; then
    prepare "${2:-$wheels}"
    exit
fi
parts=(a b c d e)
if [ "${1:-}" = --part ]; then
    parts=("${2:?--part a, b, c, d or e}")
    shift 2
elif [ $# -gt 0 ]; then
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi

python=$(interpreter)
if compgen -G "$wheels/*.whl" >/dev/null; then
    # Beside the machine's own packages, whose torch stays as it is.
    "$python" -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-compile --upgrade \
        --target runs/gpu/site "$wheels"/*.whl
    export PYTHONPATH=$PWD/runs/gpu/site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

status=0
for part in "${parts[@]}"; do
    case $part in
        a) script=nccl_checks.py ;;
        b) script=project_jobs.py ;;
        c) script=split_cost.py ;;
        d) script=te_layers.py ;;
        e) script=message_log.py ;;
        *) echo "scripts/gpu/check.sh: there is no part $part; give a, b, c, d or e" >&2; exit 2 ;;
    esac
    echo "== part $part: scripts/gpu/$script"
    "$python" "scripts/gpu/$script" --out "$out" "$@" || status=1
done
[ -e "$out" ] && echo "== see $out"
exit $status
