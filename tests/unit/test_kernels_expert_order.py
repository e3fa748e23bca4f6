"""kernels.expert_order: the order of a stable sort, bit for bit."""

import pytest
import torch

from megatron_dllm.moe.permute import sort_by_expert, sort_by_local_expert
from tests.unit.kernel_cases import DEVICES, need_kernels

CASES = pytest.mark.parametrize("num_tokens, choices, num_experts", [(0, 2, 3), (1, 1, 1), (17, 3, 5), (1025, 2, 17), (300, 8, 9)])


def drawn(num_tokens, choices, num_experts):
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(1))
    scores[:, 0] += scores[:, 0] > 0.3  # an expert with much, and of 128 some with little
    return scores.argsort(1, descending=True)[:, :choices]


@DEVICES
@CASES
def test_all_choices(num_tokens, choices, num_experts, device):
    need_kernels(device)
    from megatron_dllm.kernels.expert_order import expert_order

    indices = drawn(num_tokens, min(choices, num_experts), num_experts)
    expected = sort_by_expert(indices, num_experts)
    for got, wanted in zip(expert_order(indices.to(device), num_experts), (expected.slot, expected.row, expected.counts), strict=True):
        assert torch.equal(got.cpu(), wanted)


@DEVICES
@CASES
@pytest.mark.parametrize("room", ["exact", "some more", "all"])
def test_choices_of_some_experts(num_tokens, choices, num_experts, room, device):
    need_kernels(device)
    from megatron_dllm.kernels.expert_order import expert_order

    local = drawn(num_tokens, min(choices, num_experts), num_experts) - num_experts // 3
    num_local = num_experts - 2 * (num_experts // 3)
    local = torch.where((local >= 0) & (local < num_local), local, -1)
    here = int((local >= 0).sum())
    num_rows = {"exact": here, "some more": (here + local.numel()) // 2, "all": local.numel()}[room]
    expected = sort_by_local_expert(local, num_local, num_rows)
    # Not contiguous, as a slice may be.
    wider = torch.cat([local, local], 1).to(device)[:, :local.shape[1]]
    for got, wanted in zip(expert_order(wider, num_local, num_rows), (expected.slot, expected.row, expected.counts), strict=True):
        assert torch.equal(got.cpu(), wanted)
