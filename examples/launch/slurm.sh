#!/usr/bin/env bash
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#
# Runs a recipe as a Slurm job that goes on over time limits: srun starts one process a GPU, so that signals reach the trainer.
#
#   sbatch --nodes 1 --export=ALL,MODEL=...,DATA=...,SAVE=... examples/launch/slurm.sh RECIPE [FLAGS OF pretrain_dllm.py]
#
# Five minutes before the time limit (--signal) every rank gets SIGTERM: the trainer finishes its step, saves, and stops. While
# SAVE/status.json says "stopped" the job is put back into the queue and goes on from its checkpoint. It gives up after three starts
# without a new iteration, and when the run failed or did not begin. Submit it from the repository's folder, which all nodes must see,
# as SAVE.
set -euo pipefail
if [ "${1:---help}" = --help ] || [ "$1" = -h ]; then
  sed -n '/^# Runs a recipe/,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"
  exit 0
fi
say() { printf '%s\n' "$*" >&2; }
[ -n "${SLURM_JOB_ID:-}" ] || { say "error: this is no Slurm job; submit it: sbatch examples/launch/slurm.sh $1"; exit 2; }
[ -n "${SAVE:-}" ] || { say "error: SAVE is not set; the job reads $1's status there"; exit 2; }
[ -f "$1" ] || { say "error: there is no recipe $1 in $PWD; submit the job from the repository's folder"; exit 2; }

root=$PWD
if [ -z "${PYTHON:-}" ]; then
  # Once here, not once a rank.
  . "$root/tools/environment.sh"
  make_environment
fi
export PYTHON LAUNCH=rank PROCESSES=$SLURM_NTASKS NODES=$SLURM_JOB_NUM_NODES

field() { "$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$SAVE/status.json" "$1" 2>/dev/null || echo 0; }

# One line a start, with the iteration that it began at: the job's memory over requeues.
mkdir -p "$SAVE"
starts="$SAVE/slurm_starts.txt"
before=$(field iteration)
echo "$before" >> "$starts"
say "job $SLURM_JOB_ID, start $(wc -l < "$starts"): $SLURM_NTASKS processes on $SLURM_JOB_NUM_NODES nodes, from iteration $before"

# What an earlier start left there says nothing of one that ends before its first step.
earlier=$(cat "$SAVE/status.json" 2>/dev/null || true)
status=0
srun --kill-on-bad-exit=1 bash "$@" || status=$?

if [ "$(cat "$SAVE/status.json" 2>/dev/null || true)" = "$earlier" ]; then
  say "the run ended before it trained (status $status of srun; see the messages above): not put back"
  exit $((status ? status : 1))
fi
state=$(field state)
case $state in
  finished) say "finished at iteration $(field iteration)" ;;
  stopped)
    now=$(field iteration)
    if [ "$(tail -n 3 "$starts" | grep -cx "$now")" = 3 ]; then
      say "giving up: the last three starts all began at iteration $now ($starts), and none came further"
      exit 1
    fi
    say "stopped at iteration $now ($(field reason)): back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
    ;;
  *)
    say "state $state ($(field reason)), status $status of srun: not put back"
    exit $((status ? status : 1))
    ;;
esac
