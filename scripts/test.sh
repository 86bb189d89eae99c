#!/usr/bin/env bash
# Runs all tests, and beside them the checks of style; arguments go to pytest:
#
#   scripts/test.sh                                  everything but the tests of the night
#   scripts/test.sh -m "not slow" -k recovery        some
#   scripts/test.sh --hypothesis-seed=random         other examples than every day's
#   CAMPAIGN_SEEDS=5000 scripts/test.sh --night      more of each kind, and random campaigns as long as one likes
#   scripts/test.sh --core 0.19.2                    what is to work with each megatron-core, with this one; writes
#                                                    docs/versions.json (MEGATRON_LM=checkout of its tag); likewise
#                                                    --torch 2.6.0, --deepspeed 0.19.6, and several at once
#   scripts/test.sh --night --nccl-rules tests/backends under NCCL's rules of order, without a GPU (docs/gpu.md)
#
# Two tests more run at a time than there are cores, since jobs also wait: each has its own folder, ports and network.
# PROCESSES=0 runs one after the other, for a debugger.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=() versions=() frameworks=()
while [[ ${1:-} =~ ^--(core|torch|deepspeed)$ ]]; do
    versions+=("$1" "${2:?$1 wants a version}")
    case $1 in
        --core) frameworks+=(megatron) ;;
        --deepspeed) frameworks+=(deepspeed) ;;
        --torch) frameworks+=(megatron deepspeed) ;;
    esac
    shift 2
done
if [ ${#versions[@]} -gt 0 ]; then
    scripts/setup.sh "${versions[@]}"
    export VENV=${VENV:-.venv$(printf -- '-%s' "${versions[@]#--}")}
    mapfile -t wanted < <("$VENV/bin/python" -m tests.backends.stories "${frameworks[@]}" | sort -u)
    wanted+=(--night --stories docs/versions.json)
else
    scripts/setup.sh
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONDONTWRITEBYTECODE=  # hundreds of processes are started: each would compile the package anew
if [ -z "${DS_ACCELERATOR:-}" ] && ! nvidia-smi -L >/dev/null 2>&1; then
    export DS_ACCELERATOR=cpu
fi
python=${VENV:-.venv}/bin/python
style=$(mktemp)
trap 'rm -f "$style"' EXIT
[ ${#wanted[@]} -gt 0 ] || scripts/style.sh >"$style" 2>&1 &
checks=$!
status=0
cores=$(env -u OMP_NUM_THREADS nproc)  # nproc takes that variable's word for it
"$python" -m pytest -n "${PROCESSES:-$((cores + 2))}" --dist worksteal --ignore tests/test_style.py "${wanted[@]}" "$@" || status=$?
wait "$checks" || status=1
cat "$style"
exit "$status"
