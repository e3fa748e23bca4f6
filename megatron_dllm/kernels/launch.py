"""Which tensors the kernels take, and how many programs to start."""
from __future__ import annotations

import functools

import torch
from torch import Tensor

WIDEST_ROW = 8192  # a row of fp32 stays in the registers of one program
TILE = 4096  # numbers a program holds of each tensor: 8 warps, 16 numbers a thread


def takes(*tensors: Tensor | None) -> bool:
    """Whether all tensors are on a CUDA device in a dtype that fp32 holds (a float64 model runs in float64, so in plain torch)."""
    for x in tensors:  # a loop, since a hundred calls a step on a CPU would each make a generator
        if x is not None and not (x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16)):
            return False
    return True


def next_power_of_2(size: int) -> int:
    """The least power of two that is not under `size` (1 for 0)."""
    return 1 << max(size - 1, 0).bit_length()


def tile(width: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program that holds whole rows of `width`; rows and columns are powers of two."""
    columns = next_power_of_2(width)
    rows = max(1, TILE // columns)
    return rows, columns, 8 if rows * columns <= TILE else 16


def has_large_shared_memory(device: torch.device) -> bool:
    """Whether `device` moves tiles by itself into 227 KiB of shared memory a processor (sm_90, sm_100), as grouped products want it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; 2 where kernels are interpreted, so that a loop over tiles is one there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def persistent_programs(device: torch.device, tiles: int) -> int:
    """How many programs share `tiles` in a loop: few, since each writes a partial sum.

    Two of 8 warps and 112 registers a thread, which the widest of these loops takes on sm_90, fit a processor at once.
    """
    return min(tiles, 2 * processors(device))
