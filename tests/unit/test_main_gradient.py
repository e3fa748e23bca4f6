"""Experts whose kernels add their weights' gradients to the buckets, beside those that autograd hands over."""

import dataclasses
import gc
import weakref

import pytest
import torch

from megatron_dllm.config import PRESETS, ObjectiveConfig
from megatron_dllm.data_parallel import GradientBuckets, GradientSums
from megatron_dllm.moe.experts import Experts
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel.initialization import Initializer
from tests.unit.kernel_cases import DEVICES, draw, need_kernels
from tests.unit.toy import toy_inputs, toy_model, toy_plan

HIDDEN, INNER, NUM_EXPERTS = 16, 8, 3
USES = {"one": [(2, 0, 3)], "both loops": [(2, 0, 3), (0, 0, 4)], "one without rows": [(2, 1, 1), (0, 0, 0)]}


def experts_alone(device, *, by_kernels):
    """Experts in bf16, without buckets."""
    config = dataclasses.replace(PRESETS["toy"], hidden_size=HIDDEN, moe_ffn_hidden_size=INNER, num_experts=NUM_EXPERTS)
    context = ParallelContext.single(device)
    experts = Experts("experts", config, context=context, init=Initializer(0, 0.2), dtype=torch.bfloat16)
    experts.by_kernels = by_kernels
    return experts


def experts_of(device, *, by_kernels):
    """(experts, their buckets)"""
    experts = experts_alone(device, by_kernels=by_kernels)
    return experts, GradientBuckets(experts.named_parameters(), ParallelContext.single(device))


def run(experts, uses, factor):
    """Gradients of the rows, after a backward through all uses at once."""
    rows = [draw(sum(counts), HIDDEN, dtype=torch.bfloat16, device=experts.down.device) for counts in uses]
    results = [experts(x, torch.tensor(counts, device=x.device)) for x, counts in zip(rows, uses, strict=True)]
    (torch.cat(results).float().square().sum() * factor).backward()
    return [x.grad for x in rows]


@DEVICES
@pytest.mark.parametrize("uses", USES.values(), ids=USES)
def test_kernels_fill_the_buckets(uses, device):
    need_kernels(device)
    (fast, ours), (plain, wanted) = (experts_of(device, by_kernels=by_kernels) for by_kernels in (True, False))
    run(fast, uses, 1.0)
    for buckets in (ours, wanted):
        buckets.zero()
    for factor in (1.0, 0.5):  # two microbatches
        for got, want in zip(run(fast, uses, factor), run(plain, uses, factor), strict=True):
            assert torch.allclose(got.float(), want.float(), rtol=0, atol=2**-6 * float(want.abs().max()) if want.numel() else 0)
    assert fast.down.grad is None and fast.gate_up.grad is None
    for ours_piece, piece in zip(ours.pieces(), wanted.pieces(), strict=True):
        assert piece.gradient.any()
        squares = ours_piece.main_gradient.squares.double().sum().item()
        assert squares == pytest.approx(ours_piece.gradient.double().square().sum().item(), rel=1e-6)
        assert piece.main_gradient.squares is None, "autograd has added to it"
        # The plain path rounds the gradient of every backward to bf16, and sums of uses as well.
        assert (ours_piece.gradient - piece.gradient).abs().max() <= 2**-6 * piece.gradient.abs().max()


@DEVICES
def test_a_bucket_is_complete_after_the_last_use(device):
    need_kernels(device)
    experts, buckets = experts_of(device, by_kernels=True)
    buckets.last_microbatch()
    assert [bucket.missing for bucket in buckets.buckets] == [2]
    run(experts, USES["both loops"], 1.0)
    assert [bucket.missing for bucket in buckets.buckets] == [0]
    buckets.finish()


@DEVICES
def test_what_a_failed_backward_leaves_is_dropped_with_the_gradients(device):
    need_kernels(device)
    experts, buckets = experts_of(device, by_kernels=True)

    def stop(_):
        raise RuntimeError("stop")

    counts = torch.tensor((2, 0, 3), device=device)
    first = experts(draw(5, HIDDEN, dtype=torch.bfloat16, device=device), counts)
    first.register_hook(stop)
    # The second use's backward comes first and puts its part off; that of the first never comes.
    y = experts(first, counts)
    with pytest.raises(RuntimeError, match="stop"):
        y.float().sum().backward()
    buckets.zero()
    run(experts, USES["one"], 1.0)
    fresh, clean = experts_of(device, by_kernels=True)
    run(fresh, USES["one"], 1.0)
    assert all(torch.equal(a.gradient, b.gradient) for a, b in zip(buckets.pieces(), clean.pieces(), strict=True))


