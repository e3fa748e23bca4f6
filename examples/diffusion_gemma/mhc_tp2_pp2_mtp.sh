#!/usr/bin/env bash
# Trains a DiffusionGemma with four residual streams (mHC) and multi-token prediction over tensor and pipeline parallelism, in
# deterministic mode: repeats are bit-equal, and so is a run that is taken up again.
#
#   SAVE=dir bash examples/diffusion_gemma/mhc_tp2_pp2_mtp.sh [FLAGS OF pretrain_dllm.py]
#
# Ranks: TP2 with sequence parallelism x PP2, 1F1B. On two GPUs: PROCESSES=2 and --pipeline-model-parallel-size 1, or PROCESSES=2 and
# --tensor-model-parallel-size 1 --no-sequence-parallel.
# Model: four layers 2048 wide, 32 experts, from random weights. Data: generated 9x9 Sudoku puzzles, no download.
# Takes: 20 steps of 32 puzzles, a checkpoint after the tenth and the last.
set -euo pipefail
NEEDS="SAVE"
FULL_PROCESSES=4 TOY_PROCESSES=4
. "$(dirname "$0")/common.sh"

MODEL_ARGS=(
  --num-layers 4
  --layer-types "sliding*3,full"
  --enable-mhc-connections
  --mhc-num-residual-streams 4
  --mtp-num-layers 1
  --eos-token-id 1
)
if [ "$SCALE" = full ]; then
  MODEL_ARGS+=(
    --hidden-size 2048
    --ffn-hidden-size 2048
    --num-attention-heads 16
    --num-query-groups 8
    --kv-channels 128
    --num-global-query-groups 2
    --global-kv-channels 256
    --num-experts 32
    --moe-router-topk 4
    --moe-ffn-hidden-size 512
    --window-size 128
    --vocab-size 32768
    --canvas-length 81
  )
  DATA_ARGS=(--sudoku-size 9 --seq-length 164)
  TRAINING_ARGS=(--device cuda --bf16)
else
  MODEL_ARGS+=(
    --hidden-size 64
    --ffn-hidden-size 96
    --num-attention-heads 4
    --num-query-groups 2
    --kv-channels 16
    --num-global-query-groups 2
    --global-kv-channels 32
    --num-experts 8
    --moe-router-topk 2
    --moe-ffn-hidden-size 32
    --window-size 32
    --vocab-size 128
    --canvas-length 16
  )
  DATA_ARGS=(--sudoku-size 4 --seq-length 34)
  TRAINING_ARGS=(--device cpu)
fi
DATA_ARGS+=(
  --data-source sudoku
  --sudoku-num-puzzles 2000
  --data-cache-path "$SAVE/puzzles"
)
PARALLEL_ARGS=(
  --tensor-model-parallel-size 2
  --sequence-parallel
  --pipeline-model-parallel-size 2
)
TRAINING_ARGS+=(
  --deterministic-mode
  --seed 1234
)
OPTIMIZER_ARGS=(
  --lr-decay-style constant
)
COURSE_ARGS=(
  --micro-batch-size 4
  --global-batch-size 32
  --train-iters 20
  --lr 3e-4
  --lr-warmup-iters 5
)
LOGGING_ARGS=(
  --log-interval 1
  --log-num-zeros-in-grad
  --save-interval 10
)
# What --deterministic-mode needs in the environment: cuBLAS without its own choice of workspaces, NCCL with one order of sums.
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8} NCCL_ALGO=${NCCL_ALGO:-Ring}
if [ "$SCALE" = toy ]; then TOY_COURSE_ARGS=("${COURSE_ARGS[@]}" --micro-batch-size 2 --global-batch-size 8); fi
run_recipe "$@"
