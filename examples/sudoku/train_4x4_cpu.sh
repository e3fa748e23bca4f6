#!/usr/bin/env bash
# Trains a small DiffusionGemma from scratch to solve 4x4 Sudoku, then solves 500 puzzles whose solution grids it never saw.
# Data: generated; 216 of the 288 solution grids train, 14 validate, 58 test. Two CPU cores, at most 15 minutes.
# Prints the solution grids shared with training (0), the share of puzzles solved exactly, tokens per forward and effective steps, and
# ends with a status other than 0 when a grid is shared or fewer than 95 % are solved.
#
#   bash examples/sudoku/train_4x4_cpu.sh [FLAGS OF pretrain_dllm.py]        RUN=directory of the run (default: runs/sudoku_4x4)
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"
  exit 0
fi
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../../tools/environment.sh"
make_environment
RUN=${RUN:-$root/runs/sudoku_4x4}
SEED=1234
NUM_PUZZLES=100000
SIZE=4

MODEL_ARGS=(
  --preset toy
  --num-layers 4
  --layer-types sliding,full
  --vocab-size 9
  --canvas-length 16
  --window-size 64
)
DATA_ARGS=(
  --data-source sudoku
  --sudoku-size "$SIZE"
  --sudoku-num-puzzles "$NUM_PUZZLES"
  --data-cache-path "$RUN/puzzles"
  --seq-length 34
)
TRAINING_ARGS=(
  --device cpu
  --seed "$SEED"
  --micro-batch-size 64
  --global-batch-size 64
  --train-iters 2400
  --exit-duration-in-mins 13
)
OPTIMIZER_ARGS=(
  --lr 3e-3
  --min-lr 3e-5
  --lr-decay-style cosine
  --lr-warmup-iters 100
  --weight-decay 0.01
  --adam-beta2 0.98
)
LOGGING_ARGS=(
  --log-interval 50
  --eval-interval 500
  --eval-iters 4
  --save "$RUN"
  --load "$RUN"
)

puzzles() {
  "$PYTHON" "$root/tools/sudoku.py" --sudoku-size "$SIZE" --sudoku-num-puzzles "$NUM_PUZZLES" --seed "$SEED" --data-cache-path "$RUN/puzzles" "$@"
}

puzzles --show 3
"$PYTHON" "$root/pretrain_dllm.py" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${TRAINING_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
puzzles --show 0
"$PYTHON" "$root/tools/evaluate.py" --load "$RUN" --on test --losses 500 --generate 500 --batch-size 50 --score sudoku --at-least 0.95
