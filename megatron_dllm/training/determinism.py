"""--deterministic-mode: what bit-equal repeats need of the environment is verified, what cannot repeat is refused; nothing is changed."""
from __future__ import annotations

from collections.abc import Mapping

import torch

from ..config import RunConfig

# Workspaces with which cuBLAS documents one result for one call, whatever runs beside it.
CUBLAS_WORKSPACES = (":4096:8", ":16:8")
# With a fixed algorithm NCCL adds up in one order. It chooses by size and topology otherwise, and NVLS adds inside the switch.
NCCL_ALGORITHMS = ("Ring", "Tree")
# Their kernels receive rows in the order in which they arrive.
ARRIVAL_ORDER = ("deepep", "hybridep")


def obstacles(run: RunConfig, device: torch.device, world_size: int, environment: Mapping[str, str]) -> list[str]:
    """Why repeats of the run on `device` need not be bit-equal, each with its remedy; empty if nothing is known to stand against it."""
    found = []
    dispatcher = run.moe.dispatcher
    if dispatcher in ARRIVAL_ORDER:
        found.append(f"--moe-token-dispatcher-type {dispatcher}: its rows come in the order in which they arrive; "
                     "set --moe-token-dispatcher-type alltoall")
    if device.type != "cuda":
        return found
    workspace = environment.get("CUBLAS_WORKSPACE_CONFIG")
    if workspace not in CUBLAS_WORKSPACES:
        found.append(f"CUBLAS_WORKSPACE_CONFIG is {workspace or 'not set'}: cuBLAS may then choose another sum from call to call; "
                     f"set it to one of {', '.join(CUBLAS_WORKSPACES)} before the start")
    algorithm = environment.get("NCCL_ALGO")
    if world_size > 1 and (algorithm or "").capitalize() not in NCCL_ALGORITHMS:
        found.append(f"NCCL_ALGO is {algorithm or 'not set'}: NCCL may then add up the ranks in another order; "
                     f"set it to one of {', '.join(NCCL_ALGORITHMS)} before the start, the same on every node")
    if torch.backends.cudnn.benchmark:
        found.append("torch.backends.cudnn.benchmark is on: kernels are chosen by timing; leave it off")
    return found


def require_determinism(run: RunConfig, device: torch.device, world_size: int, environment: Mapping[str, str]) -> str:
    """A line for the log about what was verified, after which torch refuses operations that have no deterministic form.

    ValueError with every obstacle.
    """
    if found := obstacles(run, device, world_size, environment):
        raise ValueError("--deterministic-mode cannot be kept:\n" + "\n".join(f"  {text}" for text in found))
    # The same as use_deterministic_algorithms(True), which imports the compiler besides: two seconds of every start.
    torch.set_deterministic_debug_mode("error")
    names = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")[:1 + (world_size > 1)] if device.type == "cuda" else ()
    kept = "".join(f", {name} {environment[name]}" for name in names)
    return f"deterministic mode: {device.type}{kept}; torch refuses what has no deterministic form"
