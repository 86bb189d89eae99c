#!/usr/bin/env bash
# Runs all tests; arguments go to pytest: scripts/test.sh -m "not slow" -k recovery
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ -z "${DS_ACCELERATOR:-}" ] && ! nvidia-smi -L >/dev/null 2>&1; then
    export DS_ACCELERATOR=cpu
fi
exec "${VENV:-.venv}/bin/python" -m pytest "$@"
