"""benchmarking.training: both sides compute one loss from one memory, and a row says when they do not."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from benchmarking.peers import TransformersStep, transformers_model  # noqa: E402
from benchmarking.training import Line, Row, agree_in_fp32  # noqa: E402
from benchmarking.workload import DeviceNormal, Timing, synthetic, toy_width  # noqa: E402

from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma  # noqa: E402
from megatron_dllm.parallel import ParallelContext  # noqa: E402

CPU = torch.device("cpu")
CONFIG = toy_width(["sliding", "full"])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the names of transformers 5.17, which the GPU machines have
def test_both_sides_share_weights_and_loss():
    assert agree_in_fp32(CONFIG, CPU)
    model = DiffusionGemma(CONFIG, context=ParallelContext.single(), init=DeviceNormal(CPU))
    workload = synthetic(CONFIG, 2, 64, CPU)
    step = TransformersStep(transformers_model(model), CONFIG, workload)
    before = step()
    with torch.no_grad():
        model.final_norm.weight.mul_(3)
    after = step()
    assert abs(after - before) > 1e-3
    assert after == pytest.approx(model(workload.inputs).total.item(), rel=1e-5)


def test_a_row_counts_only_where_losses_agree():
    row = Row("x", 1, 64, 2.0)

    def line(loss: float, ms: float) -> Line:
        ours, theirs = Timing(10.0, 9.0, 11.0, 0.0, 12.5), Timing(ms, ms, ms, 0.0, loss)
        return Line(row, ours, torch.float32, 0.5, "float32", "transformers", theirs, 2.0)

    assert line(12.5, 20.0).holds and not line(12.5, 19.0).holds
    assert not line(12.51, 30.0).holds and "losses differ" in line(12.51, 30.0).text()
