#!/usr/bin/env bash
# Brings up a Slurm cluster of five nodes on this machine (cluster.sh), runs jobs on it, hurts them, and checks what
# becomes of them: some ten minutes. Not part of the test suite.
#
#   scripts/lab/slurm.sh [STORY ...]      default: all; --list names them
#
# Needs root, Debian's packages slurmctld slurmd slurm-client munge iproute2, and .venv (scripts/setup.sh).
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${1:-}" != --list ] || exec .venv/bin/python scripts/lab/slurm_stories.py --list
if ip link show rclab >/dev/null 2>&1; then echo "lab: there is one already (ip link show rclab)" >&2; exit 1; fi
folder=$(mktemp -d /tmp/recycle-lab-XXXXXX)
trap 'scripts/lab/cluster.sh down "$folder"; echo "lab: logs are in $folder"' EXIT
scripts/lab/cluster.sh up "$folder"
SLURM_CONF=$folder/slurm.conf .venv/bin/python scripts/lab/slurm_stories.py --folder "$folder" "$@"
