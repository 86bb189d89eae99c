#!/usr/bin/env bash
# Random campaigns against small jobs, each compared bit for bit with a run without failures:
#   scripts/campaign.sh N SEED        # seeds SEED to SEED + N - 1; N = 1 repeats one
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu PYTHONWARNINGS=ignore
exec "${VENV:-.venv}/bin/python" scripts/campaign.py "$@"
