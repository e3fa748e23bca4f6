"""What is installed: Python, torch, the devices and how they reach each other, and every package against the ranges of setup.py."""
from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.missing_packages import missing, requirements

from .report import ABSENT, FAILED, MISSING, NOTE, OK, Row, Section, outcome_of

IMPORT_SECONDS = 60
DRIVER = Path("/proc/driver/nvidia/version")  # the kernel module's own word


@dataclass(frozen=True)
class Package:
    """A package that no run needs: its distributions (any of them), its module, what uses it, how it is installed."""

    distributions: tuple[str, ...]
    module: str
    use: str
    command: str


OPTIONAL = (
    Package(("triton",), "triton", "our kernels on CUDA", "python -m pip install triton"),
    Package(("transformer-engine", "transformer_engine"), "transformer_engine.pytorch", "--transformer-impl, --optimizer-backend te",
             "bash tools/install_gpu.sh --te"),
    Package(("apex",), "apex.optimizers", "--optimizer-backend apex, --gradient-accumulation-fusion", "bash tools/install_gpu.sh --apex"),
    Package(("deep-ep", "deep_ep"), "deep_ep", "--moe-token-dispatcher-type deepep, hybridep", "bash tools/install_gpu.sh --deepep"),
    Package(("flash-linear-attention",), "fla", "--gdn-kernel-backend fla (see below)", "bash tools/install_gpu.sh --fla"),
    Package(("flashinfer-python",), "flashinfer", "generate.py --use-flashinfer-fused-rope, --sampling-backend",
            "bash tools/install_gpu.sh --flashinfer"),
    Package(("peft",), "peft", "tests of exported adapters", "python -m pip install -e '.[dev]'"),
    Package(("pytest",), "pytest", "tests", "python -m pip install -e '.[dev]'"),
)  # fmt: skip


def machine_section(device: torch.device) -> Section:
    """Python, torch and the devices."""
    rows = [
        Row(OK if sys.version_info >= (3, 11) else FAILED, ("Python", f"{platform.python_version()} (3.11 or newer is needed)")),
        Row(NOTE, ("system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores")),
        Row(OK, ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, cuDNN {torch.backends.cudnn.version() or 'none'}")),
        Row(OK, ("device here", str(device.type))),
        Row(NOTE, ("driver", _driver())),
    ]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        rows.append(Row(OK, (f"GPU {number}", f"{properties.name}, sm_{properties.major}{properties.minor}, "
                                              f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} processors")))
    if count:
        rows.append(Row(OK, ("NCCL", ".".join(map(str, torch.cuda.nccl.version())))))
    else:
        rows.append(Row(NOTE, ("GPU", "torch sees none: what needs one is not tried")))
    if count > 1:
        apart = [f"{a}-{b}" for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)]
        rows.append(Row(NOTE, ("peer access", f"not between {', '.join(apart)}" if apart else f"between all {count} GPUs")))
        rows.append(Row(NOTE, ("NVLink", _nvlinks(count))))
    return Section("This machine", ("what", "found"), tuple(rows))


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return DRIVER.read_text().splitlines()[0] if DRIVER.is_file() else "none found"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=20)
    lines = (result.stdout or result.stderr).strip().splitlines()
    return lines[0] if lines else f"nvidia-smi ends with {result.returncode}"


def _nvlinks(count: int) -> str:
    """Links between GPUs, as torch's symmetric memory finds them."""
    found = outcome_of(lambda: torch._C._distributed_c10d._detect_dma_connectivity(torch.autograd.DeviceType.CUDA, "nvlink").matrix)
    if found.error:
        return f"torch cannot tell ({found.first_line})"
    pairs = {found.value[a][b] for a in range(count) for b in range(count) if a != b}
    return f"{min(pairs)} to {max(pairs)} links a pair, as torch counts them"


def packages_section(device: torch.device) -> Section:
    """Every requirement of setup.py, and the packages that flags can choose, with the command for what is missing."""
    rows = []
    for line in requirements([]):
        lacking = missing([line])
        rows.append(Row(MISSING if lacking else OK, (
            _name(line), _version((_name(line),)) or "none", _range(line), "every run",
            f"python -m pip install '{line}'" if lacking else "")))
    ranges = {_name(line): line for line in requirements(["fla", "flashinfer", "dev"])}
    with ThreadPoolExecutor(4) as executor:
        problems = list(executor.map(_import_problem, [package.module for package in OPTIONAL]))
    for package, problem in zip(OPTIONAL, problems, strict=True):
        line = ranges.get(package.distributions[0], "")
        rows.append(_optional_row(package, problem, line, device))
    return Section("Packages", ("package", "found", "range", "for", "to install it"), tuple(rows))


def _optional_row(package: Package, problem: str | None, line: str, device: torch.device) -> Row:
    found, outside = _version(package.distributions), bool(line) and bool(missing([line]))
    needed = package.module == "triton" and device.type == "cuda"
    if problem is None and not (outside and found):
        verdict, command = OK, ""
    else:
        verdict, command = (FAILED if found else MISSING if needed else ABSENT), package.command
    found = found or ("no version" if problem is None else "none")
    return Row(verdict, (package.distributions[0], found, _range(line) or "any", package.use,
                         command + (f"  ({problem})" if problem and verdict == FAILED else "")))


def _name(line: str) -> str:
    return re.match(r"[\w.-]+", line)[0]


def _range(line: str) -> str:
    return line[len(_name(line)):] if line else ""


def _version(distributions: Sequence[str]) -> str:
    """The version of the first that is installed; empty for none."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _import_problem(module: str) -> str | None:
    """Why the module does not import, found out in a process of its own, which a broken build may end; None if it does."""
    try:
        result = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"its import takes more than {IMPORT_SECONDS} s"
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines else f"its import ends the process with {result.returncode}"
