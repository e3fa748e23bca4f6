"""Frozen matrices and their adapters as one function, against the layers' products and adapters one after the other."""
import pytest
import torch

from megatron_dllm.config import PRESETS
from megatron_dllm.models.diffusion_gemma.lora import _add_to_column, _add_to_row
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import ColumnParallelLinear, RowParallelLinear, column_layers
from megatron_dllm.tensor_parallel.adapters import LowRank
from megatron_dllm.tensor_parallel.initialization import Initializer

CONTEXT, DEPTH = ParallelContext.single(torch.device("cpu")), PRESETS["toy"].hidden_size
SHAPES = {"one": [(6, DEPTH)], "three of one input": [(6, DEPTH), (4, DEPTH), (4, DEPTH)], "fused": [(2, 5, DEPTH)], "row": [(7, DEPTH)]}


def layers_of(kind, dtype):
    common = LowRank(3, 7.5, Initializer(2, 0.3), CONTEXT, dtype)
    for number, shape in enumerate(SHAPES[kind]):
        of, add = (RowParallelLinear, _add_to_row) if kind == "row" else (ColumnParallelLinear, _add_to_column)
        layer = of(f"w{number}", shape, context=CONTEXT, init=Initializer(1, 0.3), dtype=dtype).requires_grad_(False)
        add(f"w{number}", layer, common)
        with torch.no_grad():
            layer.adapter.b.normal_(generator=torch.Generator().manual_seed(number))
        yield layer


def results(kind, layers, x, wants_x):
    x = x.detach().requires_grad_(wants_x)
    ys = (layers[0](x),) if kind == "row" else column_layers(x, layers)
    dys = [torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype) for y in ys]
    trained = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    assert len(trained) == 2 * len(layers)
    return [y.detach() for y in ys], torch.autograd.grad(ys, trained + [x] * wants_x, dys)


@pytest.mark.parametrize("wants_x", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_against_products_and_adapters_apart(kind, dtype, wants_x):
    layers = list(layers_of(kind, dtype))
    x = torch.randn(17, DEPTH, generator=torch.Generator().manual_seed(5)).to(dtype)
    together = results(kind, layers, x, wants_x)
    for layer in layers:
        assert layer.factors is not None
        layer.factors = None
    apart = results(kind, layers, x, wants_x)
    bound = 1e-12 if dtype == torch.float64 else 2**-6
    for ours, wanted in zip(together, apart, strict=True):
        for got, want in zip(ours, wanted, strict=True):
            assert got.shape == want.shape and got.dtype == dtype
            assert (got - want).abs().max() <= bound * want.abs().max()


def test_what_is_kept():
    layers, x = list(layers_of("three of one input", torch.float32)), torch.randn(17, DEPTH, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        column_layers(x, layers)
    assert sum(t.numel() for t in kept if len(t) == 17) == 17 * (DEPTH + 3 * 3)


def test_dropout_is_left_to_the_adapters():
    layer = ColumnParallelLinear("w", (4, DEPTH), context=CONTEXT, init=Initializer(1, 0.3), dtype=torch.float32).requires_grad_(False)
    _add_to_column("w", layer, LowRank(3, 7.5, Initializer(2, 0.3), CONTEXT, torch.float32, dropout=0.1))
    assert layer.factors is None
