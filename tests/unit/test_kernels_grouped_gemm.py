"""kernels.grouped_gemm and kernels.grouped_mlp against the loop over experts."""

import pytest
import torch
import torch.nn.functional as F

from megatron_dllm.kernels import reference
from tests.unit.kernel_cases import DEVICES, check, draw, need_kernels

COUNTS = {"one token": (0, 1, 0), "odd": (3, 0, 41, 17), "none": (0, 0), "all in one": (0, 150, 0), "two tiles": (129, 1, 127)}
CASES = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
HIDDEN, INNER = 40, 24  # neither fills a tile
BF16 = torch.bfloat16


def plain(rows, gate_up, down, counts):
    parts = [rows.new_zeros(0, rows.shape[1])]
    for x, up, out in zip(rows.split(counts.tolist()), gate_up, down, strict=True):
        gate, up = F.linear(x, up.flatten(0, 1)).chunk(2, dim=-1)
        parts.append(F.linear(F.gelu(gate, approximate="tanh") * up, out))
    return torch.cat(parts)


def arguments(counts, device, hidden=HIDDEN, inner=INNER):
    num_experts = len(counts)
    scaled = [(draw(*shape, dtype=torch.float32, device=device) * shape[-1] ** -0.5).to(BF16).detach().requires_grad_()
              for shape in ((num_experts, 2, inner, hidden), (num_experts, hidden, inner))]
    rows = draw(sum(counts), hidden, dtype=BF16, device=device)
    return [rows, *scaled, torch.tensor(counts, device=device)], draw(sum(counts), hidden, dtype=BF16, device=device, grad=False)


def exact_gradients(inputs, dy):
    wide = [x.detach().double().requires_grad_() for x in inputs[:3]]
    return torch.autograd.grad(reference.grouped_mlp(*wide, inputs[3]), wide, dy.double())


@DEVICES
@CASES
def test_grouped_mlp(counts, device):
    need_kernels(device)
    from megatron_dllm.kernels.grouped_mlp import grouped_mlp

    inputs, dy = arguments(counts, device)
    check(grouped_mlp, reference.grouped_mlp, plain, inputs, dy)
    with torch.no_grad():
        assert torch.equal(grouped_mlp(*inputs), grouped_mlp(*inputs[:2], inputs[2].detach().requires_grad_(), inputs[3]))


@DEVICES
@CASES
def test_grouped_mlp_of_weighted_rows(counts, device):
    need_kernels(device)
    from megatron_dllm.kernels.grouped_mlp import grouped_mlp
    from megatron_dllm.kernels.row_weights import RowWeights

    inputs, dy = arguments(counts, device)
    weights = draw(sum(counts), 1, dtype=torch.float32, device=device)
    slot = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).to(device)
    check(lambda *x: grouped_mlp(*x[:4], weighted=RowWeights(x[4], slot)), lambda *x: reference.grouped_mlp(*x[:4]) * x[4][slot],
          lambda *x: (plain(*x[:4]) * x[4][slot]).to(BF16), [*inputs, weights], dy)


@DEVICES
@pytest.mark.parametrize("live", [(2, 0, 30, 0), (3, 0, 41, 17), (0, 0, 0, 0)], ids=["some", "all", "none"])
def test_grouped_mlp_of_live_rows(live, device):
    need_kernels(device)
    from megatron_dllm.kernels.grouped_mlp import grouped_mlp
    from megatron_dllm.kernels.row_weights import LiveRows, RowWeights

    counts = COUNTS["odd"]
    inputs, dy = arguments(counts, device)
    rows = torch.arange(sum(counts), device=device)
    is_live = torch.cat([torch.arange(count) < number for count, number in zip(counts, live, strict=True)]).to(device)
    slot = torch.cat([rows[is_live], rows[~is_live]]).argsort()  # live rows have the first slots
    weights = draw(len(rows), 1, dtype=torch.float32, device=device)
    dy[~is_live] = 0

    def gradients(known: LiveRows | None):
        y = grouped_mlp(*inputs, weighted=RowWeights(weights, slot, known))
        drows, *others = torch.autograd.grad(y, (*inputs[:3], weights), dy)
        return drows[is_live], *others

    for ours, want in zip(gradients(LiveRows(sum(live), torch.tensor(live, device=device))), gradients(None), strict=True):
        torch.testing.assert_close(ours, want, rtol=2**-7, atol=2**-7 * float(want.abs().max()) if want.numel() else 0.0)


