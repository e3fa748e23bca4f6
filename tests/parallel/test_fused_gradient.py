"""--gradient-accumulation-fusion over two tensor-parallel ranks: the same sums as autograd's, but for its rounding."""
import pytest
import torch

from megatron_dllm.data_parallel import GradientBuckets
from megatron_dllm.parallel import Topology, create_context
from megatron_dllm.tensor_parallel import ColumnParallelLinear, Initializer, RowParallelLinear, column_layers
from megatron_dllm.tensor_parallel.fused_gradient import fuse_gradients, weight_gradients

CPU = torch.device("cpu")
TOKENS, HIDDEN, INNER = 10, 16, 32


def results(rank, sequence_parallel, fused):
    """y, the gradient of x, and the buffers of two layers that read x and a third that reads their sum."""
    context = create_context(Topology(world=2, tp=2), rank=rank, device=CPU, sequence_parallel=sequence_parallel)
    shared = {"context": context, "init": Initializer(0, 0.3), "dtype": torch.bfloat16}
    layers = torch.nn.ModuleList([
        ColumnParallelLinear("a", (INNER, HIDDEN), **shared), ColumnParallelLinear("b", (INNER, HIDDEN), **shared),
        RowParallelLinear("c", (HIDDEN, INNER), **shared)])
    if fused:
        fuse_gradients(layers, weight_gradients(CPU))
    buckets = GradientBuckets(layers.named_parameters(), context)
    draw = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16() for _ in range(2))
    if sequence_parallel:
        x, grad = (whole.chunk(2)[rank] for whole in (x, grad))
    x.requires_grad_()
    buckets.last_microbatch()
    a, b = column_layers(x, layers[:2])
    y = layers[2](a * 0.7 + b)
    y.backward(grad)
    buckets.finish()
    found = [t.detach().float() for t in (y, x.grad)]
    found += [bucket.gradient(number).clone() for bucket in buckets.buckets for number in range(len(bucket.names))]
    buckets.release()
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_cut_over_ranks(world, sequence_parallel):
    plain, fused = (world.run(results, sequence_parallel, which, size=2) for which in (False, True))
    for ours, theirs in zip(fused, plain, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * b.abs().max().item())
        assert not torch.equal(ours[2], theirs[2]), "nothing was fused"
