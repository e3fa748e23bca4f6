#!/usr/bin/env python3
"""What is installed, what works on this machine, and what each flag would take here, with the command for what is missing.

    python tools/doctor.py [--device auto|cpu|cuda] [--markdown FILE]

Tries every backend on a small case against its oracle: kernels and plain torch, the optimizer's, CUDA graphs, two processes over gloo and,
with two GPUs, over NCCL. Downloads nothing. Ends with 1 when something that is needed is missing or a check fails; what is optional may
be absent.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.missing_packages import missing, requirements  # noqa: E402

if TYPE_CHECKING:
    import torch

    from tools.checkup.report import Section


def parts(device: torch.device) -> dict[str, Callable[[], Section]]:
    """What makes each section of the report, by its title."""
    from tools.checkup import choices, installed, layers, steps, whole, worlds
    from tools.checkup.trials import trials_section

    return {
        "This machine": lambda: installed.machine_section(device),
        "Packages": lambda: installed.packages_section(device),
        "What works: layers": lambda: trials_section("What works: layers", layers.trials(device), device),
        "What works: around them": lambda: trials_section("What works: around them", steps.trials(device), device),
        "What works: a model": lambda: trials_section("What works: a model", whole.trials(device), device),
        "What works: two processes": lambda: trials_section("What works: two processes", worlds.trials(device), device),
        "What flags take": lambda: choices.choices_section(device),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="what to look at; auto: CUDA where torch sees it")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the report to this file as well, without paths of the machine")
    arguments = parser.parse_args()
    if absent := [line for line in missing(requirements([])) if "(found" not in line]:
        print("\n".join(f"MISSING  {line}: python -m pip install '{line}'" for line in absent))
        print("nothing else can be tried without these")
        return 1
    # Only now: without torch there is nothing to import.
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
