#!/usr/bin/env bash
# Installs what the tests need (see tools/environment.sh) and runs them.
#
#   bash tests/run.sh [--fast | --all] [--slack FACTOR] [PYTEST ARGUMENTS...]
#
#   --fast     at most 3 minutes on 2 cores: leaves out the tests marked slow
#   (neither)  at most 15 minutes: every test, and the verification tables that need no more than a minute
#   --all      every full verification table too
#   --slack    multiplies each suite's time budget, for a machine that is slow or busy (default 1)
#
# Each suite (unit, parallel, functional, verification) has a time budget and fails when over it; the time of each is printed last.
# Everything else goes to pytest: bash tests/run.sh --fast -k tokenizer -x
set -euo pipefail

unit=290 parallel=265 functional=275 verification=70
marks="not full" slack=1 chosen=""
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --fast) unit=104 parallel=66 functional=5 verification=5 marks="not slow and not full" ;;
    --all) verification=7200 marks="" ;;
    --slack)
      [ $# -gt 1 ] || { echo "error: --slack needs a factor, such as --slack 2" >&2; exit 2; }
      slack=$2
      shift
      ;;
    -h | --help)
      sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"
      exit 0
      ;;
    *)
      arguments+=("$1")
      case $1 in -*) ;; *) if [ -e "${1%%::*}" ]; then chosen=$1; fi ;; esac  # tests named by their path, not every suite
      ;;
  esac
  shift
done

here=$(cd "$(dirname "$0")" && pwd)
. "$here/../tools/environment.sh"
make_environment dev
say "Testing with $PYTHON"

suites=() budgets=()
for suite in unit parallel functional verification; do
  if [ -d "$root/tests/$suite" ]; then
    if [ -z "$chosen" ]; then suites+=("$root/tests/$suite"); fi
    budgets+=("--budget=$suite=$(awk "BEGIN { print ${!suite} * $slack }")")
  fi
done
# One process for all suites: starting torch takes seconds, and so does the world that the parallel tests share.
exec "$PYTHON" -m pytest --rootdir "$root" -c "$root/pyproject.toml" ${suites[@]+"${suites[@]}"} "${budgets[@]}" ${marks:+-m "$marks"} ${arguments[@]+"${arguments[@]}"}
