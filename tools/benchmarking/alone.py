"""Whether a GPU is free to be timed: what a killed run leaves behind halves every speed, of both sides, and no figure shows it."""
from __future__ import annotations

import torch

from tools.refusal import Refusal

ALLOWED_GIB = 2.0  # a display, a monitor, this process itself


def refuse_company(device: torch.device) -> None:
    """Refusal, with what is held, where other processes hold memory of the GPU. To be called before anything is put there."""
    free, total = torch.cuda.mem_get_info(device)
    held = (total - free) / 2**30
    if held > ALLOWED_GIB:
        raise Refusal(f"{held:.1f} GiB of {device} are held by other processes, whose work would spoil every time measured here; "
                      "nvidia-smi lists them: end them, or set CUDA_VISIBLE_DEVICES to another GPU")
