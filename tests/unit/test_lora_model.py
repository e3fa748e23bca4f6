"""Adapters beside frozen weights against weights into which they are merged, and what of a model stays as it is."""
import dataclasses

import pytest
import torch

from megatron_dllm.config import LoRAConfig, parse
from megatron_dllm.models.diffusion_gemma.build import build_model
from megatron_dllm.models.diffusion_gemma.lora import TARGETS, add_adapters, is_adapter
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel.adapted_linear import joined
from megatron_dllm.tensor_parallel.initialization import Initializer
from megatron_dllm.training.optimizer import MasterOptimizer
from tests.unit.toy import CONFIG, toy_inputs, toy_model, toy_plan

RANK, ALPHA = 3, 6.0
ALL = tuple(TARGETS)


def adapted(targets=ALL, dtype=torch.float64, **options):
    """A toy model with adapters whose B is not zero any more."""
    model = toy_model(dtype, **options)
    add_adapters(model, LoRAConfig(lora_rank=RANK, lora_alpha=ALPHA, lora_targets=targets), Initializer(3, 0.1))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("adapter.b"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def merged(model):
    """A toy model with W + alpha / rank * B A, by hand."""
    whole, tensors = toy_model(), dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            for start in (name.removesuffix("weight") + "adapter", f"{name}_adapter"):
                if f"{start}.a" in tensors:
                    a, b = tensors[f"{start}.a"], tensors[f"{start}.b"]
                    product = b.flatten(1, -2) @ a if a.shape[0] == parameter.shape[0] and a.dim() == 3 else b @ a
                    parameter.add_(product.reshape(parameter.shape), alpha=ALPHA / RANK)
    return whole


def loss_and_gradients(model):
    inputs = toy_inputs(toy_plan(seed=1))
    total = model(inputs).total
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("target", ALL)
def test_adapters_are_what_merged_weights_are(target):
    model = adapted((target,))
    whole = merged(model)
    loss, gradients = loss_and_gradients(model)
    expected, weights = loss_and_gradients(whole)
    base = toy_model()(toy_inputs(toy_plan(seed=1))).total.item()
    assert abs(loss - expected) < 1e-12 * expected and abs(loss - base) > 1e-6
    assert all(is_adapter(name) for name in gradients) and gradients
    for name, gradient in gradients.items():
        # d(W + s B A): dB = s dW A^T, dA = s B^T dW.
        start = name.rsplit(".", 1)[0]
        of_weight = weights[start.removesuffix("adapter") + "weight" if start.endswith(".adapter") else start.removesuffix("_adapter")]
        a, b = (dict(model.named_parameters())[f"{start}.{part}"].detach() for part in "ab")
        if start.endswith("gate_up_adapter"):
            of_weight, b, gradient = of_weight.flatten(1, 2), b.flatten(1, 2), gradient.flatten(1, -2)
        wanted = of_weight @ a.mT if name.endswith(".b") else b.mT @ of_weight
        torch.testing.assert_close(gradient, wanted * ALPHA / RANK, rtol=1e-9, atol=1e-13)


def test_projections_of_one_input_lie_together():
    before = {name: parameter.detach().clone() for name, parameter in toy_model().named_parameters()}
    model = adapted(("attention",))
    for block in model.layers.values():
        attention = block.attention
        layers = [layer for layer in (attention.q_proj, attention.k_proj, attention.v_proj) if layer is not None]
        assert joined([layer.weight for layer in layers], 0) is not None
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters() if name in before)


@pytest.mark.parametrize("recompute", [("block",), ("moe", "mlp", "core_attn")], ids=["full", "selective"])
@pytest.mark.parametrize("targets", [ALL, ("experts",)], ids=["all", "experts alone"])
def test_recompute_changes_nothing(recompute, targets):
    loss, gradients = loss_and_gradients(adapted(targets))
    again, repeated = loss_and_gradients(adapted(targets, recompute=frozenset(recompute)))
    assert loss == again
    for name, gradient in gradients.items():
        torch.testing.assert_close(repeated[name], gradient, rtol=1e-12, atol=1e-14)


def test_nothing_changes_at_first():
    model, inputs = toy_model(), toy_inputs(toy_plan(seed=1))
    before = model(inputs).total
    add_adapters(model, LoRAConfig(lora_rank=RANK), Initializer(3, 0.1))
    # Not to the bit: without adapters one product makes queries, keys and values.
    torch.testing.assert_close(model(inputs).total, before, rtol=1e-14, atol=0)


def test_build_holds_frozen_weights_in_the_compute_dtype():
    run = parse(["--preset", "toy", "--lora-rank", "8", "--lora-targets", *ALL, "--bf16"])
    model = build_model(run, ParallelContext.single())
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert all(dtype == torch.bfloat16 for name, dtype in dtypes.items() if ".router.adapter" not in name)
    assert all(dtype == torch.float32 for name, dtype in dtypes.items() if ".router.adapter" in name)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(filter(is_adapter, dtypes))
    # No bucket, master or moment for what is frozen.
    optimizer = MasterOptimizer(model, run.optimizer, ParallelContext.single())
    assert {held.name for held in optimizer.held} == optimizer.parameters.keys() == set(filter(is_adapter, dtypes))
    assert sum(bucket.gradients.numel() for bucket in optimizer.buckets.buckets) == optimizer.num_trained
    assert all(held.master.dtype == torch.float32 for held in optimizer.held)
    for target, layers in (("q_proj", 6), ("mlp.down", 7), ("router", 6), ("self_conditioning", 2), ("gate_up_adapter", 6)):
        assert sum(target in name and name.endswith("adapter.a") for name in dtypes) == layers, target


def test_a_target_that_matches_nothing_is_refused():
    linear = dataclasses.replace(CONFIG, layer_types=("linear",) * 3, linear_num_key_heads=2, linear_num_value_heads=2,
                                 linear_key_head_dim=8, linear_value_head_dim=8)
    with pytest.raises(ValueError, match="--lora-targets attention: the model has no such layers .*linear"):
        add_adapters(toy_model(config=linear), LoRAConfig(lora_rank=2), Initializer(3, 0.1))


def test_weights_that_a_checkpoint_replaces_are_not_drawn():
    run = parse(["--preset", "toy", "--lora-rank", "8", "--pretrained-checkpoint", "somewhere"])
    model = build_model(run, ParallelContext.single())
    assert model.embedding.weight.count_nonzero() == 0 and model.layers["0"].attention.q_proj.adapter.a.count_nonzero() > 0
