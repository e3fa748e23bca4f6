#!/usr/bin/env bash
# From a fresh machine to a small DiffusionGemma, trained, exported and generating: at most 5 minutes on 2 cores after installation.
#
#   bash examples/quickstart.sh [FLAGS OF pretrain_dllm.py]        RUN=directory of the run (default: runs/quickstart)
#
# Model: the released architecture at toy width, 0.5 M parameters: sliding and full layers, experts, self-conditioning; canvases of 32.
# Data: the source files of Python's own standard library, one token a byte; on every machine, no download.
# Loss to expect: about 1.7 nats a byte for both objectives, where the frequencies of the bytes alone give 3.3.
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"
  exit 0
fi
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../tools/environment.sh"
RUN=${RUN:-$root/runs/quickstart}
if [ -e "$RUN" ] && ! [ -e "$RUN/quickstart.txt" ]; then stop "RUN=$RUN is there already and is not a quickstart's; name another directory"; fi
make_environment
SECONDS=0

MODEL_ARGS=(
  --preset toy
  --vocab-size 264
  --canvas-length 32
  --window-size 64
)
DATA_ARGS=(
  --data-path "$RUN/data/python"
  --seq-length 128
)
TRAINING_ARGS=(
  --micro-batch-size 16
  --global-batch-size 16
  --train-iters 500
  --exit-duration-in-mins 4
)
OPTIMIZER_ARGS=(
  --lr 4e-3
  --min-lr 1e-4
  --lr-decay-style cosine
  --lr-warmup-fraction 0.1
  --adam-beta2 0.98
)
LOGGING_ARGS=(
  --log-interval 10
  --eval-interval 200
  --eval-iters 4
  --save "$RUN/train"
)

step() { printf '\n== %s  (%d s)\n' "$*" "$SECONDS"; }

# What an earlier quickstart left; nothing else is ever removed.
rm -rf "$RUN/data" "$RUN/train" "$RUN/transformers"
mkdir -p "$RUN/data"
echo "Made by examples/quickstart.sh, which replaces data, train and transformers here when it runs again." > "$RUN/quickstart.txt"

step "1 of 5: text from Python's standard library"
stdlib=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
inputs=("$stdlib"/*.py)
for package in asyncio collections concurrent email html http importlib json logging multiprocessing unittest urllib xml; do
  inputs+=("$stdlib/$package")
done
"$PYTHON" "$root/tools/preprocess_data.py" --input "${inputs[@]}" --suffixes .py --output-prefix "$RUN/data/python" --append-eod
unigram=$("$PYTHON" - "$RUN/data/python" <<'PYTHON'
import sys
import numpy as np
counts = np.bincount(np.fromfile(sys.argv[1] + ".bin", dtype=np.uint16))
shares = counts[counts > 0] / counts.sum()
print(f"{-(shares * np.log(shares)).sum():.3f}")
PYTHON
)

step "2 of 5: training"
"$PYTHON" "$root/pretrain_dllm.py" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${TRAINING_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"

step "3 of 5: loss curves"
"$PYTHON" "$root/tools/plot_run.py" "$RUN/train" --reference "byte frequencies alone=$unigram" --output "$RUN/loss.png"

step "4 of 5: export to the transformers format"
"$PYTHON" "$root/tools/convert.py" --load "$RUN/train" --save "$RUN/transformers"

step "5 of 5: generation, one canvas of 32 bytes after another"
# Of little but spaces is so small a model sure: at the released model's bound of 0.1 it would write hardly anything else.
"$PYTHON" "$root/tools/generate.py" --load "$RUN/train" --raw --prompt "    def __init__(self, " "# This module is " "        raise ValueError(" \
  --max-new-tokens 128 --entropy-bound 0.5 --show-steps --gif "$RUN/canvas.gif"

"$PYTHON" - "$RUN/train/metrics.jsonl" "$unigram" $# <<'PYTHON'
import json, sys
rows = [row for row in map(json.loads, open(sys.argv[1])) if "diffusion_loss" in row]
last = rows[-10:]
autoregressive, diffusion = (sum(row[name] for row in last) / len(last) for name in ("autoregressive_loss", "diffusion_loss"))
unigram = float(sys.argv[2])
print(f"\nLoss after {rows[-1]['iteration']} steps, in nats a byte: autoregressive {autoregressive:.2f}, diffusion {diffusion:.2f}; "
      f"byte frequencies alone give {unigram:.2f}.")
# With flags of the user's own it may be any run, a very short one too.
if max(autoregressive, diffusion) > unigram - 0.3 and sys.argv[3] == "0":
    sys.exit("error: the losses are not clearly below that; something is wrong, or this machine is too busy")
PYTHON

cat <<TEXT

The whole way took $SECONDS s. In $RUN are
  loss.png        the loss curves
  canvas.gif      a canvas settling from noise
  train/          the run: checkpoint, args.txt (reproduces it), metrics.jsonl, status.json
  transformers/   the model as transformers loads it
  data/           the text as tokens

So short a training does not make sense of language: expect indentation, brackets and half words that look like Python, and no program.

What to try next, from $root with $PYTHON as python:
  go on training          python pretrain_dllm.py @"$RUN/train/args.txt" --load "$RUN/train" --train-iters 5000 --exit-duration-in-mins 30 --override-opt-param-scheduler
  see the training data   python tools/show_data.py @"$RUN/train/args.txt" --html "$RUN/data.html"
  another prompt          python tools/generate.py --load "$RUN/train" --raw --prompt "import os" --entropy-bound 0.5 --show-steps --gif "$RUN/canvas.gif"
  your own text           README.md, "Train on your own data"
  a task it can master    bash examples/sudoku/train_4x4_cpu.sh
TEXT
