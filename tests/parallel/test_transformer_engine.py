"""Layouts whose layers a stand-in for Transformer Engine computes, against one process whose layers are our own, in bf16."""
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from verification.layout_bf16 import compare_low, low_trace  # noqa: E402
from verification.layout_cases import LAYOUTS, Case  # noqa: E402
from verification.layout_compare import layout_context, run_case  # noqa: E402
from verification.layout_training import reference_trace  # noqa: E402

from megatron_dllm.models.diffusion_gemma import build  # noqa: E402
from megatron_dllm.parallel import Topology, create_context  # noqa: E402
from megatron_dllm.transformer_engine import Engine  # noqa: E402
from tests.unit.fake_transformer_engine import Linear, install_fake  # noqa: E402

CPU = torch.device("cpu")
NAMES = ("tp2", "tp2+sp")


def outcomes(rank):
    """Of each layout: the outcome, and how many products the stand-in's Linear has made."""
    base = create_context(Topology(world=2), rank=rank, device=CPU, sequence_parallel=False)
    layouts = {layout.name: replace(layout, transformer_impl="transformer_engine") for layout in LAYOUTS if layout.name in NAMES}
    cases = [Case(layouts[name], "ar", "unequal", 1, "selective").for_bf16 for name in NAMES]
    trace = low_trace(cases[0], reference_trace(cases[0], 1, CPU, with_fp32=False), CPU)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_engine", lambda *_: engine)
        engine = Engine(install_fake(patch), grouped=True)
        for case in cases:
            with mock.patch.object(Linear, "forward", autospec=True, side_effect=Linear.forward) as forward:
                found[case.layout.name] = run_case(case, trace, layout_context(case.layout, base), compare_low, ""), forward.call_count
    return found


def test_layouts_hold(world):
    for found in world.run(outcomes, size=2, timeout=300):
        for outcome, products in found.values():
            assert outcome.missed() == [] and outcome.explanations == () and products > 0
