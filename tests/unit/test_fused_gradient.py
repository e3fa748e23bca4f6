"""--gradient-accumulation-fusion: linear layers add their weights' gradients to the fp32 buffers, unrounded, by torch or by apex."""
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from megatron_dllm.data_parallel import GradientBuckets
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import ColumnParallelLinear, Initializer, RowParallelLinear, column_layers
from megatron_dllm.tensor_parallel.fused_gradient import APEX, WeightGradients, fuse_gradients, weight_gradients
from tests.unit.toy import toy_inputs, toy_model, toy_plan

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOKENS, HIDDEN, INNER = 40, 16, 24


def layers():
    shared = {"context": ParallelContext.single(), "init": Initializer(0, 0.3), "dtype": torch.bfloat16}
    return torch.nn.ModuleList([ColumnParallelLinear("gate_up", (2, INNER, HIDDEN), **shared),
                                RowParallelLinear("down", (HIDDEN, INNER), **shared)])


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def gradients_of(model, uses=((TOKENS, 1.0), (TOKENS, 1 / 64), (0, 1.0)), microbatches=2):
    """What is in the buckets by name after backwards through several uses, and the last input's gradient; more uses than one rounding."""
    buckets = GradientBuckets(model.named_parameters(), ParallelContext.single())
    for number in range(microbatches):
        if number == microbatches - 1:
            buckets.last_microbatch()
        outputs, x = [], None
        for seed, (rows, scale) in enumerate(uses):
            x = numbers(rows, HIDDEN, seed=seed).requires_grad_()
            (gate_up,) = column_layers(x, model[:1])
            outputs.append(model[1]((gate_up[:, 0] * gate_up[:, 1]).contiguous()).float().square().sum() * scale)
        sum(outputs).backward()
    assert [bucket.missing for bucket in buckets.buckets] == [0]
    buckets.finish()
    found = {name: bucket.gradient(i).clone() for bucket in buckets.buckets for i, name in enumerate(bucket.names)}
    buckets.zero()
    assert not any(bucket.gradients.any() for bucket in buckets.buckets)
    buckets.release()
    return found


def test_gradients_are_not_rounded_on_the_way():
    """One microbatch of one use: the product itself; of several: what autograd gives, but for its rounding."""
    plain, fused = layers(), layers()
    fuse_gradients(fused, weight_gradients(CPU))
    once = {"uses": ((TOKENS, 1.0),), "microbatches": 1}
    for (name, rounded), exact in zip(gradients_of(plain, **once).items(), gradients_of(fused, **once).values(), strict=True):
        assert torch.equal(rounded, exact.bfloat16().float()) and not torch.equal(rounded, exact), name
    for (name, rounded), exact in zip(gradients_of(plain).items(), gradients_of(fused).values(), strict=True):
        assert (rounded - exact).abs().max() <= 2**-7 * exact.abs().max(), name


def test_a_model_gives_the_same_losses_and_gradients():
    plan, found = toy_plan(), []
    for fuse in (False, True):
        model = toy_model(torch.bfloat16)
        if fuse:
            fuse_gradients(model, weight_gradients(CPU))
        buckets = GradientBuckets(model.named_parameters(), model.context)
        buckets.last_microbatch()
        total = model(toy_inputs(plan, dtype=torch.float32)).total
        total.backward()
        buckets.finish()
        found.append((total.item(), torch.cat([bucket.gradients for bucket in buckets.buckets]).double()))
        buckets.release()
    (loss, plain), (fused_loss, fused) = found
    assert loss == fused_loss and not torch.equal(plain, fused)
    assert (plain - fused).norm() <= 2**-7 * plain.norm()


def test_without_buffers_or_gradients_nothing_changes():
    model, x = layers(), numbers(3, INNER)
    fuse_gradients(model, WeightGradients(None, "none that may be called"))
    y = model[1](x)
    (grad,) = torch.autograd.grad(y.sum(), model[1].weight)
    assert torch.equal(grad, torch.ones_like(y).t() @ x)
    buckets = GradientBuckets(model.named_parameters(), ParallelContext.single())
    with torch.no_grad():
        assert torch.equal(model[1](x), y) and not model[1](x).requires_grad
    buckets.release()


def test_frozen_layers_are_left_alone():
    model = layers()
    model[0].weight.requires_grad_(False)
    fuse_gradients(model, weight_gradients(CPU))
    assert model[0].product is torch.nn.functional.linear and model[1].product is not torch.nn.functional.linear


class TestApex:
    @pytest.fixture
    def package(self, monkeypatch):
        """Its function, with its demands: contiguous, bf16, and rows there are."""
        module = ModuleType(APEX)
        module.__spec__ = ModuleSpec(APEX, None)

        def wgrad_gemm_accum_fp32(x, dy, total):
            assert x.is_contiguous() and dy.is_contiguous() and total.is_contiguous() and len(x) == len(dy) > 0
            assert (x.dtype, dy.dtype, total.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32) and total.dim() == 2
            total += dy.float().t() @ x.float()

        module.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32
        monkeypatch.setitem(sys.modules, APEX, module)

    def test_it_is_found_on_a_gpu(self, package):
        assert weight_gradients(CUDA).name == "apex" and weight_gradients(CPU).name == "torch"

    def test_it_gives_the_same(self, package):
        by_torch, by_apex = layers(), layers()
        fuse_gradients(by_torch, weight_gradients(CPU))
        fuse_gradients(by_apex, weight_gradients(CUDA))
        for a, b in zip(gradients_of(by_torch).values(), gradients_of(by_apex).values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * a.abs().max().item())

    def test_a_broken_one_is_refused(self, monkeypatch, tmp_path):
        (tmp_path / f"{APEX}.py").write_text("raise ImportError('undefined symbol')\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(ValueError, match="undefined symbol.*build it anew with tools/install_gpu.sh --apex"):
            weight_gradients(CUDA)


@pytest.mark.gpu
def test_torch_adds_to_fp32_on_a_gpu():
    x, dy = (numbers(300, width, seed=width).to(CUDA) for width in (64, 48))
    total = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).to(CUDA)
    expected = total.double() + dy.double().t() @ x.double()
    address = total.data_ptr()
    weight_gradients(CUDA).add(x, dy, total)
    assert total.data_ptr() == address and (total - expected).norm() <= 1e-5 * expected.norm()
