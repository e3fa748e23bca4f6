# Sourced by every recipe of this folder, which before sets NEEDS (variables that must be given), FULL_PROCESSES and TOY_PROCESSES, after
# fills arrays of flags, and ends in run_recipe "$@". Keeps to bash 3.2.
#
# From the environment, checked before anything starts:
#   MODEL=DIR      a transformers directory of the model, where the recipe starts from one
#   MODEL=random   20 steps on random weights of its shape and, without DATA, generated conversations: to try memory and speed; logs and
#                  metrics go to SAVE, no checkpoint: of 26 billion weights, all trained, one has 350 GB
#   DATA=PATH      a file of conversations or the prefix of a token file, as the recipe says; toy scale makes its own
#   SAVE=DIR       directory of the run; a run that is there already goes on
#   SCALE=toy      the same recipe on this machine's CPU in about a minute: a toy model, generated data, 20 steps
#   DRY_RUN=1      print the command and, at full scale, the plan (memory and time of each GPU), start nothing;
#                  DRY_RUN=command: the command alone
#   PROCESSES=N    how many processes in all; launch/torchrun.sh and launch/slurm.sh spread them over nodes
#   PYTHON=FILE    an interpreter that has the project's packages; without it, the environment that the other scripts make
# LAUNCH belongs to those launchers.
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"
  sed -n '/^# From the environment/,/^# LAUNCH/{/^# LAUNCH/d;s/^# \{0,1\}//;p;}' "$(dirname "${BASH_SOURCE[0]}")/common.sh"
  exit 0
fi
. "$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/tools/environment.sh"

RECIPE=$(basename "$0" .sh)
SCALE=${SCALE:-full}
DRY_RUN=${DRY_RUN:-}
case $SCALE in
  full) PROCESSES=${PROCESSES:-$FULL_PROCESSES} ;;
  toy)
    PROCESSES=${PROCESSES:-$TOY_PROCESSES}
    SAVE=${SAVE:-$root/runs/toy/$RECIPE}
    MODEL=${MODEL:-}
    ;;
  *) stop "SCALE=$SCALE is neither full nor toy; leave it out, or set SCALE=toy" ;;
esac

check_environment() {
  local name value
  for name in $NEEDS; do
    eval "value=\${$name:-}"
    if [ "${MODEL:-}" = random ] && [ "$name$value" = DATA -o "$name" = MODEL ]; then continue; fi
    if [ -z "$value" ]; then
      if [ -n "$DRY_RUN" ]; then
        eval "$name='<$name>'"
        continue
      fi
      stop "$name is not set; start the recipe as $(sed -n 's/^#  *\(.*bash examples\/[^ ]*\).*/\1/p' "$0" | head -1)"
    fi
    if [ -n "$DRY_RUN" ]; then continue; fi
    case $name in
      MODEL) [ -f "$value/config.json" ] || stop "MODEL=$value has no config.json; name a directory in the transformers format" ;;
      DATA) [ -e "$value" ] || [ -e "$value.bin" ] || stop "DATA=$value: there is no such file, and no $value.bin either" ;;
      SAVE) [ ! -e "$value" ] || [ -d "$value" ] || stop "SAVE=$value is a file; name a directory" ;;
    esac
  done
}
if [ "$SCALE" = toy ]; then NEEDS=SAVE; fi
check_environment

if [ -z "${PYTHON:-}" ]; then make_environment; fi

# What a recipe puts in place of its own arrays at toy scale.
TOY_MODEL_ARGS=(
  --preset toy
  --num-layers 2
  --layer-types sliding,full
)
# These take the place of COURSE_ARGS (batch, length, learning rate) there, of their own accord.
TOY_COURSE_ARGS=(
  --device cpu
  --micro-batch-size 1
  --global-batch-size 4
  --train-iters 20
  --lr 3e-3
  --min-lr 3e-4
  --lr-warmup-iters 5
  --log-interval 1
)
generate_data() {  # generate_data chat|text|passkey ARGUMENTS...: sets DATA to generated data, made once, where it is not given
  local kind=$1
  shift
  if [ -n "${DATA:-}" ]; then return; fi
  DATA=$SAVE/data/$kind
  if [ "$kind" != text ]; then DATA=$DATA.jsonl; fi
  # Of several ranks that srun has started the first makes it, and the others wait for the file.
  if [ -n "$DRY_RUN" ] || [ -e "$DATA" ] || [ -e "$DATA.bin" ]; then return; fi
  if [ "${LAUNCH:-}" = rank ] && [ "${SLURM_PROCID:-0}" != 0 ]; then
    until [ -e "$DATA" ] || [ -e "$DATA.idx" ]; do sleep 1; done
    return
  fi
  "$PYTHON" "$root/examples/diffusion_gemma/synthetic_data.py" "$kind" "$DATA" "$@"
}

