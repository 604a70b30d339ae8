#!/usr/bin/env bash
# A Slurm cluster of Debian's packages on this machine, for tests and for trying the launcher:
#
#   bash tests/support/slurm.sh install                    # the packages, where they are missing; needs root
#   bash tests/support/slurm.sh start DIR [NODES [CPUS]]   # 3 nodes of 8 CPUs each, which need not exist
#   export SLURM_CONF=DIR/slurm.conf                       # then sbatch, srun, squeue, ... use it
#   bash tests/support/slurm.sh stop DIR
#
# Everything is in DIR (configuration, state, logs, sockets, keys), and all daemons run as the current user; files in
# /etc are neither read nor written. Each node is a slurmd with a port of its own on loopback; it is
# called 127.0.0.1, 127.0.0.2, ..., so that its name can be resolved. DIR must be an absolute
# path of at most 80 characters (it holds a unix socket) that other users cannot write to. Jobs run as the current user.
# KILL_WAIT (30): seconds between SIGTERM and SIGKILL when Slurm ends a job. Partition `main` is the default; jobs of partition `urgent` preempt its jobs, which are requeued.
set -euo pipefail

fail() {
  echo "slurm: $*" >&2
  exit 2
}

install_packages() {
  local missing=() command
  for command in slurmctld slurmd sbatch munged; do
    command -v "$command" >/dev/null || [ -x "/usr/sbin/$command" ] || missing+=("$command")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  [ "$(id -u)" = 0 ] || fail "missing, and installing needs root: ${missing[*]}"
  # RUNLEVEL=1: packages do not start their services.
  local wait=(-o DPkg::Lock::Timeout=120)  # For another installation to end.
  apt-get update -qq "${wait[@]}"
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install "${wait[@]}" -qq -y \
    --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null
}

# free_ports COUNT: the first of COUNT successive ports that nobody listens at.
free_ports() {
  python3 - "$1" <<'END'
import socket, sys
for first in range(21000, 31000, 50):
  try:
    for port in range(first, first + int(sys.argv[1])):
      with socket.socket() as listener:
        listener.bind(('0.0.0.0', port))
    break
  except OSError:
    continue
print(first)
END
}

start() {
  local dir=$1 nodes=${2:-3} cpus=${3:-8} user host port last i
  [[ $dir = /* && ${#dir} -le 80 ]] || fail "$dir: wanted an absolute path of at most 80 characters"
  [ ! -e "$dir/slurm.conf" ] || fail "$dir: has a cluster already; stop it, or name another directory"
  mkdir -p "$dir"/{state,spool,log,run}
  chmod 700 "$dir"
  user=$(id -un)
  host=$(hostname -s)
  port=$(free_ports $((nodes + 1)))
  head -c 1024 /dev/urandom >"$dir/munge.key"
  chmod 400 "$dir/munge.key"
  # --force: others need not reach its socket.
  munged --force --key-file="$dir/munge.key" --socket="$dir/run/munge" --pid-file="$dir/run/munged.pid" \
    --log-file="$dir/log/munged" --seed-file="$dir/run/seed" --num-threads=1
  cat >"$dir/slurm.conf" <<END
ClusterName=tests
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
AuthInfo=socket=$dir/run/munge
SlurmctldPort=$port
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmctldLogFile=$dir/log/slurmctld
StateSaveLocation=$dir/state
SlurmdPidFile=$dir/run/%n.pid
SlurmdLogFile=$dir/log/%n
SlurmdSpoolDir=$dir/spool/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=${KILL_WAIT:-30}
SlurmctldParameters=idle_on_node_suspend
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000
NodeName=127.0.0.[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1))-$((port + nodes)) CPUs=$cpus State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 MaxTime=INFINITE
PartitionName=urgent Nodes=ALL PriorityTier=2 MaxTime=INFINITE
END
  export SLURM_CONF=$dir/slurm.conf
  slurmctld
  for ((i = 1; i <= nodes; i++)); do
    mkdir -p "$dir/spool/127.0.0.$i"
    slurmd -N "127.0.0.$i"
  done
  for ((i = 0; i < 150; i++)); do
    [ "$(sinfo --noheader --Node --partition=main --states=idle --format=%N 2>/dev/null | wc -l)" -lt "$nodes" ] || return 0
    sleep 0.2
  done
  sinfo --long --Node >&2 || true
  stop "$dir"
  fail "the nodes are not idle after 30 s; see $dir/log"
}

stop() {
  local dir=$1 file pid i
  if [ -e "$dir/slurm.conf" ]; then
    # Jobs first: their processes belong to the daemons.
    SLURM_CONF=$dir/slurm.conf timeout 10 scancel --user="$(id -un)" 2>/dev/null || true
    SLURM_CONF=$dir/slurm.conf timeout 10 scancel --signal=KILL --full --user="$(id -un)" 2>/dev/null || true
  fi
  for file in "$dir"/run/{127*,slurmctld,munged}.pid; do
    [ -s "$file" ] || continue
    pid=$(cat "$file")
    kill "$pid" 2>/dev/null || continue
    for ((i = 0; i < 50; i++)); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
    kill -9 "$pid" 2>/dev/null || true
  done
  mv -f "$dir/slurm.conf" "$dir/slurm.conf.stopped" 2>/dev/null || true
}

export PATH=$PATH:/usr/sbin:/sbin
case ${1:-} in
  install) install_packages ;;
  start | stop)
    [ -n "${2:-}" ] || fail "$1: wanted a directory"
    "$@"
    ;;
  *) fail 'wanted install, start DIR [NODES [CPUS]] or stop DIR' ;;
esac
