"""A layout in bf16 against one process, as the layouts suite compares them: it holds, and a sum left out is found."""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from verification.layout_bf16 import compare_low, low_trace  # noqa: E402
from verification.layout_cases import LAYOUTS, Case  # noqa: E402
from verification.layout_compare import FAULTS, layout_context, run_case  # noqa: E402
from verification.layout_training import reference_trace  # noqa: E402

from megatron_dllm.parallel import Topology, create_context  # noqa: E402

CPU = torch.device("cpu")
FAULT = "one bucket is not summed over dp_cp"


def outcomes(rank):
    """Of a case, without and with the fault; both ranks compute the reference, which is the same on both."""
    case = Case(LAYOUTS[0], "ar", "one supervised", 1, "none").for_bf16
    base = create_context(Topology(world=2), rank=rank, device=CPU, sequence_parallel=False)
    trace = low_trace(case, reference_trace(case, 1, CPU, with_fp32=False), CPU)
    context = layout_context(case.layout, base)
    return [run_case(case, trace, context, compare_low, fault) for fault in ("", FAULT)]


@pytest.mark.slow
def test_dp2_in_bf16_holds_and_a_sum_left_out_is_found(world):
    assert FAULTS[FAULT][0] == LAYOUTS[0].name == "dp2"
    for held, faulty in world.run(outcomes, size=2, timeout=300):
        assert held.missed() == [] and 0 < held.own_error < 0.1 and held.explanations == ()
        assert 0.2 < held.gradient < 2 and held.tensor.value < 2 and held.sent_bytes.keys() == {"all_reduce"}
        assert {"gradient", "gradient of a tensor", "masters after SGD"} <= set(faulty.missed())
        # All that is scored stands on one rank, whose share is the whole sum: the other one has nothing.
        off = {text.partition(",")[0] for text in faulty.explanations if "final_norm.weight" in text}
        assert len(off) == 1 and off < {"final_norm.weight [32]: rank 0 (dp 0)", "final_norm.weight [32]: rank 1 (dp 1)"}
