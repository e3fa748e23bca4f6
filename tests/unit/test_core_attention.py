"""megatron_dllm.transformer.core_attention: the fast path against the dense oracle, values and gradients."""
import numpy as np
import pytest
import torch

from megatron_dllm.kernels.attention_reference import visible
from megatron_dllm.transformer import core_attention, small_attention
from megatron_dllm.transformer.core_attention import attend, attend_dense, attention_plan
from megatron_dllm.transformer.visibility import CLEAN, Visibility
from tests.unit.test_visibility import DOCUMENTS, layout

CPU = torch.device("cpu")


def random_inputs(visibility, *, heads, groups, dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys = visibility.num_clean_keys + len(visibility.canvas_keys)

    def draw(count, number):
        return torch.randn(count, number, dim, generator=generator, dtype=torch.float64).mul_(0.7).to(dtype).requires_grad_()

    return draw(len(visibility.canvas_id), heads), draw(keys, groups), draw(keys, groups)


@pytest.mark.parametrize("window", [None, 3, 70])
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 2, 16), (3, 3, 5)], ids=["grouped", "odd"])
@pytest.mark.parametrize(("most_pairs", "small"), [
    (1 << 20, {}), (0, {}), (0, {"CAUSAL_ROWS": 7, "MOST_FILL": 100}), (0, {"CAUSAL_ROWS": 7, "MOST_FILL": 0}), (0, {"MOST_SCORES": 0})],
                         ids=["one product", "products", "blocks of rows", "nothing filled up", "SDPA"])
def test_attend_equals_the_oracle(documents, window, heads, groups, dim, most_pairs, small, monkeypatch):
    monkeypatch.setattr(core_attention, "MOST_PAIRS", most_pairs)
    for name, value in small.items():
        monkeypatch.setattr(small_attention, name, value)
    visibility = layout(documents, canvas_length=5)
    inputs = random_inputs(visibility, heads=heads, groups=groups, dim=dim, dtype=torch.float64)
    fast = attend(*inputs, attention_plan(visibility, window, CPU))
    slow = attend_dense(*inputs, visibility.windowed(window))
    assert torch.allclose(fast, slow, rtol=0, atol=1e-12)
    upstream = torch.randn(fast.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(fast, inputs, upstream), torch.autograd.grad(slow, inputs, upstream), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("most_pairs", [1 << 20, 0], ids=["one product", "products"])
def test_rows_of_fill_are_zero_and_get_no_gradient(most_pairs, monkeypatch):
    monkeypatch.setattr(core_attention, "MOST_PAIRS", most_pairs)
    visibility = layout(DOCUMENTS["unequal"], canvas_length=5)
    inputs = random_inputs(visibility, heads=4, groups=2, dim=16, dtype=torch.float64)
    filled = [torch.cat([x.detach(), torch.full_like(x[:3], torch.nan)]).requires_grad_() for x in inputs]
    plan = attention_plan(visibility, 7, CPU)
    wanted, found = attend(*inputs, plan), attend(*filled, plan)
    assert torch.equal(found[:-3], wanted) and not found[-3:].any()
    gradients = (torch.autograd.grad(y.square().sum(), x) for y, x in ((wanted, inputs), (found, filled)))
    for want, got in zip(*gradients, strict=True):
        assert torch.equal(got[:-3], want) and not got[-3:].any()


def test_attend_in_bf16_is_as_good_as_plain_bf16():
    visibility = layout(DOCUMENTS["unequal"], canvas_length=5)
    inputs = random_inputs(visibility, heads=4, groups=2, dim=16, dtype=torch.bfloat16)
    exact = attend_dense(*(x.float() for x in inputs), visibility.windowed(70))
    plain = attend_dense(*inputs, visibility.windowed(70))
    fast = attend(*inputs, attention_plan(visibility, 70, CPU))
    assert (fast.float() - exact).norm() <= 2 * (plain.float() - exact).norm()


def test_a_key_order_moves_the_keys_only():
    """Two rows, each with keys from a context and new ones, which stand apart in memory."""
    visibility = Visibility(np.array([0, 0, 5]), np.array([3, 4, 7]), np.full(3, CLEAN), np.zeros(0, np.int64), 7)
    inputs = random_inputs(visibility, heads=2, groups=1, dim=4, dtype=torch.float64)
    order = np.array([0, 1, 4, 5, 2, 3, 6])  # logical key j stands at order[j]
    query, key, value = inputs
    moved = attend(query, key, value, attention_plan(visibility, None, CPU, order))
    logical = attend(query, key[order], value[order], attention_plan(visibility, None, CPU))
    assert torch.equal(moved, logical)


@pytest.mark.parametrize("window", [None, 3, 70])
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
def test_the_kernels_tiles_see_what_the_mask_shows(documents, window):
    visibility = layout(documents, canvas_length=5)
    plan = attention_plan(visibility, window, CPU)
    dense = torch.from_numpy(visibility.windowed(window).dense())
    assert torch.equal(visible(plan.tiles.bounds[:len(dense)], dense.shape[1]), dense) and not plan.tiles.bounds[len(dense):].any()
    assert plan.keys is None


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 2, 256), (8, 1, 512), (3, 3, 24)])
def test_attend_on_a_gpu(window, heads, groups, dim):
    """The kernels, and where they do not reach (head dimension 24) SDPA; keys that stand elsewhere, and rows of fill."""
    device = torch.device("cuda")
    visibility = layout(DOCUMENTS["unequal"], canvas_length=5)
    inputs = [x.detach().to(device).requires_grad_()
              for x in random_inputs(visibility, heads=heads, groups=groups, dim=dim, dtype=torch.bfloat16)]
    query, key, value = inputs
    order = np.random.default_rng(0).permutation(visibility.num_clean_keys)
    places = torch.from_numpy(np.concatenate([order, np.arange(len(order), len(key))])).to(device)
    filled = [torch.cat([x, x[:3]]) for x in inputs]
    fast = attend(*filled, attention_plan(visibility, window, device, order))
    assert not fast[len(query):].any()
    exact = attend_dense(*(x.double() for x in (query, key[places], value[places])), visibility.windowed(window))
    plain = attend_dense(query, key[places], value[places], visibility.windowed(window))
    assert (fast[:len(query)] - exact).norm() <= 3 * (plain - exact).norm()  # `plain` rounds its result alone, not its probabilities
    upstream = torch.randn_like(query)
    ours = torch.autograd.grad(fast[:len(query)], inputs, upstream)
    wanted = torch.autograd.grad(exact, inputs, upstream.double())
    assert all((a.double() - b.double()).norm() <= 2**-6 * b.double().norm() for a, b in zip(ours, wanted, strict=True))


def test_short_pieces_alone_are_multiplied_out():
    """Their probabilities are kept, so that memory stays linear in the sequence."""
    plans = [attention_plan(layout([(length, None)], 1), window, CPU).work for length, window in ((1024, None), (1152, None), (1152, 100))]
    assert [plan.small is not None for plan in plans] == [True, False, True]


def test_no_queries():
    visibility = layout([], canvas_length=3)
    inputs = random_inputs(visibility, heads=2, groups=1, dim=4, dtype=torch.float32)
    assert attend(*inputs, attention_plan(visibility, 8, CPU)).shape == (0, 2, 4)
