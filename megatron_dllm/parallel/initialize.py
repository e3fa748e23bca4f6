"""From a launched process to a ParallelContext: every group created in one fixed order, every pair warmed up."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_dllm.config.parallel import ParallelConfig

from .context import CommunicationLog, Group, ParallelContext
from .launch import SHARE_GPU, Launch, read_launch, shares_gpu
from .topology import GROUP_AXES, Topology

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def initialize(config: ParallelConfig, *, device: str = "auto", timeout_minutes: float = 10.0) -> ParallelContext:
    """Join the world that the launcher has started (a world of one without a launcher).

    `device`: "cpu", "cuda", or "auto" (cuda where there is one). The backend follows it. ValueError where sizes and
    world do not fit, or there are more ranks on this host than GPUs.
    """
    launch = read_launch(os.environ)
    world, rank, local_rank = (launch.world_size, launch.rank, launch.local_rank) if launch else (1, 0, 0)
    try:
        topology = Topology.of(config, world)
    except ValueError as error:
        if launch is None:
            raise ValueError(f"{error} (this is one process; start several with torchrun --nproc-per-node N or srun)") from None
        raise
    if launch is not None:
        prepare_environment(launch)
    own_device = choose_device(device, 0 if launch and launch.shares_gpu else local_rank)
    if launch is not None:
        if own_device.type == "cuda":
            torch.cuda.set_device(own_device)
        dist.init_process_group(
            BACKENDS[own_device.type],
            init_method=launch.init_method,
            rank=rank,
            world_size=world,
            timeout=timedelta(minutes=timeout_minutes),
            # Binds NCCL to the device now, so that an error in it shows here.
            device_id=own_device if own_device.type == "cuda" else None,
        )
    return create_context(topology, rank=rank, device=own_device, sequence_parallel=config.sequence_parallel,
                          timeout_minutes=timeout_minutes)


def prepare_environment(launch: Launch) -> None:
    """Set what CUDA and NCCL read once, when they start, unless it is set already."""
    # Among few hardware queues work may stand behind a transfer that waits for it: a recorded pipeline of 8 microbatches did not end with
    # CUDA's own 8, and did with as many as there can be.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # NCCL would register the buffers of what a CUDA graph records, and takes each for one allocation, which those of expandable segments
    # are not (pytorch issue 158029).
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if launch.shares_gpu:
        # NCCL takes two ranks of one host on one device for a mistake; ranks that say they are hosts exchange by sockets.
        os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}, rank {launch.rank}"
        os.environ.setdefault("NCCL_NET", "Socket")


def choose_device(device: str, local_rank: int) -> torch.device:
    """The device of the process with this number on its host."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if device not in ("auto", "cuda"):
        raise ValueError(f"--device {device}: choose auto, cpu or cuda")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device; set --device cpu, or install torch for CUDA")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"process {local_rank} of this host finds {torch.cuda.device_count()} CUDA devices; start at most as many processes a host, "
            f"or set --device cpu, or {SHARE_GPU}=1 before the start, which only tries whether a layout runs"
        )
    return torch.device("cuda", local_rank)


def create_context(topology: Topology, *, rank: int, device: torch.device, sequence_parallel: bool,
                   timeout_minutes: float = 10.0) -> ParallelContext:
    """Create all groups over the default process group (none is needed for a world of one) and warm them up.

    Every rank creates every group, its own or not, in the same order, as torch.distributed demands.
    """
    log = CommunicationLog()
    timeout = timedelta(minutes=timeout_minutes)  # torch gives new groups its own, not the world's
    groups = {name: _create_group(name, topology.groups(name), rank, log, timeout) for name in GROUP_AXES}
    everyone = tuple(range(topology.world))
    groups["world"] = (
        Group("world", topology.world, rank, dist.group.WORLD, everyone, log) if topology.world > 1 else Group.single("world", log=log)
    )
    for name in GROUP_AXES:
        warm_up(groups[name], device, pairs=name in ("cp", "pp"))
    return ParallelContext(**groups, sequence_parallel=sequence_parallel, device=device, log=log)


def _create_group(name: str, all_ranks: list[tuple[int, ...]], rank: int, log: CommunicationLog, timeout: timedelta) -> Group:
    own = Group.single(name, rank, log)
    for number, ranks in enumerate(all_ranks):
        if len(ranks) == 1:
            continue
        process_group = dist.new_group(list(ranks), timeout=timeout, group_desc=f"{name} {number}")
        if rank in ranks:
            own = Group(name, len(ranks), ranks.index(rank), process_group, ranks, log)
    return own


def warm_up(group: Group, device: torch.device, *, pairs: bool) -> None:
    """Open the group's connections, which is done lazily and could otherwise deadlock or stall in the first step.

    `pairs`: also from each rank to each other, in one order for all; both directions at once.
    """
    if group.size == 1:
        return
    value = torch.ones(1, device=device)
    dist.all_reduce(value, group=group.handle)
    if value.item() != group.size:
        raise RuntimeError(f"group {group.name} {group.ranks}: a sum of ones over {group.size} ranks gave {value.item()}")
    if not pairs:
        return
    for first in range(group.size):
        for second in range(first + 1, group.size):
            if group.rank not in (first, second):
                continue
            peer = group.ranks[second if group.rank == first else first]
            received = torch.zeros_like(value)
            operations = [
                dist.P2POp(dist.isend, value, peer, group.handle),
                dist.P2POp(dist.irecv, received, peer, group.handle),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()


def shares_device(context: ParallelContext) -> bool:
    """Whether other ranks of this world compute on this rank's GPU."""
    return context.device.type == "cuda" and context.world.size > 1 and shares_gpu()


def close(context: ParallelContext) -> None:
    """Destroy the groups of a context, but not the world's: for programs that try one layout after another."""
    for name in GROUP_AXES:
        group = context.group(name)
        if group.size > 1:
            dist.destroy_process_group(group.handle)
