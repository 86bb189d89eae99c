#!/usr/bin/env bash
# A job under Slurm of which any node may die, the first one too: coordinator and srun are here, not on the job's nodes.
# Run it on a login or service node, in tmux or as a service; or in a small batch job of its own on a node without GPUs
# (sbatch --nodes=1 --wrap "... apart.sh ..."). docs/slurm.md tells more.
#
#   NODES=4 NPROC=8 SALLOC_OPTIONS="--gres=gpu:8 --time=2-0" scripts/slurm/apart.sh train.py --your-arguments
#
# sbatch would run its script, and srun in it, on the first node, and Slurm ends a job that has lost its batch script in
# spite of --no-kill. An allocation without a script (salloc --no-shell --no-kill) has none to lose.
# If this script is ended (Ctrl-C, SIGTERM), the job is cancelled.
set -euo pipefail

: "${NODES:?how many nodes}" "${NPROC:?how many workers on each}"
# All optional. INTERFACE: this machine's address, as the nodes reach it. RUN_DIR: on a file system that all share.
# SALLOC_OPTIONS, SRUN_OPTIONS: more options of Slurm's.
read -r address _ <<<"${INTERFACE:-$(hostname -I)}"
for name in "${!SLURM_@}"; do # those of a batch job around this are not the new job's
    [ "$name" = SLURM_CONF ] || unset "$name"
done

# shellcheck disable=SC2086 # several options
granted=$(salloc --no-shell --no-kill --exclusive --job-name=recycle --nodes="$NODES" --ntasks-per-node=1 \
    ${SALLOC_OPTIONS:-} 2>&1 | tee /dev/stderr)
job=$(sed -n 's/.*Granted job allocation \([0-9]*\).*/\1/p' <<<"$granted")
[ -n "$job" ] || exit 1
serving=
# shellcheck disable=SC2317 # called by the trap
end() {
    scancel "$job" || true
    [ -z "$serving" ] || { kill "$serving" 2>/dev/null && wait "$serving"; } || true
}
trap end EXIT
trap 'exit 143' TERM INT HUP

folder=${RUN_DIR:-$PWD/runs/slurm-$job}
(umask 077 && mkdir -p "$folder" && openssl rand -hex 16 >"$folder/token")
recycle serve --workers $((NODES * NPROC)) --interface "$address" --token-file "$folder/token" --run-dir "$folder" &
serving=$!
until grep -qsFf "$folder/token" "$folder/join.json"; do
    kill -0 "$serving" 2>/dev/null || { wait "$serving"; exit 1; }
    sleep 0.1
done
control=$(sed -n 's/.*"control": "\([^"]*\)".*/\1/p' "$folder/join.json")

# shellcheck disable=SC2086 # several options
srun --jobid="$job" --nodes="$NODES" --ntasks="$NODES" --no-kill --kill-on-bad-exit=0 --wait=0 ${SRUN_OPTIONS:-} \
    recycle run --coordinator "$control" --token-file "$folder/token" --run-dir "$folder" --nproc "$NPROC" "$@" &
wait $! || true # it fails where a node was lost: what has become of the training, the service knows
grep -qs '"event": "started"' "$folder/events.jsonl" || exit 1
status=0
wait "$serving" || status=$?
serving=
exit $status
