"""A torch profiler trace of some steps, and a CUDA memory snapshot, by flag."""
from __future__ import annotations

from pathlib import Path

import torch

from ..config import TrainingConfig

SNAPSHOT_EVENTS = 200_000  # allocations and frees that are kept: some steps of a large model, tens of MiB of file


class StepProfiler:
    """Profiles the steps --profile-step-start up to, but not including, --profile-step-end, and takes the memory snapshot.

    Steps count from 0 over the whole run, as in Megatron-LM. With --profile, rank r's trace is written to
    <folder>/steps_10-11_rank_r.json, for chrome://tracing or ui.perfetto.dev. With --memory-snapshot-path, the allocations from entering
    on are written to that file (with .rank_r before its suffix, on all ranks but 0) on leaving, an out-of-memory error included; read it at
    https://docs.pytorch.org/memory_viz.

        with StepProfiler(config, folder, rank=0, device=device) as profiler:
            for step in ...:
                profiler.before_step(step)
    """

    def __init__(self, config: TrainingConfig, folder: Path | None, *, rank: int, device: torch.device):
        if config.memory_snapshot_path and device.type != "cuda":
            raise ValueError(
                f"--memory-snapshot-path {config.memory_snapshot_path}: memory snapshots are of CUDA memory and the device is {device}; "
                "leave the flag out, or use --profile, whose trace holds CPU allocations")
        if config.profile and not 0 <= config.profile_step_start < config.profile_step_end:
            raise ValueError(
                f"--profile-step-start {config.profile_step_start}, --profile-step-end {config.profile_step_end}: no step lies between "
                f"them; set --profile-step-end to {max(config.profile_step_start, 0) + 1} or more")
        if config.profile and folder is None:
            raise ValueError("--profile writes its trace to the run's directory, and this run has none; set --run-dir or --save")
        self._start = config.profile_step_start if config.profile else None
        self._end = config.profile_step_end
        self._trace = folder / f"steps_{self._start}-{self._end - 1}_rank_{rank}.json" if config.profile else None
        self._snapshot = _of_rank(Path(config.memory_snapshot_path), rank) if config.memory_snapshot_path else None
        self._device = device
        self._profile: torch.profiler.profile | None = None

    def __enter__(self) -> StepProfiler:
        if self._snapshot is not None:
            self._snapshot.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
        return self

    def __exit__(self, *error: object) -> None:
        self._finish_trace()
        if self._snapshot is not None:
            torch.cuda.memory._dump_snapshot(str(self._snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)

    def before_step(self, step: int) -> None:
        """Start or end the trace; call it before every step, with the number of steps done so far."""
        if self._start is None:
            return
        if step >= self._end:
            self._finish_trace()
        elif step >= self._start and self._profile is None:  # a resumed run may begin between the two
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)
            self._profile.start()

    def _finish_trace(self) -> None:
        """Write the trace of the steps profiled so far, if any: a run that ends early keeps what it has."""
        if self._profile is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels of the last step are still running
        self._profile.stop()
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._trace))
        self._profile = None


def _of_rank(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.stem}.rank_{rank}{path.suffix}")
