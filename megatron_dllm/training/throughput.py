"""How fast a run goes: time, tokens and operations of the steps since the last log line, the devices' peak, and memory."""
from __future__ import annotations

import re
import resource
import sys
from dataclasses import dataclass

import torch

from .operations import StepOperations, TokenCounts

# Dense bf16 TFLOP/s by a word of the device's name, from the makers' data sheets (their figures with sparsity halved). The first match
# counts, so that the more particular names come first.
PEAK_TFLOPS = (
    ("H100 PCIe", 756), ("H100 NVL", 835), ("H100", 989), ("H200 NVL", 835), ("H200", 989), ("GH200", 989), ("H800", 989), ("H20", 148),
    ("GB300", 2500), ("B300", 2250), ("GB200", 2500), ("B200", 2250),
    ("A100", 312), ("A800", 312), ("A40", 150), ("A30", 165), ("A10G", 70), ("A10", 125), ("L40S", 362), ("L40", 181), ("L4", 121),
    ("MI300X", 1307), ("MI325X", 1307),
)


@dataclass(frozen=True)
class Peak:
    """What MFU is a share of. description: where the number comes from, for the log."""

    tflops: float
    description: str


def peak_of(device: torch.device, *, peak_tflops: float | None) -> Peak | None:
    """The peak of one device: --peak-tflops where given, else the table's; None (no MFU) for a CPU and for devices it does not know."""
    if peak_tflops:
        return Peak(peak_tflops, f"{peak_tflops:g} TFLOP/s per device (--peak-tflops)")
    return peak_of_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of_name(name: str) -> Peak | None:
    """The table's peak for a device name such as "NVIDIA H200", or None."""
    for part, tflops in PEAK_TFLOPS:
        if re.search(rf"\b{part}\b", name, re.IGNORECASE):
            return Peak(tflops, f"{tflops} TFLOP/s per device (dense bf16 of {part}, device {name})")
    return None


def describe_peak(peak: Peak | None, device: str, *, shared: bool = False) -> str:
    """The line that every run logs about the peak that it assumes; `shared`: by several ranks, each of which has a part of the device."""
    if shared:
        return "MFU is not logged: ranks share the device"
    if peak is None:
        return f"MFU is not logged: no peak is known for {device}; give --peak-tflops"
    return f"MFU assumes a peak of {peak.description}"


class Throughput:
    """Sums up steps and gives their rates, over all devices unless a name says otherwise.

    num_devices      devices that share the work
    peak             of one device, None: no MFU
    with_operations  --log-throughput: give TFLOP/s and MFU too
    """

    def __init__(self, *, num_devices: int, peak: Peak | None, with_operations: bool):
        self._num_devices = num_devices
        self._peak = peak
        self._with_operations = with_operations
        self._reset()

    def _reset(self) -> None:
        self._steps = 0
        self._seconds = self._model = self._hardware = 0.0
        self._text_tokens = self._canvas_tokens = 0

    def add(self, seconds: float, tokens: TokenCounts, operations: StepOperations) -> None:
        """Count one step: its wall time, the tokens of the global batch, and the operations of all devices."""
        self._steps += 1
        self._seconds += seconds
        self._text_tokens += tokens.text_tokens
        self._canvas_tokens += int(tokens.canvas.sum())
        self._model += operations.model
        self._hardware += operations.hardware

    def drain(self) -> dict[str, float]:
        """The rates since the last call, empty without a step; then counts anew."""
        if self._steps == 0:
            return {}
        seconds = self._seconds
        rates = {
            "iteration_ms": 1000 * seconds / self._steps,
            "tokens_per_second": self._text_tokens / seconds,
            "canvas_tokens_per_second": self._canvas_tokens / seconds}
        if self._with_operations:
            device_tflop_seconds = 1e12 * seconds * self._num_devices
            rates["tflops_per_device"] = self._model / device_tflop_seconds
            rates["hardware_tflops_per_device"] = self._hardware / device_tflop_seconds
            if self._peak is not None:
                rates["mfu"] = rates["tflops_per_device"] / self._peak.tflops
        self._reset()
        return rates


def memory_metrics(device: torch.device) -> dict[str, int]:
    """Peaks since the process began, in bytes: what torch allocated and reserved on a CUDA device, or the process's resident memory."""
    if device.type == "cuda":
        return {
            "memory_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "memory_reserved_bytes": torch.cuda.max_memory_reserved(device)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts it in bytes, Linux in KiB.
    return {"memory_resident_bytes": peak if sys.platform == "darwin" else peak * 1024}
