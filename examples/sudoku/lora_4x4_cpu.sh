#!/usr/bin/env bash
# Teaches the model of train_4x4_cpu.sh another task by low-rank adapters alone: the solution written with every digit one higher (1 for 4).
# The base solves none of these and stays as it is. Two CPU cores, 4 minutes (0 % before, 98.6 % after).
# Prints the share of 500 held-out puzzles answered exactly before and after, then loads the adapters by PEFT into transformers' model, which
# must give the same logits. Ends with a status other than 0 when fewer than 90 % are right afterwards, or logits differ.
#
#   bash examples/sudoku/lora_4x4_cpu.sh [FLAGS OF pretrain_dllm.py]
#
# BASE=run of train_4x4_cpu.sh (default: runs/sudoku_4x4), RUN=directory of this run (default: runs/sudoku_4x4_lora)
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"
  exit 0
fi
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../../tools/environment.sh"
BASE=${BASE:-$root/runs/sudoku_4x4}
RUN=${RUN:-$root/runs/sudoku_4x4_lora}
if [ ! -e "$BASE/latest_checkpointed_iteration.txt" ]; then
  stop "BASE=$BASE holds no checkpoint; train the base first: bash examples/sudoku/train_4x4_cpu.sh"
fi
make_environment
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"

LORA_ARGS=(
  --lora-rank 16
  --lora-alpha 32
  --lora-targets attention mlp experts
)
DATA_ARGS=(
  --extension shifted_sudoku
  --data-source shifted-sudoku
  --sudoku-size 4
  --sudoku-num-puzzles 20000
  --data-cache-path "$RUN/puzzles"
  --seq-length 34
)
TRAINING_ARGS=(
  --device cpu
  --micro-batch-size 64
  --global-batch-size 64
  --train-iters 500
  --exit-duration-in-mins 8
)
OPTIMIZER_ARGS=(
  --lr 1e-2
  --min-lr 1e-4
  --lr-decay-style cosine
  --lr-warmup-iters 20
  --weight-decay 0.0
  --adam-beta2 0.98
)
LOGGING_ARGS=(
  --log-interval 25
  --save "$RUN"
  --load "$RUN"
)

solved() {  # solved LOAD FLAGS...
  local load=$1
  shift
  "$PYTHON" "$root/tools/evaluate.py" --load "$load" --on test --losses 0 --generate 500 --batch-size 50 --score exact "${DATA_ARGS[@]}" "$@"
}

if [ ! -e "$RUN/base/config.json" ]; then "$PYTHON" "$root/tools/convert.py" --load "$BASE" --save "$RUN/base"; fi
say "Before: the base on shifted puzzles"
solved "$BASE"
"$PYTHON" "$root/pretrain_dllm.py" --pretrained-checkpoint "$RUN/base" "${LORA_ARGS[@]}" "${DATA_ARGS[@]}" "${TRAINING_ARGS[@]}" \
  "${OPTIMIZER_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
say "After: the base with its adapters"
solved "$RUN" --at-least 0.9
rm -rf "$RUN/peft"
"$PYTHON" "$root/tools/convert.py" --load "$RUN" --save "$RUN/peft"
"$PYTHON" "$root/tools/verify.py" adapters --load "$RUN"