@DEVICES
def test_place_live_tiles(device):
    need_kernels(device)
    from megatron_dllm.kernels.grouped_gemm import place_tiles
    from megatron_dllm.kernels.live_tiles import place_live_tiles

    counts = torch.tensor([3, 0, 5, 4], device=device)
    tiles = place_live_tiles(counts, torch.tensor([1, 0, 5, 0], device=device), place_tiles(counts, 20, 4))
    assert tiles.number.item() == 3 and tiles.starts.tolist() == [0, 3, 3, 8, 12] and tiles.ends.tolist() == [1, 3, 8, 8]
    assert tiles.table[:3, :3].tolist() == [[0, 0, 1], [2, 3, 4], [2, 7, 1]]


@DEVICES
@pytest.mark.parametrize("is_trained", [False, True])
def test_what_is_kept_of_rows(is_trained, device):
    need_kernels(device)
    from megatron_dllm.kernels.grouped_mlp import grouped_mlp

    (rows, *weights, counts), _ = arguments(COUNTS["odd"], device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        grouped_mlp(rows, *(weight.requires_grad_(is_trained) for weight in weights), counts)
    assert (rows.shape in kept) == is_trained, "rows are read again for a gradient of gate_up alone"


@pytest.mark.gpu
@pytest.mark.parametrize("mean", [64, 256])
def test_grouped_mlp_at_the_models_widths(mean):
    from megatron_dllm.kernels.grouped_mlp import grouped_mlp

    chosen = torch.randint(0, 15, (16 * mean,), generator=torch.Generator().manual_seed(0))
    inputs, dy = arguments(chosen.bincount(minlength=16).tolist(), "cuda", hidden=2816, inner=704)
    check(grouped_mlp, reference.grouped_mlp, plain, inputs, dy)


@DEVICES
def test_rows_after_the_last_experts_are_not_read(device):
    need_kernels(device)
    from megatron_dllm.kernels.grouped_mlp import grouped_mlp

    (rows, *weights, counts), dy = arguments(COUNTS["odd"], device)
    end = len(rows)

    def results(rows, dy):
        rows = rows.detach().requires_grad_()
        y = grouped_mlp(rows, *weights, counts)
        drows, *others = torch.autograd.grad(y, (rows, *weights), dy)
        return y.detach()[:end], drows[:end], *others

    padding = rows.new_full((70, HIDDEN), float("nan"))
    padded = results(torch.cat([rows, padding]), torch.cat([dy, padding]))
    for ours, want in zip(padded, results(rows, dy), strict=True):
        assert ours.isfinite().all() and torch.equal(ours, want)


@DEVICES
@pytest.mark.parametrize("num_calls, is_fresh", [(1, False), (2, False), (2, True), (3, False), (3, True)])
def test_gradients_of_several_calls_are_added_to_fp32(num_calls, is_fresh, device):
    need_kernels(device)
    from megatron_dllm.kernels.grouped_mlp import Deferred, add_parts, grouped_mlp, num_sums

    starts = [torch.randn(4, 2 * INNER * HIDDEN, device=device), torch.randn(4, HIDDEN * INNER, device=device)]
    totals, parts = [x.clone() for x in starts], ([], [])
    wanted = [x.double() * (not is_fresh) for x in starts]
    tickets = [torch.zeros(0, device=device, requires_grad=True) for _ in totals]
    losses = 0
    for counts in (COUNTS["odd"], (0, 0, 0, 0), (1, 0, 2, 0))[:num_calls]:
        inputs, dy = arguments(counts, device)
        with torch.no_grad():  # the weights that every call has
            inputs[1:3] = arguments(COUNTS["odd"], device)[0][1:3]
        up, down = (Deferred(ticket, part.append) for ticket, part in zip(tickets, parts, strict=True))
        losses = losses + (grouped_mlp(*inputs, deferred_up=up, deferred_down=down).float() * dy).sum()
        for want, grad in zip(wanted, exact_gradients(inputs, dy)[1:], strict=True):
            want += grad.view(want.shape)
    losses.backward()
    assert all(weight.grad is None for weight in inputs[1:3]) and all(ticket.grad is not None for ticket in tickets)
    for total, part, want, start, width in zip(totals, parts, wanted, starts, (HIDDEN, INNER), strict=True):
        if is_fresh:
            start.zero_()
            total.fill_(float("nan"))
        fresh = torch.tensor([is_fresh], dtype=torch.int32, device=device)
        squares = torch.full((num_sums(total.view(4, -1, width)),), float("nan"), device=device)
        add_parts(total, part, fresh, squares)
        assert fresh.item() == 0
        assert squares.double().sum().item() == pytest.approx(total.double().square().sum().item(), rel=1e-6)
        # What is multiplied has been rounded to bf16 twice on the way, which no sum makes larger.
        assert (total - want).abs().max() <= 2**-7 * (want - start).abs().max()
        assert torch.equal(total[1], start[1]), "an expert without rows leaves the buffer as it is"


@DEVICES
@pytest.mark.parametrize("is_turned", [False, True], ids=["first below", "first above"])
def test_weight_gradient_of_two_parts(is_turned, device):
    need_kernels(device)
    from megatron_dllm.kernels.grouped_gemm import OuterProducts, Tiling, pairs, place_tiles, weight_gradient

    # Experts without rows in one part or in both; one part has more steps than the other.
    numbers, tiling = ((0, 3, 41, 0), (17, 0, 1, 0)), Tiling(64, 64, 16, 4, 2)
    room = [torch.full((2, 70, width), float("nan"), dtype=BF16, device=device) for width in (HIDDEN, INNER)]
    parts, want = [], 0
    for place, counts in zip((1, 0) if is_turned else (0, 1), numbers, strict=True):
        x, dy = (whole[place] for whole in room)
        for whole in (x, dy):
            whole[:sum(counts)] = draw(sum(counts), whole.shape[1], dtype=BF16, device=device, grad=False)
        parts.append(OuterProducts(dy, x, place_tiles(torch.tensor(counts, device=device), len(x), tiling.rows)))
        rows = zip(dy[:sum(counts)].double().split(counts), x[:sum(counts)].double().split(counts), strict=True)
        want = want + torch.stack([a.T @ b for a, b in rows])
    assert pairs(parts) == [parts]
    grad = weight_gradient(parts, tiling)
    assert (grad - want).abs().max() <= 2**-8 * want.abs().max() and not grad[3].any()


def test_pairs(monkeypatch):
    need_kernels("cpu")
    from megatron_dllm.kernels import grouped_gemm
    from megatron_dllm.kernels.grouped_gemm import OuterProducts, pairs

    room = torch.zeros(100, 8, dtype=BF16)
    places = slice(0, 2), slice(50, 53), slice(90, 91), slice(5, 5)
    first, second, third, none = (OuterProducts(room[place], room[place], None) for place in places)
    for far in (grouped_gemm.FAR, 1):
        monkeypatch.setattr(grouped_gemm, "FAR", far)
        assert pairs([first, none, second, third]) == [[first, second], [third]], "where memory lies decides nothing"
    same = OuterProducts(room[places[1]], room[places[0]], None)
    assert pairs([first, same, third]) == [[first], [same, third]], "parts of one tensor"
    assert pairs([none]) == []


@DEVICES
def test_parts_that_lie_far_apart_give_the_same_bits(monkeypatch, device):
    need_kernels(device)
    from megatron_dllm.kernels import grouped_gemm
    from megatron_dllm.kernels.grouped_gemm import OuterProducts, Tiling, add_weight_gradient, pairs, place_tiles

    tiling, numbers, gradients = Tiling(64, 64, 16, 4, 2), ((0, 3, 41, 0), (17, 0, 9, 0)), []
    parts = []
    for counts in numbers:
        dy, x = (draw(sum(counts), width, dtype=BF16, device=device, grad=False) for width in (HIDDEN, INNER))
        parts.append(OuterProducts(dy, x, place_tiles(torch.tensor(counts, device=device), len(x), tiling.rows)))
    for far in (grouped_gemm.FAR, 1):
        monkeypatch.setattr(grouped_gemm, "FAR", far)
        total = draw(4, HIDDEN, INNER, dtype=torch.float32, device=device, grad=False)
        for pair in pairs(parts):
            add_weight_gradient(pair, tiling, total, torch.zeros(1, dtype=torch.int32, device=device))
        gradients.append(total)
    assert torch.equal(*gradients)


@DEVICES
def test_clear_fresh(device):
    need_kernels(device)
    from megatron_dllm.kernels.grouped_gemm import clear_fresh

    for is_fresh, size in ((0, 5), (1, 5), (1, 50_001)):
        room, fresh = torch.full((size + 1,), float("nan"), device=device), torch.tensor([is_fresh], dtype=torch.int32, device=device)
        squares = torch.full((4,), float("nan"), device=device)
        clear_fresh(room[:size], fresh, squares[:3])
        for x in (room, squares):
            assert x.isnan().sum() == (1 if is_fresh else len(x)) and fresh.item() == 0


@DEVICES
def test_place_tiles(device):
    need_kernels(device)
    from megatron_dllm.kernels.grouped_gemm import place_tiles

    tiles = place_tiles(torch.tensor([3, 0, 5, 4], device=device), 20, 4)
    assert tiles.number.item() == 4 and tiles.starts.tolist() == [0, 3, 3, 8, 12]
    assert tiles.table[:4, :3].tolist() == [[0, 0, 3], [2, 3, 4], [2, 7, 1], [3, 8, 4]]
    assert len(tiles.table) >= 20 // 4 + 4, "the most tiles that 20 rows of 4 experts can have"


@DEVICES
@CASES
def test_product_and_weight_gradient(counts, device):
    need_kernels(device)
    from megatron_dllm.kernels.grouped_gemm import OuterProducts, Tiling, place_tiles, product, weight_gradient

    tiling = Tiling(64, 64, 16, 4, 2)
    (x, _, weight, counts), dy = arguments(counts, device, hidden=72, inner=104)
    rows = [part.double() for part in x.split(counts.tolist())]
    tiles = place_tiles(counts, len(x), tiling.rows)
    to_inner = product(x.detach(), weight.detach(), tiles, tiling, transposed=True)
    wanted = torch.cat([part @ expert.double() for part, expert in zip(rows, weight, strict=True)])
    same = product(x.detach(), weight.detach().mT.contiguous(), tiles, tiling)
    grad = weight_gradient([OuterProducts(dy, to_inner, tiles)], tiling)
    wanted_grad = torch.stack([a.double().mT @ b.double() for a, b in zip(dy.split(counts.tolist()), to_inner.split(counts.tolist()),
                                                                          strict=True)])
    for ours, want in ((to_inner, wanted), (same, wanted), (grad, wanted_grad)):
        assert ours.dtype == BF16 and ours.shape == want.shape
        if len(x):  # products of bf16 are exact in fp32: the one error is the result's rounding
            assert (ours - want).abs().max() <= 2**-8 * want.abs().max()
    assert not grad[(counts == 0)].any()
