#!/usr/bin/env bash
# Installs the optional GPU packages, one after another; each works without the others, and training runs (slower) without any.
#
#   bash tools/install_gpu.sh [--dry-run | --check] [--te] [--deepep] [--apex] [--fla] [--flashinfer]
#
#   --te          Transformer Engine: fused attention (cuDNN) for head_dim up to 256
#   --deepep      DeepEP: expert-parallel dispatch over NVLink and RDMA; compiles for a few minutes
#   --apex        apex: fused optimizer and gradient accumulation; compiles for 10 to 30 minutes
#   --fla         flash-linear-attention: gated-delta layers
#   --flashinfer  FlashInfer: rotary embedding
#   (none)        all of them
#   --dry-run     prints the commands and runs none
#   --check       installs nothing; only says what is present and what is missing
#
# Needs a torch with CUDA, which is never replaced, and for --te, --deepep and --apex the CUDA toolkit of torch's version (nvcc).
# From outside: PYTHON=... names the Python to install into (default: .venv of this repository, or python3); TORCH_CUDA_ARCH_LIST=...
# the GPUs to compile for (default: those that torch sees, else 9.0, which is H100 and H200). Exits with 1 when a package is missing.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
wanted=() mode=install
while [ $# -gt 0 ]; do
  case $1 in
    --te | --deepep | --apex | --fla | --flashinfer) wanted+=("${1#--}") ;;
    --dry-run | --check) mode=${1#--} ;;
    -h | --help)
      sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"
      exit 0
      ;;
    *)
      echo "error: $1 is not an option; see: bash tools/install_gpu.sh --help" >&2
      exit 2
      ;;
  esac
  shift
done
if [ ${#wanted[@]} -eq 0 ]; then wanted=(te deepep apex fla flashinfer); fi

python=${PYTHON:-}
if [ -z "$python" ]; then
  python=$(command -v python3 || true)
  if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; fi
fi
[ -n "$python" ] || { echo "error: no python3 found; name one: PYTHON=/path/to/python bash tools/install_gpu.sh" >&2; exit 1; }
torch=$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)
cuda=$("$python" -c 'import torch; print(torch.version.cuda or "")' 2>/dev/null || true)
arch=${TORCH_CUDA_ARCH_LIST:-$("$python" -c 'import torch
print(";".join(sorted({"%d.%d" % torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})))' 2>/dev/null || true)}
arch=${arch:-9.0}
major=${cuda%%.*}
major=${major:-13}
pip="'$python' -m pip install"
# Named beside each package, so that pip keeps the torch that is there.
keep=${torch:+" 'torch==$torch'"}

module() {
  case $1 in
    te) echo transformer_engine.pytorch ;; deepep) echo deep_ep ;; apex) echo apex ;; fla) echo fla ;; flashinfer) echo flashinfer ;;
  esac
}

# Without build isolation the three that compile find the installed torch; with it pip would fetch another one to build against.
commands() {
  case $1 in
    te)
      echo "$pip setuptools wheel ninja pybind11"
      echo "$pip --no-build-isolation 'transformer_engine[pytorch,core_cu$major]'$keep"
      ;;
    deepep)
      echo "$pip nvidia-nvshmem-cu$major setuptools wheel ninja"
      echo "TORCH_CUDA_ARCH_LIST='$arch' $pip --no-build-isolation 'git+https://github.com/deepseek-ai/DeepEP@v1.2.1'$keep"
      ;;
    apex)
      echo "$pip setuptools wheel ninja packaging"
      echo "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 TORCH_CUDA_ARCH_LIST='$arch' $pip --no-build-isolation 'git+https://github.com/NVIDIA/apex'$keep"
      ;;
    fla) echo "$pip 'flash-linear-attention>=0.6.0'$keep" ;;
    flashinfer) echo "$pip 'flashinfer-python>=0.6.18'$keep" ;;
  esac
}

# Prints nothing where the module imports, else why it does not.
problem() {
  "$python" - "$(module "$1")" <<'PYTHON' 2>/dev/null || echo "its import ends the process"
import importlib, sys
name = sys.argv[1]
try:
    importlib.import_module(name)
except ModuleNotFoundError as error:
    print("not installed" if error.name == name.split(".")[0] else f"installed, but it lacks {error.name}")
except Exception as error:  # whatever a broken build raises is what its user needs to read
    print(f"installed, but its import fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
PYTHON
}

echo "Python   $python"
echo "torch    ${torch:-missing}${cuda:+, CUDA $cuda}, compiling for $arch"
echo "nvcc     $(command -v nvcc || echo 'not found (needed by --te, --deepep and --apex)')"
if [ "$mode" = install ] && [ -z "$cuda" ]; then
  if [ -n "$torch" ]; then why="the torch $torch of $python has no CUDA"; else why="$python has no torch"; fi
  echo "error: $why. Install one with CUDA first: https://pytorch.org/get-started" >&2
  exit 1
fi

for name in "${wanted[@]}"; do
  if [ "$mode" = check ]; then break; fi
  if [ "$mode" = install ] && [ -z "$(problem "$name")" ]; then continue; fi
  echo
  echo "== $name"
  commands "$name" | while IFS= read -r line; do
    echo "$line"
    # A failed package is reported at the end; the others are still tried.
    if [ "$mode" = install ]; then eval "$line" </dev/null || { echo "that failed" >&2; break; }; fi
  done
done

echo
missing=0
for name in "${wanted[@]}"; do
  why=$(problem "$name")
  if [ -z "$why" ]; then
    echo "present  $name"
  elif [ "$mode" = dry-run ]; then
    echo "missing  $name ($why)"
  else
    missing=1
    echo "missing  $name ($why). To install it:"
    commands "$name" | sed 's/^/           /'
  fi
done
if [ "$mode" != dry-run ]; then exit $missing; fi
