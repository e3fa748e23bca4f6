#!/usr/bin/env bash
# Trains a hybrid from random weights on conversations: of three layers two are gated-delta (linear attention), with four residual streams
# (mHC), whose streams are computed again in the backward. One host of 8 GPUs: the batch and the experts over all of them.
#
#   DATA=chat.jsonl SAVE=runs/hybrid bash examples/diffusion_gemma/hybrid_gdn_mhc.sh [FLAGS OF pretrain_dllm.py]
#
# Data: conversations as in README.md, one token a byte, packed to rows of 2048.
# 12 layers 1024 wide, 32 experts. Such a model cannot be exported to transformers. Measured on GPUs: not yet.
set -euo pipefail
NEEDS="DATA SAVE"
FULL_PROCESSES=8 TOY_PROCESSES=2
. "$(dirname "$0")/common.sh"

MODEL_ARGS=(
  --preset toy
  --num-layers 12
  --layer-types "linear,linear,full"
  --hidden-size 1024
  --ffn-hidden-size 1024
  --num-attention-heads 8
  --num-query-groups 4
  --kv-channels 128
  --num-global-query-groups 2
  --global-kv-channels 256
  --num-experts 32
  --moe-router-topk 4
  --moe-ffn-hidden-size 512
  --vocab-size 264
  --canvas-length 64
  --linear-num-key-heads 8
  --linear-num-value-heads 16
  --linear-key-head-dim 64
  --linear-value-head-dim 64
)
RESIDUAL_ARGS=(
  --enable-mhc-connections
  --mhc-num-residual-streams 4
)
DATA_ARGS=(
  --data-path "${DATA:-}"
  --seq-length 2048
  --packing
)
PARALLEL_ARGS=(
  --expert-model-parallel-size 8
  --use-distributed-optimizer
)
TRAINING_ARGS=(
  --bf16
  --recompute-granularity selective
  --recompute-modules mhc
  --mhc-recompute-layer-num 3
)
OPTIMIZER_ARGS=(
  --lr-decay-style cosine
  --weight-decay 0.1
  --adam-beta2 0.95
)
LOGGING_ARGS=(
  --log-interval 10
  --log-throughput
  --save-interval 1000
  --async-save
)
COURSE_ARGS=(
  --micro-batch-size 4
  --global-batch-size 128
  --train-iters 10000
  --lr 6e-4
  --min-lr 6e-6
  --lr-warmup-iters 500
)
if [ "$SCALE" = toy ]; then
  generate_data chat
  MODEL_ARGS=(
    "${TOY_MODEL_ARGS[@]}"
    --num-layers 3
    --layer-types "linear,linear,full"
    --linear-num-key-heads 2
    --linear-num-value-heads 4
    --linear-key-head-dim 16
    --linear-value-head-dim 16
  )
  DATA_ARGS=(--data-path "$DATA" --seq-length 96 --packing)
  PARALLEL_ARGS+=(--expert-model-parallel-size 2)
fi
MODEL_ARGS+=("${RESIDUAL_ARGS[@]}")
run_recipe "$@"
