"""Kernels of low-rank adapters, the frozen products among them, against autograd over the formula in float64."""
import pytest
import torch

from megatron_dllm.parallel import MainGradient
from megatron_dllm.tensor_parallel.adapted_linear import by_kernels, joined
from tests.unit.kernel_cases import DEVICES, check, draw, need_kernels
from tests.unit.launch_count import LaunchCounter

SCALE = 1.5
# rank, inputs, outputs: of each matrix; (2, n) of a fused one
SHAPES = {"one": (16, 264, [(70,)]), "three of one input": (16, 40, [(136,), (24,), (64,)]), "two": (3, 17, [(9,), (130,)]),
          "fused": (5, 33, [(2, 67)]), "wide rank": (48, 64, [(96,)]),
          "three of wide rank": (40, 48, [(20,), (9,), (17,)])}


def arguments(kind, num_rows, dtype, device, wants_x=True):
    rank, depth, widths = SHAPES[kind]
    x = draw(num_rows, depth, dtype=dtype, device=device, grad=wants_x)
    weights = [draw(torch.Size(width).numel(), depth, dtype=dtype, device=device, grad=False) for width in widths]
    a = [draw(*width[:-1], rank, depth, dtype=dtype, device=device) for width in widths]
    b = [draw(*width, rank, dtype=dtype, device=device) for width in widths]
    dy = draw(num_rows, sum(len(weight) for weight in weights), dtype=dtype, device=device, grad=False).flip(0)
    return [x, *weights, *a, *b], dy


def plain(x, *tensors):
    """Products one after the other; [T, all outputs]."""
    count = len(tensors) // 3
    ys = []
    for weight, a, b in zip(*(tensors[count * i:count * (i + 1)] for i in range(3)), strict=True):
        low = [x @ part.t() for part in a.reshape(-1, b.shape[-1], a.shape[-1])]
        beside = torch.cat([part @ own.t() for part, own in zip(low, b.reshape(len(low), -1, b.shape[-1]), strict=True)], 1)
        ys.append(x @ weight.t() + SCALE * beside)
    return torch.cat(ys, 1)


def by_kernel(num_live=None):
    def function(x, *tensors):
        count = len(tensors) // 3
        for each in tensors[count:]:
            each.main_gradient = None
        return torch.cat(by_kernels(x, *(tensors[count * i:count * (i + 1)] for i in range(3)), SCALE, num_live), 1)

    return function


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_against_the_formula(kind, dtype, device):
    need_kernels(device)
    # On a GPU sums over a thousand rows, in other parts than torch's.
    check(by_kernel(), plain, plain, *arguments(kind, 1025 if device == "cuda" else 70, dtype, device), units=16)


