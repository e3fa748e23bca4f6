"""Kernels that are launched while the one before them still runs (programmatic dependent launch, sm_90 and later): they wait by
themselves until it has ended, and their launch costs no time.

A kernel that may be launched so, or may be followed by one that is, calls `after_last` before it reads what another kernel writes, and
before it writes anything. A kernel that is launched as usual waits for all of the one before it, as ever.
"""
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launch import has_large_shared_memory


@triton.jit
def after_last(DEPENDENT: tl.constexpr):
    """Wait until all that was launched before has ended; from here on the next kernel's programs may take what processors are free."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


def dependent(device: torch.device, *, early: bool = True) -> dict[str, bool]:
    """Arguments of a launch of a kernel that has DEPENDENT. `early`: before the last kernel of the stream has ended; that is for kernels
    alone that wait for one other. Devices that cannot launch so launch as usual."""
    if not _can_depend(device):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True} if early else {"DEPENDENT": True}


@functools.cache
def _can_depend(device: torch.device) -> bool:
    return has_large_shared_memory(device)  # the devices are the same
