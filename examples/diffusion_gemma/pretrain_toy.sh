#!/usr/bin/env bash
# Trains a small DiffusionGemma from random weights on raw text or code: one GPU, or a CPU with --device cpu.
#
#   DATA=prefix SAVE=runs/pretrain_toy bash examples/diffusion_gemma/pretrain_toy.sh [FLAGS OF pretrain_dllm.py]
#
# Data: a token file made by tools/preprocess_data.py (docs/data.md), one token a byte; DATA is its --output-prefix.
# 6 layers 256 wide, 8 experts; 2000 steps of 64 x 512 bytes. Measured on GPUs: not yet.
set -euo pipefail
NEEDS="DATA SAVE"
FULL_PROCESSES=1 TOY_PROCESSES=1
. "$(dirname "$0")/common.sh"

MODEL_ARGS=(
  --preset toy
  --hidden-size 256
  --ffn-hidden-size 512
  --num-attention-heads 8
  --num-query-groups 4
  --kv-channels 32
  --num-global-query-groups 2
  --global-kv-channels 64
  --moe-ffn-hidden-size 256
  --vocab-size 264
  --canvas-length 32
  --window-size 128
)
DATA_ARGS=(
  --data-path "${DATA:-}"
  --seq-length 512
)
TRAINING_ARGS=(
  --bf16
)
OPTIMIZER_ARGS=(
  --lr-decay-style cosine
  --weight-decay 0.01
  --adam-beta2 0.98
)
LOGGING_ARGS=(
  --log-interval 10
  --log-throughput
  --save-interval 500
)
COURSE_ARGS=(
  --micro-batch-size 64
  --global-batch-size 64
  --train-iters 2000
  --lr 2e-3
  --min-lr 2e-5
  --lr-warmup-iters 100
)
if [ "$SCALE" = toy ]; then
  generate_data text
  MODEL_ARGS=("${TOY_MODEL_ARGS[@]}" --vocab-size 264)
  DATA_ARGS=(--data-path "$DATA" --seq-length 96)
fi
run_recipe "$@"
