#!/usr/bin/env bash
# Trains the same stack as a plain causal language model, without canvases, on raw text or code: a baseline, or weights to start a
# diffusion run from (--pretrained-checkpoint). One host of 8 GPUs: TP2 with sequence parallelism, distributed optimizer over the rest.
#
#   DATA=prefix SAVE=runs/ar bash examples/diffusion_gemma/ar_pretrain.sh [FLAGS OF pretrain_dllm.py]
#
# Data: a token file made by tools/preprocess_data.py (docs/data.md), one token a byte; DATA is its --output-prefix.
# 12 layers 1024 wide, 32 experts, from random weights; 20000 steps of 256 x 2048 bytes. Measured on GPUs: not yet.
set -euo pipefail
NEEDS="DATA SAVE"
FULL_PROCESSES=8 TOY_PROCESSES=2
. "$(dirname "$0")/common.sh"

MODEL_ARGS=(
  --preset toy
  --num-layers 12
  --layer-types "sliding*5,full"
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
  --window-size 512
)
OBJECTIVE_ARGS=(
  --objective ar
)
DATA_ARGS=(
  --data-path "${DATA:-}"
  --seq-length 2048
)
PARALLEL_ARGS=(
  --tensor-model-parallel-size 2
  --sequence-parallel
  --expert-model-parallel-size 8
  --use-distributed-optimizer
)
TRAINING_ARGS=(
  --bf16
)
OPTIMIZER_ARGS=(
  --lr-decay-style WSD
  --lr-wsd-decay-style minus_sqrt
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
  --global-batch-size 256
  --train-iters 20000
  --lr 6e-4
  --min-lr 6e-6
  --lr-warmup-iters 500
  --lr-wsd-decay-iters 4000
)
if [ "$SCALE" = toy ]; then
  generate_data text
  MODEL_ARGS=("${TOY_MODEL_ARGS[@]}" --vocab-size 264)
  DATA_ARGS=(--data-path "$DATA" --seq-length 96)
  PARALLEL_ARGS+=(--expert-model-parallel-size 2)
  TOY_COURSE_ARGS+=(--lr-wsd-decay-iters 5)
fi
run_recipe "$@"
