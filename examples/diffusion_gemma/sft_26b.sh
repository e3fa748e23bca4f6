#!/usr/bin/env bash
# Fine-tunes the released 26B model on conversations, every weight but the routers': one host of 8 GPUs with 80 GB or more, experts over
# all 8.
#
#   MODEL=dir DATA=chat.jsonl SAVE=runs/sft_26b bash examples/diffusion_gemma/sft_26b.sh [FLAGS OF pretrain_dllm.py]
#
# Data: rows of OpenAI messages, ShareGPT, prompt and completion or Alpaca (docs/data.md); packed to rows of 2048 tokens.
# Every trainable parameter has an fp32 master and computes in bf16; masters and moments are shared out over the 8 ranks. The router
# stays frozen. Three epochs; the loss to expect depends on the data. Measured with 8 layers on two GPUs: docs/predictions_8gpu.md.
# RECOMPUTE=none keeps what the backward reads instead of computing whole layers again (RECOMPUTE=full): faster, on GPUs with 96 GB or more.
# Without CUDA graphs the host is the limit, and takes as long for one row as for four: --micro-batch-size 4, on 96 GB or more.
set -euo pipefail
NEEDS="MODEL DATA SAVE"
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
  --seq-length 2048
  --packing
)
OBJECTIVE_ARGS=(
  --freeze-router
)
PARALLEL_ARGS=(
  --expert-model-parallel-size 8
  --use-distributed-optimizer
)
TRAINING_ARGS=(
  --bf16
)
case ${RECOMPUTE:=full} in
  full) TRAINING_ARGS+=(--recompute-granularity full) ;;
  none) ;;
  *) stop "RECOMPUTE=$RECOMPUTE is neither full nor none" ;;
esac
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
  --micro-batch-size 2
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
