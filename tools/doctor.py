#!/usr/bin/env python3
"""What is installed, what works on this machine, and what each flag would take here, with the command for what is missing.

    python tools/doctor.py [--device auto|cpu|cuda] [--markdown FILE]

Tries every backend on a small case against its oracle: kernels and plain torch, the optimizer's, CUDA graphs, two processes over gloo and,
with two GPUs, over NCCL. Downloads nothing. Ends with 1 when something that is needed is missing or a check fails; what is optional may
be absent.
"""
from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.missing_packages import missing, requirements  # noqa: E402

NEEDED = {"torch", "numpy"}  # what every part imports

if TYPE_CHECKING:
    import torch

    from tools.checkup.report import Section


def trials(title: str, module: str, device: torch.device) -> Section:
    """A section of what a module of tools.checkup tries."""
    from tools.checkup.trials import trials_section

    return trials_section(title, importlib.import_module(f"tools.checkup.{module}").trials(device), device)


def parts(device: torch.device) -> dict[str, Callable[[], Section]]:
    """What makes each section of the report, by its title. Imports are made within: one that fails is a failed section, no more."""
    tried = {"layers": "layers", "around them": "steps", "Transformer Engine": "engine", "a model": "whole", "two processes": "worlds"}

    def of(module: str, function: str) -> Callable[[], Section]:
        return lambda: getattr(importlib.import_module(f"tools.checkup.{module}"), function)(device)

    return {"This machine": of("installed", "machine_section"), "Packages": of("installed", "packages_section"),
            **{f"What works: {name}": partial(trials, f"What works: {name}", module, device) for name, module in tried.items()},
            "What flags take": of("choices", "choices_section")}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="what to look at; auto: CUDA where torch sees it")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the report to this file as well, without paths of the machine")
    arguments = parser.parse_args()
    absent = {line.partition(">=")[0]: line for line in missing(requirements([])) if "(found" not in line}
    if NEEDED & absent.keys():
        print("\n".join(f"MISSING  {line}: python -m pip install '{line}'" for line in absent.values()))
        print(f"nothing can be tried without {' and '.join(sorted(NEEDED))}")
        return 1
    from megatron_dllm.parallel.initialize import choose_device
    from tools.checkup.report import FAILED, Row, Section, as_markdown, as_text, outcome_of, verdict_line

    device = choose_device(arguments.device, 0)
    report = []
    for title, part in parts(device).items():
        made = outcome_of(part)
        section = Section(title, ("part", "why"), (Row(FAILED, (title, made.first_line)),)) if made.error else made.value
        print(as_text([section]), end="\n\n", flush=True)
        report.append(section)
    last = verdict_line(report)
    print(last)
    if arguments.markdown:
        arguments.markdown.write_text(as_markdown(f"tools/doctor.py on {device.type.upper()}", report, last))
    return 1 if any(section.faults for section in report) else 0


if __name__ == "__main__":
    sys.exit(main())