@DEVICES
@pytest.mark.parametrize("is_many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("kind", ["three of one input", "fused"])
def test_few_and_many_rows(kind, is_many, device, monkeypatch):
    need_kernels(device)
    from megatron_dllm.kernels import low_rank

    monkeypatch.setattr(low_rank, "MANY_ROWS", 100)
    num_rows = 1 if not is_many else 150 if device == "cpu" else 4100
    check(by_kernel(), plain, plain, *arguments(kind, num_rows, torch.bfloat16, device), units=32)


@DEVICES
def test_rows_without_a_gradient_are_not_read(device):
    need_kernels(device)
    inputs, dy = arguments("three of one input", 70, torch.float32, device)
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    wanted = [x for x in leaves if x.requires_grad]
    zeros = torch.cat([dy[:50], torch.zeros_like(dy[50:])])
    want = torch.autograd.grad(plain(*leaves), wanted, zeros)
    ours = torch.autograd.grad(by_kernel(50)(*leaves), wanted, torch.cat([dy[:50], torch.full_like(dy[50:], torch.nan)]))
    assert not ours[0][50:].any()
    for got, right in zip(ours, want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5 * right.abs().max())
    none = torch.autograd.grad(by_kernel(0)(*leaves), wanted, torch.full_like(dy, torch.nan))
    assert not any(gradient.any() for gradient in none)


@DEVICES
@pytest.mark.parametrize("kind, wants_x", [("three of one input", True), ("fused", False)])
def test_gradients_are_added_to_their_buffers(kind, wants_x, device):
    need_kernels(device)
    inputs, dy = arguments(kind, 37, torch.bfloat16, device, wants_x)
    count, then, totals = (len(inputs) - 1) // 3, [], []
    x, *tensors = [each.detach().requires_grad_(each.requires_grad) for each in inputs]
    weights, a, b = (tensors[count * i:count * (i + 1)] for i in range(3))
    want = torch.autograd.grad(by_kernel()(x, *tensors), [*[x] * wants_x, *a, *b], dy)
    for number, each in enumerate((*a, *b)):
        totals.append(torch.full(each.shape, float(number), device=device))
        each.main_gradient = MainGradient(totals[-1], lambda number=number: then.append(number))
    for _ in range(2):  # two uses in one backward
        x.grad = None
        loss = sum((y * part).float().sum() for _ in range(2)
                   for y, part in zip(by_kernels(x, weights, a, b, SCALE, None), dy.split([len(w) for w in weights], 1), strict=True))
        loss.backward()
    assert sorted(then) == sorted([*range(2 * count)] * 2) and all(each.grad is None for each in (*a, *b))
    for number, (total, right) in enumerate(zip(totals, want[wants_x:], strict=True)):
        assert ((total - number) / 4 - right).abs().max() <= 2**-7 * right.abs().max()


@DEVICES
def test_weights_that_lie_together_make_one_product(device):
    need_kernels(device)
    (x, *tensors), dy = arguments("three of one input", 37, torch.float32, device)
    apart, factors = tensors[:3], tensors[3:]
    together = torch.cat(apart).split([len(weight) for weight in apart])
    wanted = [each for each in (x, *factors) if each.requires_grad]

    def results(weights):
        with LaunchCounter() as counter:
            y = by_kernel()(x, *weights, *factors)
            found = [y.detach(), *torch.autograd.grad(y, wanted, dy)]
        return found, sum(number for name, number in counter.launches.items() if name.startswith("addmm_"))

    (one, number), (three, number_apart) = results(together), results(apart)
    assert (number, number_apart) == (2, 6)
    for got, want in zip(one, three, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max())


def test_joined():
    whole = torch.arange(30.0).view(6, 5)
    assert torch.equal(joined(whole.split([1, 2, 3]), 0), whole) and torch.equal(joined(whole.split([2, 3], 1), 1), whole)
    assert torch.equal(joined(whole[:, 1:].split([2, 2], 1), 1), whole[:, 1:])
    assert joined((whole[:1], whole[2:]), 0) is None and joined((whole[:1], whole[1:].clone()), 0) is None
    assert joined((whole[:, :2], whole[:, 2:].contiguous()), 1) is None


@DEVICES
def test_repeats_are_equal_bit_for_bit(device):
    need_kernels(device)
    (x, *others), dy = arguments("three of one input", 70, torch.bfloat16, device)
    wide = torch.cat([x, x], 1).detach()[:, :x.shape[1]].requires_grad_()  # rows of a wider tensor

    def results(x):
        leaves = [each.detach().requires_grad_(each.requires_grad) for each in (x, *others)]
        return torch.autograd.grad(by_kernel()(*leaves), [each for each in leaves if each.requires_grad], dy)

    first, second, strided = results(x), results(x), results(wide)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert all(torch.equal(*pair) for pair in zip(first, strided, strict=True))


def test_what_suits():
    need_kernels("cpu")
    from megatron_dllm.kernels.low_rank import suits

    def factors(*shapes):
        return [torch.empty(shape) for shape in shapes]

    assert suits(factors((8, 10)), factors((6, 8))) and suits(factors((2, 32, 10)), factors((2, 6, 32)))
    assert not suits(factors((65, 10)), factors((6, 65)))
    assert not suits(factors(*[(8, 10)] * 4), factors(*[(6, 8)] * 4))
    assert not suits(factors((2, 8, 10), (8, 10)), factors((2, 6, 8), (6, 8)))
