"""Copies between host and device for which the one does not wait while the other has work under way."""
from __future__ import annotations

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device) -> Tensor:
    """`x` on the device, whose stream copies it in its own time."""
    if device.type == "cuda" and not x.is_cuda:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


class HostCopy:
    """Tensors of one device on their way to the CPU: it waits for what made them, and not for what the device is given afterwards."""

    def __init__(self, *tensors: Tensor):
        self._tensors, self._is_there = tensors, None
        if tensors[0].is_cuda:
            self._tensors = tuple(torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True) for x in tensors)
            self._is_there = torch.cuda.current_stream(tensors[0].device).record_event()

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors on the CPU, in order."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._tensors
