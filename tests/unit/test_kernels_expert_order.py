"""kernels.expert_order: the order of a stable sort, bit for bit."""

import pytest
import torch

from megatron_dllm.moe.permute import sort_by_expert, sort_by_local_expert
from tests.unit.kernel_cases import DEVICES, need_kernels

LAUNCHES = pytest.mark.parametrize("launches", [1, 3])
CASES = pytest.mark.parametrize("num_tokens, choices, num_experts", [(0, 2, 3), (1, 1, 1), (17, 3, 5), (1025, 2, 17), (300, 8, 9)])


def drawn(num_tokens, choices, num_experts):
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(1))
    scores[:, 0] += scores[:, 0] > 0.3  # an expert with much, and of 128 some with little
    return scores.argsort(1, descending=True)[:, :choices]


def few_or_many(launches, monkeypatch):
    from megatron_dllm.kernels import expert_order

    monkeypatch.setattr(expert_order, "MOST_CHOICES", 2**20 if launches == 1 else 0)
    return expert_order.expert_order


@DEVICES
@LAUNCHES
@CASES
def test_all_choices(num_tokens, choices, num_experts, launches, device, monkeypatch):
    need_kernels(device)
    expert_order = few_or_many(launches, monkeypatch)
    indices = drawn(num_tokens, min(choices, num_experts), num_experts)
    expected = sort_by_expert(indices, num_experts)
    for got, wanted in zip(expert_order(indices.to(device), num_experts), (expected.slot, expected.row, expected.counts), strict=True):
        assert torch.equal(got.cpu(), wanted)


@DEVICES
@LAUNCHES
@CASES
@pytest.mark.parametrize("room", ["exact", "some more", "all"])
def test_choices_of_some_experts(num_tokens, choices, num_experts, room, launches, device, monkeypatch):
    need_kernels(device)
    expert_order = few_or_many(launches, monkeypatch)
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


@DEVICES
@LAUNCHES
def test_several_layers(launches, device, monkeypatch):
    need_kernels(device)
    expert_order = few_or_many(launches, monkeypatch)
    layers = [drawn(77, 3, 9).roll(number, 0).sub(number) for number in range(3)]  # an odd number of choices, and negative ones
    for num_rows in (None, 77 * 3 - 5):
        wanted = [expert_order(layer.clamp(min=0 if num_rows is None else -1).to(device), 9, num_rows) for layer in layers]
        found = expert_order(torch.stack(layers).clamp(min=0 if num_rows is None else -1).to(device), 9, num_rows)
        for got, parts in zip(found, zip(*wanted, strict=True), strict=True):
            assert torch.equal(got, torch.stack(parts))


@DEVICES
@CASES
def test_count_choices(num_tokens, choices, num_experts, device):
    need_kernels(device)
    from megatron_dllm.kernels.expert_order import count_choices

    indices = drawn(num_tokens, min(choices, num_experts), num_experts)
    counts = count_choices(indices.to(device), num_experts)
    assert counts.dtype == torch.int64 and torch.equal(counts.cpu(), indices.flatten().bincount(minlength=num_experts))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1280, 5120, 40000])
def test_the_models_choices(num_tokens):
    indices = drawn(num_tokens, 8, 128)
    expected, got = sort_by_expert(indices, 128), sort_by_expert(indices.cuda(), 128)
    assert torch.equal(got.slot.cpu(), expected.slot) and torch.equal(got.row.cpu(), expected.row)
    assert torch.equal(got.counts.cpu(), expected.counts)
