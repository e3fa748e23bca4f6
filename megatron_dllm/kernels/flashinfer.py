"""The package FlashInfer, where a flag of generation asks for it."""
from __future__ import annotations

import importlib
from types import ModuleType

import torch


def load_flashinfer(flag: str, device: torch.device) -> ModuleType:
    """The package. ValueError or ImportError, with the remedy, if it cannot run on `device`; `flag` is what asked for it."""
    if device.type != "cuda":
        raise ValueError(f"{flag}: its kernels need a CUDA device, and the device is {device}; leave the flag out")
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ImportError(f"{flag}: the package flashinfer-python cannot be imported ({error}); install it with "
                          "`bash tools/install_gpu.sh --flashinfer`, or leave the flag out") from error
