#!/bin/bash
# A Slurm cluster on one machine, for tests: node1 to nodeN, each with a network, names, processes, /tmp and /dev/shm of
# its own, and a head with the controller. Nothing of it is installed in the system. Needs root on Debian or Ubuntu.
#
#     tools/slurm_lab.sh fetch                   downloads Debian's Slurm and munge into $SLURM_LAB (build/slurm)
#     tools/slurm_lab.sh up [NODES] [CPUS]       starts the cluster; 2 nodes of 8 CPUs by default
#     tools/slurm_lab.sh run HOST COMMAND...     runs a command on head or a node, as root, in this folder
#     tools/slurm_lab.sh down                    ends everything that runs there
set -euo pipefail
REPOSITORY=$(cd "$(dirname "$0")/.." && pwd)
LAB=${SLURM_LAB:-$REPOSITORY/build/slurm}
PACKAGES=$LAB/packages
RUN=$LAB/run
NETWORK=10.77.0
LIMIT_S=1800 # a cluster that nobody has ended ends then

fetch() {
    mkdir -p "$LAB/debs" "$PACKAGES"
    cd "$LAB/debs"
    apt-get download $(apt-get install -s --no-install-recommends slurm-wlm munge libpmix2 libpmi2-0 libpmi0 |
        awk '/^Inst/{print $2}')
    for deb in *.deb; do dpkg -x "$deb" "$PACKAGES"; done
    # Slurm loads this name, which Debian has in libpmix-dev.
    ln -sf libpmix.so.2 "$(dirname "$(find "$PACKAGES" -path '*/pmix2/lib/libpmix.so.2')")/libpmix.so"
    for program in slurmctld slurmd slurmstepd; do ln -sf $program-wlm "$PACKAGES/usr/sbin/$program"; done
}

# Starts the first process of a host, with which the host ends: first NAME [a command that enters other namespaces...]
first() {
    local name=$1 prepare=$2 outer
    shift 2
    setsid "$@" unshare --mount --net --uts --ipc --pid --fork --propagation private --kill-child=KILL bash -c "
        set -e
        mount -t proc proc /proc; hostname $name; ip link set lo up
        $prepare
        touch $RUN/$name.ready
        trap '' TERM; sleep $LIMIT_S; exit" </dev/null >>"$RUN/$name.log" 2>&1 &
    outer=$!
    for _ in $(seq 300); do
        [ -e "$RUN/$name.ready" ] && break
        sleep 0.1
    done
    # setsid has become unshare, whose child is the first process
    tr -d ' ' <"/proc/$outer/task/$outer/children" >"$RUN/$name.pid"
}

in_host() {
    local pid
    pid=$(cat "$RUN/$1.pid")
    shift
    nsenter -t "$pid" -m -n -u -i -p --wd="$PWD" -- "$@"
}

up() {
    local nodes=${1:-2} cpus=${2:-8} etc number=1 name
    [ -e "$RUN/head.pid" ] && down
    rm -rf "$RUN"
    for folder in usr etc var; do mkdir -p "$RUN/upper/$folder" "$RUN/work/$folder"; done
    etc=$RUN/upper/etc
    mkdir -p "$etc/slurm" "$etc/munge"
    echo "127.0.0.1 localhost" >"$etc/hosts"
    for name in head $(seq -f 'node%g' "$nodes"); do
        echo "$NETWORK.$number $name" >>"$etc/hosts"
        number=$((number + 1))
    done
    dd if=/dev/urandom bs=1 count=1024 of="$etc/munge/munge.key" status=none
    chmod 600 "$etc/munge/munge.key"
    cat >"$etc/slurm/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=$RUN/slurmctld.log
SlurmdLogFile=$RUN/slurmd.%n.log
KillWait=10
SchedulerParameters=sched_interval=2,batch_sched_delay=0
PropagateResourceLimits=NONE
NodeName=node[1-$nodes] CPUs=$cpus RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=node[1-$nodes] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
CONF
    echo 'CgroupPlugin=cgroup/v1' >"$etc/slurm/cgroup.conf"
    # The system's own folders below, the packages above them, and what the cluster writes on top.
    first head "
        for folder in usr etc var; do
            below=/\$folder; [ -d $PACKAGES/\$folder ] && below=$PACKAGES/\$folder:/\$folder
            mount -t overlay overlay -o lowerdir=\$below,upperdir=$RUN/upper/\$folder,workdir=$RUN/work/\$folder /\$folder
        done
        mount -t tmpfs tmpfs /run
        mkdir -p /run/munge /var/spool/slurmctld /var/lib/munge /var/log/munge
        chmod 755 /run/munge; chmod 700 /var/lib/munge /var/log/munge
        chown -R root:root /etc/munge /run/munge /var/lib/munge /var/log/munge
        ldconfig
        # Without an address of its own the bridge has that of one node, and another when that node ends.
        ip link add br0 address 02:00:00:00:77:01 type bridge; ip addr add $NETWORK.1/24 dev br0; ip link set br0 up
        munged --force --key-file=/etc/munge/munge.key
        slurmctld -i -c"
    for number in $(seq "$nodes"); do
        name=node$number
        # A repository below /tmp stays visible in the node's own /tmp.
        first "$name" "
            mkdir -p /run/kept; mount --bind $REPOSITORY /run/kept
            mount -t tmpfs -o mode=1777 tmpfs /tmp
            case $REPOSITORY in /tmp/*) mkdir -p $REPOSITORY; mount --bind /run/kept $REPOSITORY;; esac
            mount -t tmpfs -o mode=1777 tmpfs /dev/shm
            mkdir -p /var/spool/slurmd; mount -t tmpfs tmpfs /var/spool/slurmd
            touch /run/slurmd.pid $RUN/$name.slurmd; mount --bind $RUN/$name.slurmd /run/slurmd.pid" \
            nsenter -t "$(cat "$RUN/head.pid")" -m --
        nsenter -t "$(cat "$RUN/head.pid")" -n ip link add "v$number" type veth peer name eth0
        nsenter -t "$(cat "$RUN/head.pid")" -n ip link set eth0 netns "$(cat "$RUN/$name.pid")"
        nsenter -t "$(cat "$RUN/head.pid")" -n ip link set "v$number" master br0 up
        in_host "$name" bash -c "
            ip addr add $NETWORK.$((number + 1))/24 dev eth0; ip link set eth0 up; slurmd -N $name"
    done
    for _ in $(seq 120); do
        [ "$(in_host head sinfo -h -t idle -o %D || true)" = "$nodes" ] && return
        sleep 0.5
    done
    echo "the nodes do not come up: $RUN/*.log" >&2
    return 1
}

down() {
    for name in "$RUN"/node*.pid "$RUN"/head.pid; do
        # The end of a host's first process is that of all others. A test may have ended a host before.
        [ -s "$name" ] && kill -9 "$(cat "$name")" 2>/dev/null || true
        rm -f "$name"
    done
}

case ${1:-} in
    fetch | up | down) "$@" ;;
    run) shift; in_host "$@" ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
