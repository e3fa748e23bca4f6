# Sourced by examples/quickstart.sh and tests/run.sh. Keeps to bash 3.2.
#
#   make_environment [EXTRA]     sets PYTHON to an interpreter that has the project's packages (with that extra of setup.py)
#
# What it takes, the first that fits:
#   1. the active environment (VIRTUAL_ENV, CONDA_PREFIX), if it has every package already;
#   2. .venv in the repository's root, made if need be and filled under constraints.txt. Where the Python found has a torch of its
#      own that is new enough (a container's), .venv sees that torch and never gets another.
# From outside: PYTHON=... names the Python to start from; TORCH_INDEX_URL=... a package index that has another build of torch.

# One thread a process: toy tensors gain nothing from a second (a Sudoku step takes 269 ms with two, 275 with one), and two that wait for
# each other lose much: 490 ms where they sleep, over 4 s where they spin beside other work.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*" >&2; }
stop() { say "error: $*"; exit 2; }  # a mistake: starting again would not help

# The Pythons that torch publishes wheels for and the package's own minimum.
python_fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1; }

lacks() { "$1" "$root/tools/missing_packages.py" ${extra:+--extra "$extra"}; }

# 0: imports this checkout; 1: not installed; 2: another checkout is installed
imports_this_checkout() {
  (cd / && "$1" - "$root/megatron_dllm" <<'PYTHON'
import importlib.util, os, sys
spec = importlib.util.find_spec("megatron_dllm")
sys.exit(1 if spec is None else 0 if os.path.realpath(list(spec.submodule_search_locations)[0]) == os.path.realpath(sys.argv[1]) else 2)
PYTHON
  )
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    python_fits "$PYTHON" || stop "PYTHON=$PYTHON is not a Python 3.11 to 3.14"
    printf '%s\n' "$PYTHON"
    return
  fi
  for candidate in python3 python python3.13 python3.12 python3.11 python3.14; do
    if python_fits "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  # uv fetches a Python itself
  if command -v uv >/dev/null; then uv python find '>=3.11,<3.15' 2>/dev/null || printf '%s\n' 3.13; return; fi
  stop "no Python 3.11 to 3.14 found. Install one (https://www.python.org/downloads, or uv: https://docs.astral.sh/uv), or name it: PYTHON=/path/to/python3 $0"
}

# The version of the torch that `$1` has already, if it is one that the project can use.
own_torch() {
  "$1" "$root/tools/missing_packages.py" --only torch >/dev/null 2>&1 || return 0
  "$1" -c 'import importlib.metadata; print(importlib.metadata.version("torch"))'
}

make_venv() {  # make_venv PYTHON TORCH
  local from=$1 torch=$2 venv="$root/.venv"
  say "Making $venv from $from${torch:+ (it sees the torch $torch that is there)}"
  if command -v uv >/dev/null && [ -z "$torch" ]; then
    uv venv --quiet --seed --python "$from" "$venv"
    return
  fi
  "$from" -c 'import ensurepip, venv' 2>/dev/null || stop "$from cannot make virtual environments. Install its venv module (Debian, Ubuntu: apt install python3-venv) or uv."
  "$from" -m venv ${torch:+--system-site-packages} "$venv"
  if [ -n "$torch" ]; then
    # A container may keep its torch in a virtual environment of its own, where --system-site-packages does not look.
    "$from" -c 'import sys, sysconfig; print(sysconfig.get_path("purelib") if sys.prefix != sys.base_prefix else "")' \
      > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/container.pth"
    printf 'torch==%s\n' "$torch" > "$venv/container-torch.txt"
  fi
}

pip_install() {  # pip_install PYTHON ARGUMENTS...: not by uv where a container's torch is to be seen: it looks at the environment alone
  local python=$1
  shift
  if command -v uv >/dev/null && ! [ -e "$root/.venv/container-torch.txt" ]; then
    uv pip install --python "$python" "$@"
  else
    "$python" -m pip install --disable-pip-version-check "$@"
  fi
}

fill_venv() {
  local venv="$root/.venv" python="$root/.venv/bin/python" constraints="$root/constraints.txt" quiet=""
  if [ -e "$venv/container-torch.txt" ]; then constraints="$venv/container-torch.txt"; fi
  say "Installing into $venv, a few minutes the first time:"
  lacks "$python" | sed 's/^/  /' >&2 || true
  if ! [ -t 2 ]; then quiet=--quiet; fi
  (
    cd "$root" &&  # so that no path with spaces is part of a requirement
      if [ -n "${TORCH_INDEX_URL:-}" ] && ! [ -e "$venv/container-torch.txt" ]; then
        pip_install "$python" $quiet --constraint "$constraints" --index-url "$TORCH_INDEX_URL" torch
      fi &&
      pip_install "$python" $quiet --constraint "$constraints" --editable ".${extra:+[$extra]}"
  ) >&2 || { say "error: the installation failed; the reason is above. Run the same command again to go on from there."; exit 1; }
}

make_environment() {
  extra=${1:-}
  local active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" from torch checkout
  if [ -n "$active" ] && python_fits "$active/bin/python" && lacks "$active/bin/python" >/dev/null 2>&1; then
    checkout=0
    imports_this_checkout "$active/bin/python" || checkout=$?
    if [ "$checkout" -eq 1 ]; then
      say "Adding this checkout to the active environment $active"
      (cd "$root" && pip_install "$active/bin/python" --quiet --no-deps --editable .) >&2
      checkout=0
    fi
    if [ "$checkout" -eq 0 ]; then
      PYTHON="$active/bin/python"
      return
    fi
  fi
  if [ -e "$root/.venv" ]; then
    python_fits "$root/.venv/bin/python" || stop "$root/.venv has no working Python 3.11 to 3.14 (was it moved?). Remove it and run this again: rm -r '$root/.venv'"
  else
    from=$(find_python) || exit
    torch=""
    if [ -x "$from" ]; then torch=$(own_torch "$from"); fi
    make_venv "$from" "$torch"
  fi
  PYTHON="$root/.venv/bin/python"
  if ! lacks "$PYTHON" >/dev/null 2>&1 || ! imports_this_checkout "$PYTHON"; then fill_venv; fi
}
