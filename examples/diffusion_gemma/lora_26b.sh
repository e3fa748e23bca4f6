#!/usr/bin/env bash
# Fine-tunes the released 26B model on conversations by low-rank adapters: one GPU with 80 GB. On four GPUs, experts over all of them:
# PROCESSES=4 and --expert-model-parallel-size 4.
#
#   MODEL=dir DATA=chat.jsonl SAVE=runs/lora_26b bash examples/diffusion_gemma/lora_26b.sh [FLAGS OF pretrain_dllm.py]
#
# Data: rows of OpenAI messages, ShareGPT, prompt and completion or Alpaca (docs/data.md); packed to rows of 2048 tokens.
# The model itself is frozen and held once, in bf16; adapters of rank 16 have fp32 masters and compute in bf16. SAVE gets the adapters
# alone, SAVE/peft the same in PEFT's format. Two epochs; the loss to expect depends on the data. Measured on one H200, on random weights
# (MODEL=random): 51 GiB, 0.73 s a row.
set -euo pipefail
NEEDS="MODEL DATA SAVE"
FULL_PROCESSES=1 TOY_PROCESSES=1
. "$(dirname "$0")/common.sh"

MODEL_ARGS=(
  --preset diffusiongemma-26b-a4b
  --pretrained-checkpoint "$MODEL"
)
LORA_ARGS=(
  --lora-rank 16
  --lora-alpha 32
  --lora-targets attention mlp
)
DATA_ARGS=(
  --data-path "${DATA:-}"
  --tokenizer-type HuggingFaceTokenizer
  --tokenizer-model "$MODEL"
  --seq-length 2048
  --packing
)
TRAINING_ARGS=(
  --bf16
  --recompute-granularity full
)
OPTIMIZER_ARGS=(
  --lr-decay-style cosine
  --weight-decay 0.0
  --adam-beta2 0.95
)
LOGGING_ARGS=(
  --log-interval 10
  --log-throughput
  --save-interval 200
  --save-hf "$SAVE/peft"
)
COURSE_ARGS=(
  --micro-batch-size 1
  --global-batch-size 32
  --num-epochs 2
  --lr 2e-4
  --min-lr 2e-5
  --lr-warmup-fraction 0.03
)
if [ "$SCALE" = toy ]; then
  generate_data chat
  MODEL_ARGS=("${TOY_MODEL_ARGS[@]}")
  DATA_ARGS=(--data-path "$DATA" --seq-length 96 --packing)
fi
MODEL_ARGS+=("${LORA_ARGS[@]}")
run_recipe "$@"
