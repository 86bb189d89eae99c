#!/usr/bin/env bash
# Makes .venv if need be, trains a small GPT on 6 processes, kills two of them, and compares the result with a run
# without failures. Leaves runs/quickstart/. Options: scripts/quickstart.sh --help
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x "${VENV:-.venv}/bin/recycle" ] || echo "quickstart: making ${VENV:-.venv} first; that downloads and takes a while"
scripts/setup.sh
exec "${VENV:-.venv}/bin/python" scripts/quickstart.py "$@"
