"""Transfers of pipelines between the ranks of a launched world, bit for bit: affine stages on integers against a serial run.

Usage: torchrun --nproc-per-node 4 tools/verify.py transport [--device cpu|cuda]

The same cases as the suite pipeline's, over NCCL on GPUs: PP2, PP2/VPP2 and PP2/VPP2/TP2 with sequence parallelism, four residual streams
of 4096 and 7168. Every boundary tensor, input gradient, parameter gradient and loss must be equal, and sent outputs must be released.
A world of two has no TP.
"""
from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_dllm.config import ParallelConfig
from megatron_dllm.parallel import ParallelContext, Topology, communication, create_context, initialize
from megatron_dllm.parallel.launch import launched
from tests.parallel.affine import AffineCase, compare_in, swap_receives
from tools.refusal import Refusal
from verification.table import Figure, print_figures

WIDTHS = (4096, 7168)
COUNTS = ("different", "compared", "outputs", "held")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA where torch sees a device.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table on rank 0; the number of missed figures."""
    rank, world = launched()
    if world not in (2, 4):
        raise Refusal(f"transport needs a world of 2 or 4 processes, not {world}: start it by torchrun --nproc-per-node 4")
    torch.set_num_threads(1)
    context = initialize(ParallelConfig(pipeline_model_parallel_size=2), device=arguments.device)
    figures = list(transfers(context, {"pp2": (1, 1), "pp2 vpp2": (2, 1)}))
    fault = AffineCase(2, 2, 6, 1, (False,) * 4, equal_rows=True)
    different = total(context, compare_in(context, fault, swap_receives))["different"]
    figures.append(Figure("planted fault: two receives in the wrong order are seen (negated tensors)", -different, -1, "at least 1"))
    if world == 4:
        both = create_context(Topology(world=4, pp=2, tp=2), rank=rank, device=context.device, sequence_parallel=True)
        figures += transfers(both, {"pp2 vpp2 tp2 sp": (2, 2)})
    missed = 0
    if rank == 0:
        where = torch.cuda.get_device_name() if context.device.type == "cuda" else "cpu"
        print(f"torch {torch.__version__}, {dist.get_backend()} over {world} processes, {where}")
        missed = print_figures("transport", figures)
    dist.destroy_process_group()
    return missed


def transfers(context: ParallelContext, layouts: dict[str, tuple[int, int]]) -> Iterator[Figure]:
    """Of each layout (chunks, tp), width and way of sending: tensors that differ, and sent outputs that still hold memory."""
    for hidden in WIDTHS:
        for name, (chunks, tp) in layouts.items():
            for batched in (True, False):
                case = AffineCase(2, chunks, hidden, 4, (True, False), tp=tp, batched=batched)
                found = total(context, compare_in(context, case))
                how = f"{name}, {case.width} wide, {'batched' if batched else 'one by one'}"
                yield Figure(f"{how}: tensors that differ", found["different"], 0, f"of {found['compared']}")
                yield Figure(f"{how}: sent outputs that hold memory", found["held"], 0, f"of {found['outputs']}")


def total(context: ParallelContext, found: dict[str, int]) -> dict[str, int]:
    """The counts, summed over all ranks."""
    counts = torch.tensor([found[name] for name in COUNTS], device=context.device)
    return dict(zip(COUNTS, communication.all_reduce(counts, context.world).tolist(), strict=True))
