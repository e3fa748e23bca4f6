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
# Five minutes before the time limit (--signal) every rank gets SIGTERM: the trainer finishes its step, saves, and stops. The job is
# put back into the queue, and goes on from its newest checkpoint, where SAVE/status.json says "stopped", where the run ended before
# its first step (a node may have died while NCCL started), and where processes were killed or lost one another. It gives up after
# three starts without a newer checkpoint. Never put back: a mistake in the settings (status 2 of any rank) and a run that ended
# itself, for which status.json has the reason. Submit it from the repository's folder, which all nodes must see, as SAVE.
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

# What a start has to go on from; the iteration in status.json may be one that was lost with its processes.
newest() { cat "$SAVE/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }

# One line a start, with the checkpoint that it began with: the job's memory over requeues.
mkdir -p "$SAVE"
starts="$SAVE/slurm_starts.txt"
newest >> "$starts"
say "job $SLURM_JOB_ID, start $(wc -l < "$starts"): $SLURM_NTASKS processes on $SLURM_JOB_NUM_NODES nodes, from iteration $(newest)"

put_back() {  # put_back WHY
  if [ "$(tail -n 3 "$starts" | grep -cx "$(newest)")" = 3 ]; then
    say "$1; giving up: the last three starts all began at iteration $(newest) ($starts), and none saved a later one"
    exit $((status ? status : 1))
  fi
  say "$1: back into the queue"
  scontrol requeue "$SLURM_JOB_ID"
}
leave() {  # leave WHY
  say "$1: not put back"
  exit $((status ? status : 1))
}

# srun's status is the highest of all ranks, and one that it ends because another one failed has a higher one than 2: a rank notes its
# own. A trap lets the shell wait while the trainer, which does not inherit it, sees to the signal.
mistakes="$SAVE/slurm_mistakes.txt"
rm -f "$mistakes"
as_rank='trap : TERM INT USR1 USR2
status=0
bash "$@" || status=$?
if [ "$status" = 2 ]; then echo "rank ${SLURM_PROCID:-0}" >> "$0"; fi
exit "$status"'

# What an earlier start left there says nothing of one that ends before its first step.
earlier=$(cat "$SAVE/status.json" 2>/dev/null || true)
status=0
srun --kill-on-bad-exit=1 bash -c "$as_rank" "$mistakes" "$@" || status=$?

if [ "$status" = 2 ] || [ -s "$mistakes" ]; then
  status=2
  leave "a mistake in the settings, by the status of $(head -n 1 "$mistakes" 2>/dev/null || echo srun) (see the messages above)"
fi
if [ "$(cat "$SAVE/status.json" 2>/dev/null || true)" = "$earlier" ]; then
  # Status 0: nothing was to be done, as with DRY_RUN.
  if [ "$status" = 0 ]; then leave "the run ended before it trained (status 0 of srun; see the messages above)"; fi
  put_back "the run ended before it trained (status $status of srun; see the messages above)"
  exit 0
fi
state=$(field state) reason=$(field reason)
# A process that ends itself leaves another state, unless its disk is full; killed ones, and the watchdog (124), may leave this one.
if [ "$state" = running ] && [ "$status" -lt 124 ]; then leave "state running, status $status of srun: it could not write how it ended"; fi
case $state:$reason in
  finished:*)
    say "finished at iteration $(field iteration)"
    exit "$status"  # not 0 where exports are missing
    ;;
  stopped:*) put_back "stopped at iteration $(field iteration) ($reason)" ;;
  # Processes that were killed, that lost the others, or that waited for them in vain.
  running:* | failed:RuntimeError:* | failed:Dist*Error:* | failed:AcceleratorError:* | failed:"no progress for "*)
    put_back "state $state at iteration $(field iteration) ($reason), status $status of srun"
    ;;
  *) leave "state $state ($reason), status $status of srun" ;;
esac
