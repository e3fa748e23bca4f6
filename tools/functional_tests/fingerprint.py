"""What bit-equal results depend on beside the code: where a golden file was recorded."""
from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

from megatron_dllm.parallel.launch import shares_gpu

# Instructions that change how low precision is multiplied, beyond the capability that torch reports.
INSTRUCTIONS = ("avx512_bf16", "amx_tile", "amx_bf16")


def fingerprint(device: str, environment: Mapping[str, str] = os.environ, processes: int = 1) -> dict[str, str]:
    """For runs of so many `processes` on `device` ("cpu" or "cuda") that are started with `environment`."""
    capabilities = torch.cpu.get_capabilities() if "get_capabilities" in vars(torch.cpu) else {}  # not every torch that we take has it
    entries = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "cpu": " ".join([torch.backends.cpu.get_cpu_capability(), str(capabilities.get("cpu_name", "")),
                         *(name for name in INSTRUCTIONS if capabilities.get(name))]),
        "threads": environment.get("OMP_NUM_THREADS", str(torch.get_num_threads())),
        "backends": " ".join(name for name in ("mkl", "mkldnn", "openmp") if getattr(torch.backends, name).is_available()),
    }
    if "ATEN_CPU_CAPABILITY" in environment:  # what this process reports is not what the run will
        entries["cpu"] = f"{environment['ATEN_CPU_CAPABILITY']} (set), {entries['cpu']}"
    if device == "cuda":
        entries |= {
            "cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "cublas": package_version("nvidia-cublas", f"nvidia-cublas-cu{(torch.version.cuda or '').partition('.')[0]}"),
            "triton": package_version("triton"),
            "processors": str(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count),
            "nccl_algo": environment.get("NCCL_ALGO", "unset"),
            "cublas_workspace": environment.get("CUBLAS_WORKSPACE_CONFIG", "unset")}
        if shares_gpu(environment) and processes > 1:
            entries["gpus"] = "one for all ranks"
    return entries


def package_version(*names: str) -> str:
    """Of the first of these that is installed, "none" where none is."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"


def code_digest(root: Path) -> str:
    """Of every Python file of the package, every recipe and every case."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in ("megatron_dllm/**/*.py", "examples/diffusion_gemma/*.sh", "tests/functional/*/config.yaml")
                       for path in root.glob(pattern)):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def golden_name(entries: Mapping[str, str], processes: int) -> str:
    """The file of a recipe's golden values on this kind of device with so many processes: "golden_cpu_x2.json"; "_shared" where all of
    them share one."""
    device = re.sub(r"[^a-z0-9]+", "-", entries["device"].lower()).strip("-")
    return f"golden_{device}_x{processes}{'_shared' if 'gpus' in entries else ''}.json"


def changed(ours: Mapping[str, str], golden: Mapping[str, str]) -> list[str]:
    """What differs between two environments, each as "torch 2.11 here, 2.13 there"; empty: values must be bit-equal."""
    return [f"{name} {ours.get(name, 'none')} here, {golden.get(name, 'none')} there"
            for name in sorted({*ours, *golden}) if ours.get(name) != golden.get(name)]
