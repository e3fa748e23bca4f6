#!/usr/bin/env bash
# Trains a small DiffusionGemma on texts of 100,000 bytes with a number hidden in each, which it has to find: context parallelism over one
# host of 8 GPUs, whole layers computed again in the backward.
#
#   SAVE=runs/cp_100k bash examples/diffusion_gemma/cp_100k.sh [FLAGS OF pretrain_dllm.py]
#
# Data: 2000 generated texts, one token a byte, kept in DATA (SAVE/data/passkey.jsonl); the loss is taken on the answer alone.
# 6 layers 512 wide, window 1024, full layers over the whole text; 1000 steps of 8 texts. Then:
#   python tools/evaluate.py --load runs/cp_100k --generate 20 --score exact          Measured on GPUs: not yet.
set -euo pipefail
NEEDS="SAVE"
FULL_PROCESSES=8 TOY_PROCESSES=2
. "$(dirname "$0")/common.sh"

MODEL_ARGS=(
  --preset toy
  --hidden-size 512
  --ffn-hidden-size 512
  --num-attention-heads 8
  --num-query-groups 4
  --kv-channels 64
  --num-global-query-groups 2
  --global-kv-channels 128
  --moe-ffn-hidden-size 256
  --vocab-size 264
  --canvas-length 32
  --window-size 1024
  --max-position-embeddings 131072
)
OBJECTIVE_ARGS=(
  --encoder-loss-tokens response
)
PARALLEL_ARGS=(
  --context-parallel-size 8
  --use-distributed-optimizer
)
TRAINING_ARGS=(
  --bf16
  --recompute-granularity full
)
OPTIMIZER_ARGS=(
  --lr-decay-style cosine
  --weight-decay 0.01
  --adam-beta2 0.98
)
LOGGING_ARGS=(
  --log-interval 10
  --log-throughput
  --save-interval 250
)
COURSE_ARGS=(
  --micro-batch-size 1
  --global-batch-size 8
  --train-iters 1000
  --lr 1e-3
  --min-lr 1e-5
  --lr-warmup-iters 50
)
if [ "$SCALE" = toy ]; then
  generate_data passkey 400 60
  MODEL_ARGS=("${TOY_MODEL_ARGS[@]}" --vocab-size 264 --canvas-length 16)
  DATA_ARGS=(--seq-length 512)
  PARALLEL_ARGS+=(--context-parallel-size 2)
else
  generate_data passkey 100000 2000
  # A text's attention is planned on the host, for 0.4 s of its time on each rank: beside the steps, not between them.
  DATA_ARGS=(--seq-length 102400 --num-workers 2)
fi
DATA_ARGS+=(--data-path "$DATA")
run_recipe "$@"
