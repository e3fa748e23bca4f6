"""What the launcher (torchrun or srun) says in the environment: the only place that reads it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

SRUN_PORT = 29500
# Set to 1, all processes of a host take its first GPU: a layout for many is tried where there is one. Nothing timed so means anything.
SHARE_GPU = "SHARE_GPU"


@dataclass(frozen=True)
class Launch:
    """One process among `world_size`; `init_method` is how torch.distributed finds the others. shares_gpu: with the other processes of its
    host it takes the first GPU."""

    rank: int
    world_size: int
    local_rank: int
    init_method: str
    shares_gpu: bool = False


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """How this process was started; None if it is alone (neither torchrun nor an srun step of several tasks)."""
    shared = shares_gpu(environment)
    if "RANK" in environment and "WORLD_SIZE" in environment:
        _require(environment, ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), "RANK and WORLD_SIZE are set, as torchrun does")
        # env:// and no address: the store at that address is torchrun's own.
        return Launch(int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment["LOCAL_RANK"]), "env://", shared)
    # SLURM_NTASKS is set in a batch script too, where nobody else runs; the step's own count only by srun.
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        _require(environment, ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"), "this is an srun step of several tasks")
        address = environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"])
        port = int(environment.get("MASTER_PORT", SRUN_PORT))
        return Launch(
            int(environment["SLURM_PROCID"]),
            int(environment["SLURM_STEP_NUM_TASKS"]),
            int(environment["SLURM_LOCALID"]),
            f"tcp://{address}:{port}",
            shared,
        )
    return None


def launched() -> tuple[int, int]:
    """(rank, number of processes) of this process's launch, (0, 1) without a launcher; needs no process group."""
    launch = read_launch(os.environ)
    return (launch.rank, launch.world_size) if launch else (0, 1)


def shares_gpu(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks that are started with this environment share a GPU; ValueError for a setting of SHARE_GPU that is neither 0 nor 1."""
    value = environment.get(SHARE_GPU) or "0"  # empty, as scripts leave what they unset
    if value not in ("0", "1"):
        raise ValueError(f"{SHARE_GPU}={value!r}: set 1, or leave it out")
    return value == "1"


def first_host(nodes: str) -> str:
    """First of a Slurm node list: "gpu[07-09,12],login1" gives "gpu07"."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} names no node; set MASTER_ADDR to the host of rank 0")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")


def _require(environment: Mapping[str, str], names: tuple[str, ...], why: str) -> None:
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise ValueError(f"{why}, but {', '.join(missing)} is not; start with torchrun or srun, or set all of these variables")
