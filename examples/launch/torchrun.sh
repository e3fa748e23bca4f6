#!/usr/bin/env bash
# Starts a recipe by torchrun on one node or several: run it on every node with the same values but NODE_RANK.
#
#   NODES=2 NODE_RANK=0 MASTER_ADDR=host0 bash examples/launch/torchrun.sh RECIPE [FLAGS OF pretrain_dllm.py]
#
#   NODES        how many nodes (1)            MASTER_ADDR  host of node 0, reachable from all (localhost for one node)
#   NODE_RANK    number of this node (0)       MASTER_PORT  a free port there (29500)
#   PROCESSES    processes over all nodes, one a GPU (what the recipe says)
# MODEL, DATA, SAVE, SCALE and DRY_RUN are those of the recipe; SAVE must be a directory that all nodes see.
set -euo pipefail
case ${1:---help} in
  -h | --help)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"
    exit 0
    ;;
esac
export NODES=${NODES:-1} NODE_RANK=${NODE_RANK:-0} MASTER_PORT=${MASTER_PORT:-29500} LAUNCH=torchrun
if [ "$NODES" -gt 1 ] && [ -z "${MASTER_ADDR:-}" ]; then
  echo "error: NODES=$NODES needs MASTER_ADDR, the host of node 0" >&2
  exit 2
fi
export MASTER_ADDR=${MASTER_ADDR:-localhost}
[ -f "$1" ] || { echo "error: there is no recipe $1; those that there are lie in examples/diffusion_gemma" >&2; exit 2; }
exec bash "$@"
