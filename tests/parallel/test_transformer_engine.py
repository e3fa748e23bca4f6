"""Linear layers cut over two ranks whose products a stand-in for Transformer Engine makes, against the same by torch."""
import pytest
import torch

from megatron_dllm.parallel import Topology, create_context
from megatron_dllm.tensor_parallel import ColumnParallelLinear, Initializer, RowParallelLinear, column_layers
from megatron_dllm.transformer_engine import Engine, install
from tests.unit.fake_transformer_engine import install_fake

CPU = torch.device("cpu")
TOKENS, HIDDEN, INNER = 10, 16, 32


def results(rank, sequence_parallel):
    """(by torch, by the stand-in) of y and the gradients of x and all weights; x is read by two layers, whose sum a third one reads."""
    context = create_context(Topology(world=2, tp=2), rank=rank, device=CPU, sequence_parallel=sequence_parallel)
    shared = {"context": context, "init": Initializer(0, 0.3), "dtype": torch.bfloat16}
    layers = torch.nn.ModuleList([
        ColumnParallelLinear("a", (INNER, HIDDEN), **shared), ColumnParallelLinear("b", (INNER, HIDDEN), **shared),
        RowParallelLinear("c", (HIDDEN, INNER), **shared)])
    draw = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16() for _ in range(2))
    if sequence_parallel:
        x, grad = (whole.chunk(2)[rank] for whole in (x, grad))
    x.requires_grad_()

    def run():
        a, b = column_layers(x, layers[:2])
        y = layers[2](a * 0.7 + b)
        return [t.detach().float() for t in (y, *torch.autograd.grad(y, (x, *layers.parameters()), grad))]

    ours = run()
    with pytest.MonkeyPatch.context() as patch:
        install(layers, Engine(install_fake(patch)))
        return ours, run()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_cut_over_ranks(world, sequence_parallel):
    for ours, theirs in world.run(results, sequence_parallel, size=2):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(b, a, rtol=2**-6, atol=2**-6 * a.abs().max().item())
