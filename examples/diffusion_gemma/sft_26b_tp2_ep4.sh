#!/usr/bin/env bash
# Fine-tunes every weight of the released 26B model on conversations: one host of 8 GPUs with 96 GB or more (the plan says 80 GiB each),
# matrices over pairs of GPUs, experts over four. Longer rows than sft_26b.sh, since each GPU holds half of a row's activations.
#
#   MODEL=dir DATA=chat.jsonl SAVE=runs/sft_26b_tp2_ep4 bash examples/diffusion_gemma/sft_26b_tp2_ep4.sh [FLAGS OF pretrain_dllm.py]
#
# Data: rows of OpenAI messages, ShareGPT, prompt and completion or Alpaca (docs/data.md); packed to rows of 4096 tokens.
# Every trainable parameter has an fp32 master and computes in bf16; masters and moments are shared out over the ranks. The router
# stays frozen. Three epochs; the loss to expect depends on the data. Measured on GPUs: not yet.
set -euo pipefail
NEEDS="MODEL DATA SAVE"
GPU_MEMORY_GIB=${GPU_MEMORY_GIB:-94}  # for the plan that DRY_RUN prints
FULL_PROCESSES=8 TOY_PROCESSES=2
. "$(dirname "$0")/common.sh"

MODEL_ARGS=(
  --preset diffusiongemma-26b-a4b
  --pretrained-checkpoint "$MODEL"
)
DATA_ARGS=(
  --data-path "${DATA:-}"
  --tokenizer-type HuggingFaceTokenizer
  --tokenizer-model "$MODEL"
  --seq-length 4096
  --packing
)
OBJECTIVE_ARGS=(
  --freeze-router
)
PARALLEL_ARGS=(
  --tensor-model-parallel-size 2
  --sequence-parallel
  --expert-model-parallel-size 4
  --use-distributed-optimizer
)
TRAINING_ARGS=(
  --bf16
  --recompute-granularity full
)
OPTIMIZER_ARGS=(
  --lr-decay-style cosine
  --weight-decay 0.01
  --adam-beta2 0.95
)
LOGGING_ARGS=(
  --log-interval 10
  --log-throughput
  --save-interval 200
  --async-save
)
COURSE_ARGS=(
  --micro-batch-size 1
  --global-batch-size 64
  --num-epochs 3
  --lr 1e-5
  --min-lr 1e-6
  --lr-warmup-fraction 0.03
)
if [ "$SCALE" = toy ]; then
  generate_data chat
  MODEL_ARGS=("${TOY_MODEL_ARGS[@]}")
  DATA_ARGS=(--data-path "$DATA" --seq-length 96 --packing)
  PARALLEL_ARGS+=(--expert-model-parallel-size 2)
fi
run_recipe "$@"
