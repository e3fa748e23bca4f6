"""The profiler's window and what it leaves behind."""
from __future__ import annotations

import json

import pytest
import torch

from megatron_dllm.config import TrainingConfig
from megatron_dllm.training.profiling import StepProfiler

CPU = torch.device("cpu")


def run_steps(folder, *, first: int, steps: int, **flags) -> None:
    with StepProfiler(TrainingConfig(**flags), folder, rank=2, device=CPU) as profiler:
        for step in range(first, first + steps):
            profiler.before_step(step)
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(3) + step


# First step of the run and how many it takes -> the steps in the trace of steps 3 and 4.
WINDOWS = {"whole": (0, 8, {3, 4}), "resumed within": (4, 4, {4}), "stopped within": (0, 4, {3})}


@pytest.mark.parametrize("case", WINDOWS)
def test_step_profiler_window(tmp_path, case):
    first, steps, traced = WINDOWS[case]
    run_steps(tmp_path / "profile", first=first, steps=steps, profile=True, profile_step_start=3, profile_step_end=5)
    names = {event.get("name") for event in json.loads((tmp_path / "profile/steps_3-4_rank_2.json").read_text())["traceEvents"]}
    assert {step for step in range(10) if f"step {step}" in names} == traced
    assert "aten::add" in names


@pytest.mark.parametrize("flags", [{}, {"profile": True, "profile_step_start": 50, "profile_step_end": 60}], ids=["off", "never reached"])
def test_step_profiler_leaves_nothing(tmp_path, flags):
    run_steps(tmp_path, first=0, steps=5, **flags)
    assert list(tmp_path.iterdir()) == []


def test_step_profiler_keeps_the_trace_of_a_run_that_fails(tmp_path):
    with pytest.raises(RuntimeError, match="boom"):
        with StepProfiler(TrainingConfig(profile=True, profile_step_start=0), tmp_path, rank=0, device=CPU) as profiler:
            profiler.before_step(0)
            raise RuntimeError("boom")
    assert [path.name for path in tmp_path.iterdir()] == ["steps_0-11_rank_0.json"]


# Flags that are wrong together, words of the message, the remedy it names.
WRONG = {
    "empty window": (
        {"profile": True, "profile_step_start": 5, "profile_step_end": 5}, "set --profile-step-end to 6", {"profile_step_end": 6}),
    "snapshot on a CPU": ({"memory_snapshot_path": "m.pickle"}, "leave the flag out, or use --profile", {"memory_snapshot_path": None}),
}


@pytest.mark.parametrize("case", WRONG)
def test_step_profiler_refuses(tmp_path, case):
    wrong, message, remedy = WRONG[case]
    with pytest.raises(ValueError, match=message):
        StepProfiler(TrainingConfig(**wrong), tmp_path, rank=0, device=CPU)
    StepProfiler(TrainingConfig(**wrong | remedy), tmp_path, rank=0, device=CPU)


def test_step_profiler_needs_a_directory(tmp_path):
    with pytest.raises(ValueError, match="set --run-dir or --save"):
        StepProfiler(TrainingConfig(profile=True), None, rank=0, device=CPU)
    StepProfiler(TrainingConfig(), None, rank=0, device=CPU)


@pytest.mark.gpu
def test_step_profiler_memory_snapshot(tmp_path):
    config = TrainingConfig(memory_snapshot_path=str(tmp_path / "new/m.pickle"))
    with StepProfiler(config, None, rank=1, device=torch.device("cuda")):
        torch.ones(100, device="cuda")
    assert (tmp_path / "new/m.rank_1.pickle").stat().st_size > 0
