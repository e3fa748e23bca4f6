#!/usr/bin/env bash
# Stands in for Python while a recipe is asked what it starts: the trainer's command and environment go into files, the rest runs.
#
#   RECIPE_COMMAND=FILE REAL_PYTHON=FILE PYTHON=interpreter.sh bash RECIPE      words in FILE, environment in FILE.environment, each ended by a NUL
set -euo pipefail
for word in "$@"; do
  case $word in
    */pretrain_dllm.py)
      env -0 > "$RECIPE_COMMAND.environment"
      printf '%s\0' "$@" > "$RECIPE_COMMAND"
      exit 0
      ;;
  esac
done
exec "$REAL_PYTHON" "$@"
