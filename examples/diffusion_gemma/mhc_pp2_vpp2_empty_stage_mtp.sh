#!/usr/bin/env bash
# Trains a model with gated-delta layers, four residual streams (mHC) and multi-token prediction over an interleaved pipeline with an empty
# stage, in deterministic mode: repeats are bit-equal, and so is a run that is taken up again. Four GPUs: PP2 x VPP2, DP2.
#
#   SAVE=runs/mhc bash examples/diffusion_gemma/mhc_pp2_vpp2_empty_stage_mtp.sh [FLAGS OF pretrain_dllm.py]
#
# The third of the four virtual stages is empty. Two processes (PROCESSES=2): without data parallelism.
# Four layers 2048 wide, of which the first and the third are gated-delta (torch backend), 32 experts, from random weights.
# Data: generated Sudoku puzzles, 9x9 (4x4 at toy scale), no download; kept in DATA (SAVE/puzzles). 20 steps, a checkpoint every ten.
# On four GPUs: not yet; by four ranks that share an H200 (SHARE_GPU=1), three stopped repeats and a whole run are equal bit for bit.
set -euo pipefail
NEEDS="SAVE"
FULL_PROCESSES=4 TOY_PROCESSES=4
. "$(dirname "$0")/common.sh"

# What --deterministic-mode needs in the environment: cuBLAS without its own choice of workspaces, NCCL with one order of sums.
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8} NCCL_ALGO=${NCCL_ALGO:-Ring}

MODEL_ARGS=(
  --num-layers 4
  --layer-types "linear,sliding,linear,full"
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
  --eos-token-id 1
  --canvas-length 81
  --linear-num-key-heads 8
  --linear-num-value-heads 16
  --linear-key-head-dim 128
  --linear-value-head-dim 128
)
RESIDUAL_ARGS=(
  --enable-mhc-connections
  --mhc-num-residual-streams 4
  --mtp-num-layers 1
)
DATA_ARGS=(
  --data-source sudoku
  --sudoku-size 9
  --sudoku-num-puzzles 2000
  --data-cache-path "${DATA:-$SAVE/puzzles}"
  --seq-length 164
)
PARALLEL_ARGS=(
  --pipeline-model-parallel-size 2
  --pipeline-model-parallel-layout "Egt|g||tmL"
)
TRAINING_ARGS=(
  --deterministic-mode
  --gdn-kernel-backend torch
  --bf16
)
OPTIMIZER_ARGS=(
  --lr-decay-style cosine
)
LOGGING_ARGS=(
  --log-num-zeros-in-grad
  --save-interval 10
)
COURSE_ARGS=(
  --micro-batch-size 4
  --global-batch-size 32
  --train-iters 20
  --lr 3e-4
  --min-lr 3e-5
  --lr-warmup-iters 5
  --log-interval 1
)
if [ "$SCALE" = toy ]; then
  MODEL_ARGS=(
    "${TOY_MODEL_ARGS[@]}"
    --num-layers 4
    --layer-types "linear,sliding,linear,full"
    --vocab-size 128
    --eos-token-id 1
    --num-global-query-groups 2
    --linear-num-key-heads 2
    --linear-num-value-heads 4
    --linear-key-head-dim 16
    --linear-value-head-dim 16
  )
  DATA_ARGS+=(--sudoku-size 4 --seq-length 34)
  TRAINING_ARGS=(--deterministic-mode)
fi
MODEL_ARGS+=("${RESIDUAL_ARGS[@]}")
run_recipe "$@"
