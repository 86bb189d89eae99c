#!/usr/bin/env bash
# One of three etcds, for a job of `recycle run --store` on hosts that have none. Run it on three of them:
#
#   scripts/etcd.sh HOST0,HOST1,HOST2 K [FOLDER]     K: 0, 1 or 2, which of them this is
#
# and give the job --store etcd://HOST0:2379,HOST1:2379,HOST2:2379. Any one of the three may die. HOST is an address, or
# ADDRESS:PORT:PEERPORT (default 2379 and 2380), an IPv6 one in brackets. FOLDER (default: a new one in /dev/shm, which dies with the host) must be
# this member's alone. etcd 3.4 or newer is taken from ETCD, from PATH, or from .venv/etcd (Debian's package; setup.sh).
# Its ports have no lock: what is written there without the job's token is not believed, but can be removed. So they
# belong on a network that only you reach, as gloo's and NCCL's do. It runs until it is killed; nothing of it is kept.
set -euo pipefail

usage() { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
IFS=, read -r -a hosts <<<"$1"
me=$2
if [ "${#hosts[@]}" -ne 3 ] || ! [[ $me =~ ^[0-2]$ ]]; then usage; fi
folder=${3:-$(mktemp -d /dev/shm/recycle-etcd-XXXXXX)}
here=$(cd "$(dirname "$0")/.." && pwd)
etcd=${ETCD:-$(command -v etcd || echo "$here/.venv/etcd/usr/bin/etcd")}
[ -x "$etcd" ] || { echo "scripts/etcd.sh: there is no etcd: install it (Debian: etcd-server), or set ETCD" >&2; exit 1; }

address='^(\[[0-9A-Fa-f:.]+\]|[^]:[]+)(:([0-9]+)(:([0-9]+))?)?$'
part() { # ADDRESS[:PORT[:PEERPORT]] NUMBER DEFAULT
    [[ $1 =~ $address ]] || usage
    local found=("" "${BASH_REMATCH[1]}" "${BASH_REMATCH[3]}" "${BASH_REMATCH[5]}")
    echo "${found[$2]:-$3}"
}
cluster=
for k in 0 1 2; do
    cluster+="${cluster:+,}m$k=http://$(part "${hosts[k]}" 1 -):$(part "${hosts[k]}" 3 2380)"
done
host=$(part "${hosts[me]}" 1 -)
client="http://$host:$(part "${hosts[me]}" 2 2379)"
peer="http://$host:$(part "${hosts[me]}" 3 2380)"
exec "$etcd" --name "m$me" --data-dir "$folder/m$me" --initial-cluster "$cluster" --initial-cluster-state new \
    --initial-cluster-token "$cluster" --listen-client-urls "$client" --advertise-client-urls "$client" \
    --listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer" --log-level warn --logger zap