@DEVICES
def test_a_gradient_that_nothing_reaches_is_zero(device):
    need_kernels(device)
    experts, buckets = experts_of(device, by_kernels=True)
    for uses in ([], USES["one without rows"][1:]):
        run(experts, USES["one"], 1.0)
        buckets.zero()
        buckets.last_microbatch()
        assert all(piece.gradient.any() for piece in buckets.pieces()), "what the last step has left, which counts as zeros"
        if uses:
            run(experts, uses, 1.0)
        buckets.finish()
        assert not any(piece.gradient.any() or piece.main_gradient.squares.any() for piece in buckets.pieces())


@DEVICES
def test_norm_without_reading(device):
    need_kernels(device)
    experts, buckets = experts_of(device, by_kernels=True)
    sums = GradientSums(buckets.pieces(), ParallelContext.single(device))

    def both():
        wanted = torch.cat([piece.gradient for piece in buckets.pieces()]).double().norm().item()
        return sums.norm().item(), pytest.approx(wanted, rel=1e-6)

    for factor in (1.0, 0.5):
        buckets.zero()
        for uses in (USES["one"], USES["one without rows"]):
            run(experts, uses, factor)
        buckets.last_microbatch()
        buckets.finish()
        norm, wanted = both()
        assert norm == wanted and norm > 0
        buckets.scale(torch.tensor(0.3, device=device))
        norm, wanted = both()
        assert norm == wanted
    next(buckets.pieces()).gradient.mul_(2)
    norm, wanted = both()
    assert norm != wanted, "these gradients are not read"
    experts.by_kernels = False
    run(experts, USES["one"], 1.0)
    norm, wanted = both()
    assert norm == wanted, "once autograd has added to them they are"


@DEVICES
def test_autograd_adds_to_what_counts_as_zeros(device):
    need_kernels(device)
    experts, buckets = experts_of(device, by_kernels=True)
    run(experts, USES["one"], 1.0)
    buckets.zero()
    experts.by_kernels = False
    run(experts, USES["one"], 1.0)
    plain, wanted = experts_of(device, by_kernels=False)
    run(plain, USES["one"], 1.0)
    assert all(torch.equal(a.gradient, b.gradient) for a, b in zip(buckets.pieces(), wanted.pieces(), strict=True))


@DEVICES
def test_without_buckets_autograd_gets_one_sum(device):
    need_kernels(device)
    fast, plain = (experts_alone(device, by_kernels=by_kernels) for by_kernels in (True, False))
    for uses in USES.values():
        rows = [draw(sum(counts), HIDDEN, dtype=torch.bfloat16, device=device, grad=False) for counts in uses]

        def loss(experts, rows=rows, uses=uses):
            results = [experts(x, torch.tensor(counts, device=x.device)) for x, counts in zip(rows, uses, strict=True)]
            return torch.cat(results).float().square().sum()

        wanted = torch.autograd.grad(loss(plain), list(plain.parameters()))
        first, second = loss(fast), loss(fast)  # two forwards before either backward
        for total in (second, first, loss(fast)):
            for ours, want in zip(torch.autograd.grad(total, list(fast.parameters())), wanted, strict=True):
                assert (ours - want).abs().max() <= 2**-6 * want.abs().max()
    with torch.no_grad():
        assert not loss(fast).requires_grad
    fast.requires_grad_(False)
    assert not loss(fast).requires_grad


def test_experts_are_freed_after_a_forward_without_a_backward():
    need_kernels("cpu")
    experts = experts_alone("cpu", by_kernels=True)
    reference = weakref.ref(experts)
    experts(draw(5, HIDDEN, dtype=torch.bfloat16, device="cpu", grad=False), torch.tensor((2, 0, 3)))
    del experts
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("null", ["zero", "uniform"])
def test_an_embedding_that_a_uniform_signal_reads_completes_its_gradient_once(null):
    """In 16 bits, where the uses of the weight that share a sum add to the buffer by themselves, and this one does not share it: counted
    twice, the bucket would be summed over ranks before all of its gradients are there."""
    objective = ObjectiveConfig(self_conditioning_null=null)
    model = toy_model(torch.bfloat16)
    buckets = GradientBuckets(model.named_parameters(), ParallelContext.single())
    buckets.last_microbatch()
    model(toy_inputs(toy_plan(objective), objective=objective, dtype=torch.float32)).total.backward()
    assert all(bucket.missing == 0 for bucket in buckets.buckets)