if [ "$SCALE" = full ] && [ "${MODEL:-}" = random ]; then generate_data chat 700; fi

with_random_weights() {  # with_random_weights WORDS...: leaves in `arguments` the words without those of the model's files and of checkpoints
  arguments=()
  while [ $# -gt 0 ]; do
    case $1 in
      --pretrained-checkpoint | --tokenizer-type | --tokenizer-model | --num-epochs | --save-interval) shift ;;
      --async-save) ;;
      *) arguments+=("$1") ;;
    esac
    shift
  done
  # Bytes are its tokens; drawn on the CPU, 26 billion weights would take minutes.
  arguments+=(--eos-token-id 1 --no-use-cpu-initialization --train-iters 20 --log-interval 1)
}

flag_lines() {  # the words, a flag and its values on a line
  local word line=""
  for word in "$@"; do
    case $word in
      --*)
        if [ -n "$line" ]; then printf '%s \\\n' "$line"; fi
        line="    $word"
        ;;
      *) line="$line $(printf '%q' "$word")" ;;
    esac
  done
  printf '%s\n' "$line"
}

plan() {  # plan FLAGS...: memory and time of each GPU; what it cannot say without the files it leaves out
  printf '\n'
  "$PYTHON" "$root/tools/plan.py" layouts --given --num-gpus "$PROCESSES" --memory-gib "${GPU_MEMORY_GIB:-79}" -- "$@"
}

run_recipe() {  # run_recipe FLAGS...: start all arrays' flags and then these
  local name arguments=() nodes=${NODES:-1} launcher=()
  if [ "$SCALE" = toy ]; then COURSE_ARGS=("${TOY_COURSE_ARGS[@]}"); fi
  for name in MODEL_ARGS DATA_ARGS OBJECTIVE_ARGS PARALLEL_ARGS TRAINING_ARGS OPTIMIZER_ARGS LOGGING_ARGS COURSE_ARGS; do
    eval "arguments+=(\${$name[@]+\"\${$name[@]}\"})"
  done
  if [ "$SCALE" = full ] && [ "${MODEL:-}" = random ]; then
    with_random_weights "${arguments[@]}"
    arguments+=(--run-dir "$SAVE" "$@")
  else
    # A checkpoint that is there is gone on from; where there is none, the run starts anew.
    arguments+=(--save "$SAVE" --load "$SAVE" "$@")
  fi
  [ $((PROCESSES % nodes)) -eq 0 ] || stop "PROCESSES=$PROCESSES do not divide over NODES=$nodes"
  case ${LAUNCH:-} in
    rank) ;;  # srun has started this process as one rank
    torchrun)
      launcher=(-m torch.distributed.run --nnodes "$nodes" --node-rank "$NODE_RANK" --nproc-per-node $((PROCESSES / nodes))
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --)
      ;;
    "")
      [ "$nodes" -eq 1 ] || stop "NODES=$nodes needs a launcher: bash examples/launch/torchrun.sh $0"
      if [ "$PROCESSES" -gt 1 ]; then launcher=(-m torch.distributed.run --standalone --nproc-per-node "$PROCESSES" --); fi
      ;;
    *) stop "LAUNCH=$LAUNCH is neither rank nor torchrun; leave it to the launchers in examples/launch" ;;
  esac
  if [ -n "$DRY_RUN" ]; then
    printf '%s %s%s \\\n' "$PYTHON" "${launcher[*]+${launcher[*]} }" "$root/pretrain_dllm.py"
    flag_lines "${arguments[@]}"
    if [ "$SCALE" = full ] && [ "$DRY_RUN" != command ]; then plan "${arguments[@]}"; fi
    return
  fi
  exec "$PYTHON" ${launcher[@]+"${launcher[@]}"} "$root/pretrain_dllm.py" "${arguments[@]}"
}

