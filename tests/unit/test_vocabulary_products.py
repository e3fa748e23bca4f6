"""Products whose sums are not rounded to the inputs' dtype; and the head on a GPU against the CPU."""

import pytest
import torch

from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import linear_cross_entropy, soft_embedding
from megatron_dllm.tensor_parallel.vocabulary import add_product_, product, token_chunks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def matrices(dtype, device):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(device, dtype) for shape in ((40, 96), (96, 24))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product(dtype, device):
    a, b = matrices(dtype, device)
    ours = product(a, b)
    assert ours.dtype == torch.promote_types(dtype, torch.float32)
    exact = a.double() @ b.double()
    # Sums of 96 products of size 1: fp32's rounding, far below bf16's (which would be 0.03).
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_product(dtype, device):
    a, b = matrices(dtype, device)
    total = torch.full((40, 24), 0.25, dtype=torch.promote_types(dtype, torch.float32), device=device)
    place = total.data_ptr()
    # As the losses call it: a transposed view on the left.
    left = a.t().contiguous().t()
    for _ in range(2):
        add_product_(total, left, b)
    assert total.data_ptr() == place
    exact = 0.25 + 2 * (a.double() @ b.double())
    torch.testing.assert_close(total.double(), exact, rtol=0, atol=1e-12 if dtype == torch.float64 else 4e-5)


@pytest.mark.parametrize("tokens, expected", [(0, []), (1, [1]), (6, [3, 3]), (7, [3, 3, 1])])
def test_token_chunks(tokens, expected):
    weight = torch.zeros(5, 2, dtype=torch.bfloat16)
    chunks = list(token_chunks(tokens, weight, chunk_bytes=3 * 5 * 4))
    assert [chunk.stop - chunk.start for chunk in chunks] == expected
    assert [row for chunk in chunks for row in range(tokens)[chunk]] == list(range(tokens))
    assert len(list(token_chunks(tokens, weight, chunk_bytes=1))) == tokens


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_on_a_gpu(dtype):
    results = []
    for device in ("cpu", "cuda"):
        tp = ParallelContext.single(device).tp
        draw = torch.Generator().manual_seed(0)
        hidden, weight, upstream = (torch.randn(n, 64, generator=draw).to(device, dtype) for n in (50, 1000, 50))
        weight.requires_grad_()
        hidden.requires_grad_()
        targets, token_weights = torch.arange(0, 1000, 20, device=device), torch.rand(50, generator=draw).to(device)
        common = {"softcap": 30.0, "tp": tp, "vocab_size": 1000, "chunk_bytes": 7 * 1000 * 8}
        terms = linear_cross_entropy(hidden, weight, targets, token_weights, **common)
        soft = soft_embedding(hidden, weight, scale=8.0, **common)
        gradients = torch.autograd.grad(terms.loss + (soft * upstream).sum(), (hidden, weight))
        results.append([x.detach().cpu().double() for x in (terms.loss, terms.per_token, soft, *gradients)])
    # bf16: a unit of its rounding, since sums are in fp32 on both.
    tolerance = {torch.bfloat16: 2**-8, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert (on_cpu - on_gpu).abs().max() <= 2 * tolerance * on_cpu.abs().max()


@pytest.mark.gpu
def test_chunks_that_add_to_a_gradient_are_longer():
    weight = torch.empty(262144, 0, dtype=torch.bfloat16, device="cuda")
    assert [[part.stop for part in token_chunks(5000, weight, None, is_trained=is_trained)] for is_trained in (False, True)] == [
        [2048, 4096, 5000], [4096, 5000]]
