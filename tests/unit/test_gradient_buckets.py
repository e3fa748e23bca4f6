"""Buckets on one process: what accumulates where, in which order sums begin, and what norm, zeros and the optimizer make of it."""
import copy
import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn

from megatron_dllm.config import OptimizerConfig
from megatron_dllm.data_parallel import GradientBuckets, GradientSums, finalize_gradients
from megatron_dllm.data_parallel.buckets import Bucket
from megatron_dllm.parallel import ParallelContext, place
from megatron_dllm.training.algorithms import sgd
from megatron_dllm.training.optimizer import MasterOptimizer

CONTEXT = ParallelContext.single()
SHAPES = {"embedding": (5, 3), "norm": (3,), "experts": (2, 3, 3), "head": (4, 3), "scale": (7,)}


class Parameters(nn.Module):
    """Parameters of several shapes and grids; `half` names those in bf16."""

    def __init__(self, half=(), dtype=torch.float64):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=draw, dtype=torch.float64)
            parameter = nn.Parameter(values.to(torch.bfloat16 if name in half else dtype))
            parameter.placement = place(shape, CONTEXT, grid="expert" if name == "experts" else "dense")
            setattr(self, name, parameter)

    def backward(self, names=SHAPES, factor=1.0):
        """Gradients: factor * cos of the parameter."""
        sum(torch.sin(getattr(self, name)).sum() * factor for name in names).backward()


def make_buckets(model, **options):
    return GradientBuckets(model.named_parameters(), CONTEXT, **options)


def test_parameters_are_dealt_from_last_to_first_by_grid_and_dtype():
    dealt = make_buckets(Parameters(half=("norm",)), bucket_elements=12).buckets
    assert [bucket.names for bucket in dealt] == [("scale", "head"), ("experts",), ("embedding",), ("norm",)]
    assert [bucket.gradients.dtype for bucket in dealt] == [torch.float64] * 3 + [torch.float32]
    assert [bucket.group.name for bucket in dealt] == ["dp_cp", "edp", "dp_cp", "dp_cp"]


def test_a_tied_parameter_has_a_bucket_of_its_own():
    """Beside others, which differ between the ranks that have it, its range in a distributed optimizer would differ too."""
    model = Parameters()
    model.embedding.placement = dataclasses.replace(model.embedding.placement, tied_to="embedding")
    assert [bucket.names for bucket in make_buckets(model).buckets] == [("scale", "head", "norm"), ("experts",), ("embedding",)]


def test_gradients_add_up_over_microbatches_in_fp32():
    model = Parameters(half=SHAPES)
    buckets = make_buckets(model)
    expected = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for factor in (1.0, 2**-9, 2**-9):  # what bf16 would lose beside 1
        model.backward(factor=factor)
        for name in SHAPES:
            expected[name] += (torch.cos(getattr(model, name).detach()) * factor)
    assert all(parameter.grad is None for parameter in model.parameters())
    in_bf16 = {name: expected[name].to(torch.bfloat16).float() for name in SHAPES}
    for piece in buckets.pieces():
        assert torch.equal(piece.gradient.view(SHAPES[piece.name]), expected[piece.name])
    assert any(not torch.equal(in_bf16[name], expected[name]) for name in SHAPES)


def test_wide_gradients_are_views_and_survive_being_dropped():
    model = Parameters()
    buckets = make_buckets(model)
    model.backward()
    total = buckets.buckets[0].gradients
    assert all(parameter.grad.untyped_storage().data_ptr() in {b.gradients.untyped_storage().data_ptr() for b in buckets.buckets}
               for parameter in model.parameters())
    once = total.clone()
    model.zero_grad()  # sets gradients to None, which must lose nothing
    model.backward()
    assert torch.allclose(total, 2 * once, rtol=1e-15)


def test_sums_begin_in_one_order_whatever_order_gradients_come_in(monkeypatch):
    begun = []
    start = Bucket.start_sum
    monkeypatch.setattr(Bucket, "start_sum", lambda bucket: (begun.append(bucket.names), start(bucket)))
    model = Parameters()
    buckets = make_buckets(model, bucket_elements=1)
    model.backward()  # not the last microbatch
    assert begun == []
    buckets.last_microbatch()
    model.backward(("embedding", "norm"))
    model.backward(("scale",))
    assert begun == [("scale",)]
    model.backward(("head",))
    assert begun == [("scale",), ("head",)]  # experts come next, and nothing has reached them
    buckets.finish()
    assert begun == [("scale",), ("head",), ("experts",), ("norm",), ("embedding",)]


def test_finish_needs_a_last_microbatch():
    with pytest.raises(AssertionError, match="last_microbatch"):
        make_buckets(Parameters()).finish()


@pytest.mark.parametrize("sharded", [False, True])
def test_released_buckets_are_freed_with_their_parameters(sharded):
    model = Parameters(half=("norm", "experts"))
    buckets = make_buckets(model, sharded=sharded)
    buckets.last_microbatch()
    model.backward()
    references = [weakref.ref(value) for value in (buckets, buckets.buckets[0].gradients, *model.parameters())]
    buckets.release()
    del model, buckets
    gc.collect()
    assert [reference() is None for reference in references] == [True] * len(references)


def test_norm_and_zeros_count_every_element_once():
    model = Parameters()
    buckets = make_buckets(model, bucket_elements=12)
    buckets.last_microbatch()
    model.backward(("embedding", "head"))
    finalize_gradients(buckets, CONTEXT)
    whole = torch.cat([torch.cos(model.embedding).flatten(), torch.cos(model.head).flatten()])
    sums = GradientSums(buckets.pieces(), CONTEXT)
    assert sums.norm().item() == pytest.approx(whole.norm().item(), rel=1e-14)
    assert sums.num_zeros() == 3 + 18 + 7


