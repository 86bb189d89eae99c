#!/usr/bin/env bash
# A Slurm cluster on one machine: slurmctld and five slurmd, each in a network and a host name of its own.
#
#   scripts/lab/cluster.sh up FOLDER      start it; then: SLURM_CONF=FOLDER/slurm.conf sinfo
#   scripts/lab/cluster.sh down FOLDER    stop it, and remove its namespaces
#
# Needs root and Debian's packages slurmctld slurmd slurm-client munge iproute2. Nodes n1 to n5 are 10.79.0.1 to .5, and
# fd79::1 to ::5, on a bridge; the controller is at 10.79.0.254. FOLDER is seen by all nodes, as a shared file system is.
set -euo pipefail
NODES=5 NET=10.79.0 NET6=fd79: BRIDGE=rclab

up() {
    mkdir -p "$1/state"
    chmod 755 "$1"
    ip link add $BRIDGE type bridge
    ip addr add $NET.254/24 dev $BRIDGE
    ip -6 addr add $NET6:254/64 dev $BRIDGE nodad
    ip link set $BRIDGE up
    { echo "127.0.0.1 localhost"; echo "$NET.254 controller"; } > "$1/hosts"
    local i
    for i in $(seq $NODES); do echo "$NET.$i n$i" >> "$1/hosts"; done
    munge_up "$1"
    configure "$1"
    SLURM_CONF=$1/slurm.conf inside "" controller "$1" slurmctld -D -f "$1/slurm.conf" -L "$1/slurmctld.log"
    for i in $(seq $NODES); do
        ip netns add "rclab$i"
        ip link add "rclab-v$i" type veth peer name eth0 netns "rclab$i"
        ip link set "rclab-v$i" master $BRIDGE up
        ip -n "rclab$i" addr add "$NET.$i/24" dev eth0
        ip -n "rclab$i" -6 addr add "$NET6:$i/64" dev eth0 nodad
        ip -n "rclab$i" link set eth0 up
        ip -n "rclab$i" link set lo up
        mkdir -p "$1/spool.n$i"
        node "$1" "$i"
    done
    local deadline=$((SECONDS + 60))
    until [ "$(SLURM_CONF=$1/slurm.conf sinfo -h -t idle -o %D 2>/dev/null)" = "$NODES" ]; do
        [ $SECONDS -lt $deadline ] || { echo "lab: not all nodes have come up within 60 s" >&2; return 1; }
        sleep 0.5
    done
}

# Starts slurmd of node N once more: after the lab has killed a whole node.
node() {
    SLURM_CONF=$1/slurm.conf inside "rclab$2" "n$2" "$1" slurmd -D -N "n$2" -f "$1/slurm.conf" -L "$1/slurmd.n$2.log"
}

# Runs a daemon in namespaces of its own: network, host name and /etc/hosts are the node's; all else is shared.
inside() {
    local net=$1 name=$2 folder=$3 enter=()
    shift 3
    [ -z "$net" ] || enter=(nsenter "--net=/run/netns/$net")
    # shellcheck disable=SC2016 # the inner shell expands it
    setsid "${enter[@]}" unshare --uts --mount --propagation private bash -c '
        hostname "$0"; mount --bind "$1/hosts" /etc/hosts; shift; exec "$@"' "$name" "$folder" "$@" \
        </dev/null >>"$folder/$name.out" 2>&1 &
    echo $! > "$folder/$name.pid"
}

# A munged with a key and a socket of its own: the machine's is left alone.
munge_up() {
    mkdir -p "$1/munge"
    head -c 1024 /dev/urandom > "$1/munge/key"
    chown -R munge: "$1/munge"
    chmod 700 "$1/munge"
    chmod 400 "$1/munge/key"
    chmod 711 "$1/munge"
    setpriv --reuid=munge --regid=munge --clear-groups munged --key-file="$1/munge/key" --socket="$1/munge/socket" \
        --pid-file="$1/munge/pid" --log-file="$1/munge/log" --seed-file="$1/munge/seed"
}

configure() {
    cat > "$1/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=controller($NET.254)
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$1/munge/socket,cred_expire=10
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$1/state
SlurmdSpoolDir=$1/spool.%n
SlurmctldPidFile=$1/slurmctld.pid
SlurmdPidFile=$1/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=20
KillWait=30
MinJobAge=600
OverTimeLimit=0
JobRequeue=1
SchedulerParameters=sched_interval=1,bf_interval=2
NodeName=n[1-$NODES] NodeAddr=$NET.[1-$NODES] CPUs=8 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=n[1-$NODES] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4
CONF
    cat > "$1/cgroup.conf" <<CONF
CgroupPlugin=cgroup/v1
CgroupAutomount=no
CONF
}

down() {
    local file pid
    for file in "$1"/n*.pid "$1"/controller.pid "$1"/munge/pid; do
        [ -s "$file" ] || continue
        read -r pid < "$file"
        kill "$pid" 2>/dev/null || true
    done
    for i in $(seq $NODES); do
        if [ -e "/run/netns/rclab$i" ]; then
            ip netns pids "rclab$i" | xargs -r kill -9 2>/dev/null || true
        fi
        ip netns del "rclab$i" 2>/dev/null || true
    done
    ip link del $BRIDGE 2>/dev/null || true
}

case "${1:-}" in
    up|down|node) "$@" ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
