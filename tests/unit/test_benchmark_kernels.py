"""benchmarking.kernels at toy sizes, interpreted: every check holds, every case gives a line, a failure costs only itself."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from benchmarking import kernels, kernels_streams  # noqa: E402
from benchmarking.kernel_cases import Case, Sizes, Way, compare  # noqa: E402

from tests.unit.kernel_cases import need_kernels  # noqa: E402


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    return parser.parse_args(["--repeats", "1", *flags])


@pytest.mark.parametrize("group", kernels.GROUPS)
def test_toy_sizes(group, capsys):
    need_kernels("cpu")
    assert kernels.run_on(torch.device("cpu"), arguments("--only", group, "--limit", "1000"), Sizes.toy()) == 0
    printed = capsys.readouterr().out
    assert "MISSED" not in printed and "FAILED" not in printed and printed.count("ok    ") >= 2
    assert len(printed.partition("piece, bf16")[2].splitlines()) == 1 + {"attention": 3, "experts": 2, "mHC": 2}[group]


@pytest.mark.slow
def test_a_failure_and_an_aim_that_is_missed(capsys, monkeypatch):
    def fails() -> dict:
        raise RuntimeError("no such kernel")

    slow = Way(lambda: None, lambda: sum(range(10**5)))
    monkeypatch.setattr(kernels_streams, "checks", lambda sizes, device: iter([compare("off", *(torch.ones(2, dtype=torch.float64) * x
                                                                                              for x in (2, 1, 1)))]))
    monkeypatch.setattr(kernels_streams, "cases", lambda sizes, device: iter([Case("broken", fails), Case("slow", lambda: {"ours": slow},
                                                                                                          aim=1e-9)]))
    assert kernels.run_on(torch.device("cpu"), arguments("--only", "mHC"), Sizes.toy()) == 3
    printed = capsys.readouterr().out
    assert "MISSED mHC: off" in printed and "FAILED broken: RuntimeError: no such kernel" in printed and " missed" in printed
