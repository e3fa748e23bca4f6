"""The context verification's case in which all keys of a rank are hidden: ours, and the package's plan over a stand-in, in float64."""
import sys
from pathlib import Path
from unittest import mock

import torch

from megatron_dllm.context_parallel import transformer_engine as package
from megatron_dllm.parallel import Topology, create_context
from tests.parallel.test_context_parallel_package import as_documented

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from verification.hidden_keys import largest_error  # noqa: E402

CPU = torch.device("cpu")


def errors(rank, hidden):
    """Of ours, of the package."""
    cp = create_context(Topology(world=2, cp=2), rank=rank, device=CPU, sequence_parallel=False).cp
    with mock.patch.object(package, "attention", as_documented), mock.patch.object(package, "HIDDEN", hidden):
        return [largest_error(impl, cp, CPU, torch.float64, 8) for impl in ("local", "transformer_engine")]


def test_hidden_keys_count_for_nothing(world):
    for ours, theirs in world.run(errors, -1e4, size=2):
        assert ours <= 1e-12 and theirs <= 1e-12


def test_a_bias_that_does_not_hide_them_is_seen(world):
    for ours, theirs in world.run(errors, -1.0, size=2):
        assert ours <= 1e-12 and theirs > 1e-2
