#!/usr/bin/env bash
#SBATCH --job-name=qwen
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --mem=400G
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=1440
#SBATCH --signal=B:USR1@30
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output="/shared/runs/qwen 7b/launch/slurm-%j.out"
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --mail-type=END
# Job qwen, written by `jaxrl launch slurm`. Each group of processes is a job step on nodes of its
# own. The job ends when the trainer ends. Its exit code is that of the first process that failed
# by itself.
set -uo pipefail

id=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
id=${id:-$SLURM_JOB_ID}
restart=${SLURM_RESTART_COUNT:-0}
restarts=3
say() { echo "slurm: $*" >&2; }
say "job $id starts on $SLURM_JOB_NODELIST (restart $restart of at most $restarts)"
if ((restart > restarts)); then
  say 'started again too often; giving up'
  exit 1
fi
cd -- /shared/code || exit 2

# A process must find its job through srun's variables, not through those of the submitting shell.
unset JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID
export JAXRL_GRACE_S=30

# File in which each process records its exit code. When srun ends processes, it loses their codes.
ends='/shared/runs/qwen 7b/launch'/slurm-$SLURM_JOB_ID.ends
mkdir -p "${ends%/*}"
: >"$ends"

# Script of each process: task GROUP PROCESSES_PER_NODE ENDS COMMAND [ARGUMENT ...]. It exits with 0
# if the process ended because it was asked to: otherwise, srun would end the other processes, which
# may still be committing.
task='
group=$1 threads=$((SLURM_CPUS_ON_NODE / $2)) ends=$3
shift 3
export NPROC=${NPROC:-$((threads > 0 ? threads : 1))} PYTHONUNBUFFERED=1
trap : TERM INT HUP
"$@"
code=$?
echo "$group $SLURM_PROCID $code" >>"$ends"
case $code in 130 | 143) exit 0 ;; esac
exit "$code"'

services=()
srun --job-name=trainer --relative=0 --nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=16 --gpus-per-task=4 --kill-on-bad-exit=1 --wait=0 --label bash -c "$task" task trainer 2 "$ends" \
  python -m jaxrl_llm.app.commands.cli train --config=grpo &
trainer=$!
srun --job-name=rollout --relative=2 --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=8 --gpus-per-task=8 --kill-on-bad-exit=0 --wait=0 --label bash -c "$task" task rollout 1 "$ends" \
  env VLLM_CACHE_ROOT=/local/vllm python -m jaxrl_llm.app.commands.cli serve --role=vllm &
services+=($!)
srun --job-name=scorer --relative=4 --nodes=1 --ntasks=1 --ntasks-per-node=1 --gres=none --kill-on-bad-exit=0 --wait=0 --label bash -c "$task" task scorer 1 "$ends" \
  python -m jaxrl_llm.app.commands.cli serve &
services+=($!)

runs() { kill -0 "$1" 2>/dev/null; }

# stop GROUP: sends SIGTERM once to the processes of a group. The trainer then commits. If srun got
# the signal instead, it would soon kill them.
stop() {
  local step
  step=$(squeue --noheader --steps --jobs="$id" --format='%j %i' | grep "^$1 " | head -n 1)
  [ -z "$step" ] || scancel --quiet --signal=TERM "${step#* }" 2>/dev/null
}

asked=
lost=
# Near the time limit, Slurm signals only this script. In all other cases, it signals every process.
trap 'asked=limit; say "the time limit is near: stopping the trainer"; stop trainer' USR1
trap 'asked=cancel; say "cancelled: stopping the trainer"; stop trainer' USR2
trap 'asked=${asked:-end}' TERM

# Removes ended services from the list, and stops the trainer if a service has failed. Exit code 0
# of a service means that a signal asked it to end. The trainer is then left alone: it may have
# received the same signal, and a second one would interrupt its commit.
look_at_services() {
  local service left=()
  for service in ${services[@]+"${services[@]}"}; do
    if runs "$service"; then
      left+=("$service")
    elif ! wait "$service" && [ -z "$asked$lost" ]; then
      lost=yes
      say 'a service has failed: stopping the trainer'
      stop trainer
    fi
  done
  services=(${left[@]+"${left[@]}"})
}

while runs "$trainer"; do
  look_at_services
  sleep 0.5 &
  wait $!
done
wait "$trainer"
code=$?
asked=${asked:-none}
for group in rollout scorer; do
  stop "$group"
done
for ((half = 0; half < 2 * 30 && ${#services[@]} > 0; half++)); do
  sleep 0.5
  look_at_services
done

# Prints the exit code of the job: that of the first process that failed by itself. Codes 75 and 134
# (aborted by JAX) are consequences of another process's end, 130 and 143 of a signal. If no process
# failed by itself, all of them were ended from outside.
first_failure() {
  local group process code other=
  while read -r group process code; do
    case $group-$code in
      trainer-0 | *-130 | *-143) ;;
      *-75 | *-134) other=75 ;;
      trainer-*)
        say "culprit: process $process of the trainer, exit code $code"
        echo "$code"
        return
        ;;
      *-2)
        say "culprit: process $process of $group, exit code 2"
        echo 2
        return
        ;;
    esac
  done <"$ends"
  if [ -z "$other" ] && grep -q '^trainer [0-9]* 130$' "$ends"; then
    other=130
  elif [ -z "$other" ] && grep -q '^trainer [0-9]* 143$' "$ends"; then
    other=143
  fi
  [ -z "$lost" ] || other=75
  if [ -z "$other" ] && ((code != 0)); then
    other=75
  fi
  echo "${other:-0}"
}
code=$(first_failure)
rm -f "$ends"

if [ "$asked" != cancel ] && ((code == 75 || code > 130)); then
  # In any other state, Slurm is already ending or requeueing the job.
  if [ "$(squeue --noheader --jobs="$id" --format=%T)" != RUNNING ]; then
    say "exit code $code; Slurm decides whether the job starts again"
  elif ((restart >= restarts)); then
    say "exit code $code; started again $restart times, giving up"
  else
    say "exit code $code; asking Slurm to start the job again"
    ! scontrol requeue "$id" || sleep 60
  fi
fi
exit "$code"