def test_the_norm_has_what_fp32_would_lose():
    model = Parameters(dtype=torch.float32)
    buckets = make_buckets(model)
    for piece, value in zip(buckets.pieces(), (1.0, 1e-4, 0.0, 0.0, 0.0, 0.0), strict=False):
        piece.gradient.zero_()[..., :1].fill_(value)
    assert GradientSums(buckets.pieces(), CONTEXT).norm().item() == pytest.approx(1 + 5e-9, rel=1e-10)


def test_norm_of_a_rank_without_parameters_is_on_its_device():
    sums = GradientSums([], dataclasses.replace(CONTEXT, device=torch.device("meta")))
    assert sums.norm().device.type == "meta"


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.5, 64.0])
def test_step_is_torch_adamw_on_the_whole(distributed, clip):
    model = Parameters()
    plain = copy.deepcopy(model)
    config = OptimizerConfig(lr=0.1, weight_decay=0.3, clip_grad=clip)
    ours = MasterOptimizer(model, config, CONTEXT, distributed=distributed, bucket_elements=12)
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    theirs = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}], lr=0.1, eps=config.adam_eps)
    for step in range(3):
        names = SHAPES if step else ("embedding", "norm", "head", "scale")  # experts without a gradient still decay
        ours.buckets.last_microbatch()
        model.backward(names)
        plain.backward(names)
        ours.finish_gradients()
        norm = ours.grad_norm()
        for parameter in plain.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        their_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or float("inf"))
        assert norm.item() == pytest.approx(their_norm.item(), rel=1e-14)
        ours.step(0.1, norm)
        theirs.step()
        theirs.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, getattr(plain, name), rtol=1e-13, atol=1e-15), name
    assert dict(ours.masters()).keys() == set(SHAPES) and ours.num_steps == 3


@pytest.mark.parametrize(("clip", "clips"), [(0.5, True), (64.0, False), (0.0, False)], ids=["norm above", "norm below", "off"])
def test_clipping_shrinks_a_gradient_and_never_enlarges_one(clip, clips):
    model = Parameters()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = OptimizerConfig(clip_grad=clip, weight_decay=0.0)
    optimizer = MasterOptimizer(model, config, CONTEXT, algorithm=sgd)  # which shows a gradient's size
    optimizer.buckets.last_microbatch()
    model.backward()
    optimizer.finish_gradients()
    norm = optimizer.grad_norm()
    assert 0.5 < norm < 64.0
    optimizer.step(0.1, norm)
    factor = clip / norm.item() if clips else 1.0
    for name, parameter in model.named_parameters():
        assert torch.allclose(before[name] - parameter, 0.1 * factor * torch.cos(before[name]), rtol=1e-6, atol=0), name


def test_copies_follow_their_fp32_masters():
    model = Parameters(half=SHAPES)
    before = {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
    optimizer = MasterOptimizer(model, OptimizerConfig(clip_grad=0.0), CONTEXT, algorithm=sgd)
    for _ in range(4):  # each step is too small for bf16 to see
        optimizer.buckets.last_microbatch()
        model.backward()
        optimizer.finish_gradients()
        optimizer.step(2**-10, optimizer.grad_norm())
    masters = dict(optimizer.masters())
    for name, parameter in model.named_parameters():
        assert masters[name].dtype == torch.float32 and torch.equal(masters[name].to(torch.bfloat16), parameter.detach())
        assert not torch.equal(masters[name], before[name])


def test_a_module_waits_for_its_own_parameters_and_those_of_the_next(monkeypatch):
    """A layer may read the norm of the one after it."""
    model = Parameters()
    buckets = make_buckets(model, bucket_elements=1)
    modules = [nn.Module() for _ in range(3)]
    for module, name in zip(modules, ("embedding", "experts", "head"), strict=True):
        module.register_parameter(name, getattr(model, name))
        module.forward = lambda: None
    buckets.gather_beside_forward(iter(modules))
    waited = []
    monkeypatch.setattr(Bucket, "finish_gather", lambda bucket: waited.append(bucket.names))
    for module, names in zip(modules, ({"embedding", "experts"}, {"experts", "head"}, {"head"}), strict=True):
        waited.clear()
        module()
        assert {name for each in waited for name in each} == names


def test_a_bucket_with_a_parameter_of_no_module_is_waited_for_at_once(monkeypatch):
    model = Parameters()
    buckets, module, waited = make_buckets(model, bucket_elements=22), nn.Module(), []
    module.register_parameter("head", model.head)
    module.register_parameter("experts", model.experts)
    buckets.gather_beside_forward([module])
    monkeypatch.setattr(Bucket, "finish_gather", lambda bucket: waited.append(bucket.names))
    buckets.gather_parameters()
    assert waited == [("scale", "head", "norm"), ("embedding",)]


@pytest.mark.parametrize("change", [{}, {"partial_over_tp": True}, {"copies": 2}, {"tied_to": "scale"}], ids=str)
def test_squares_that_kernels_sum_up_are_of_gradients_that_are_whole(change):
    """What another rank adds later is not in them."""
    model = Parameters(half=("scale",))
    model.scale.placement = dataclasses.replace(model.scale.placement, **change)
    piece, = (piece for piece in make_buckets(model).pieces() if piece.name == "scale")
    assert (piece.main_gradient is None) == bool(change)
