"""Gated delta net: the layer against a loop over each sequence's tokens, with gradients; states kept for a second loop and generation."""
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_dllm.config import parse, to_arguments_text
from megatron_dllm.models.diffusion_gemma.inference import Session
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel.initialization import Initializer
from megatron_dllm.transformer.gated_delta_net import GatedDeltaNet, normalize_pair
from megatron_dllm.transformer.gated_delta_plan import Runs, appended_runs, first_runs, gated_delta_plan, second_runs
from megatron_dllm.transformer.gated_delta_rule import CHUNK
from megatron_dllm.transformer.gated_delta_rule_reference import recurrent_gated_delta_rule
from megatron_dllm.transformer.recompute import Recompute
from megatron_dllm.transformer.visibility import CLEAN, Visibility
from tests.unit.toy import CONFIG, toy_model

CPU = torch.device("cpu")
LINEAR = dataclasses.replace(CONFIG, layer_types=("linear", "sliding", "full"), linear_num_key_heads=2, linear_num_value_heads=4,
                             linear_key_head_dim=6, linear_value_head_dim=5, linear_conv_kernel_dim=4)
SMALL = dataclasses.replace(LINEAR, hidden_size=7)
# Documents, and of each the starts of its canvases of 5 tokens: before and after the edge of a chunk, in the convolution's reach, at 0.
DOCUMENTS, CANVAS = ((150, (64, 70, 2)), (3, (3, 0)), (66, (66,)), (1, ())), 5


def layer(dtype=torch.float64, *, kernel=4, recompute=()) -> GatedDeltaNet:
    config = dataclasses.replace(SMALL, linear_conv_kernel_dim=kernel)
    module = GatedDeltaNet("gdn", config, 0, context=ParallelContext.single(), init=Initializer(3, 0.5), dtype=dtype,
                           recompute=Recompute(frozenset(recompute)))
    with torch.no_grad():
        module.norm.weight.copy_(torch.linspace(0.5, 1.5, 5))
        module.A_log -= 2  # decays that let the start of a sequence be felt at its end
    return module


def visibility(documents=DOCUMENTS) -> Visibility:
    first, past, starts = [], [], []
    begin = 0
    for length, canvases in documents:
        first += [begin] * length
        past += range(begin + 1, begin + length + 1)
        starts += [(begin, begin + start) for start in canvases]
        begin += length
    ids = np.repeat(np.arange(len(starts)), CANVAS)
    first += [begin for begin, _ in starts for _ in range(CANVAS)]
    past += [start for _, start in starts for _ in range(CANVAS)]
    return Visibility(np.array(first), np.array(past), np.concatenate([np.full(begin, CLEAN), ids]), ids, begin)


def tokens(count, seed=0, dtype=torch.float64):
    return torch.randn(count, SMALL.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_the_loop(module: GatedDeltaNet, x: torch.Tensor) -> torch.Tensor:
    """One sequence from its first token: the formulas of the layer's docstring, with a convolution of torch's."""
    project = {name: F.linear(x, getattr(module, f"{name}_proj").weight) for name in "qkvzab"}

    def convolve(name, dim):
        padded = F.pad(project[name].T, (module.kernel - 1, 0))
        weight = getattr(module, f"{name}_conv")
        return F.silu(F.conv1d(padded[None], weight[:, None], groups=len(weight))[0]).T.unflatten(1, (-1, dim))

    q, k, v = convolve("q", module.key_dim), convolve("k", module.key_dim), convolve("v", module.value_dim)
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (t[:, [0, 0, 1, 1]] for t in (q, k))
    decay = -torch.exp(module.A_log) * F.softplus(project["a"] + module.dt_bias)
    out, _ = recurrent_gated_delta_rule(q, k, v, decay, project["b"].sigmoid(), x.new_zeros(4, module.key_dim, module.value_dim))
    normed = out / (out.square().mean(-1, keepdim=True) + module.norm.eps).sqrt() * module.norm.weight
    return F.linear((normed * F.silu(project["z"].unflatten(1, (-1, module.value_dim)))).flatten(1), module.o_proj.weight)


def all_by_the_loop(module, x, documents=DOCUMENTS):
    """Documents one by one, and every canvas as the end of the tokens before it."""
    results, begin, canvas = [], 0, sum(length for length, _ in documents)
    canvases = []
    for length, starts in documents:
        results.append(by_the_loop(module, x[begin:begin + length]))
        for start in starts:
            whole = torch.cat([x[begin:begin + start], x[canvas:canvas + CANVAS]])
            canvases.append(by_the_loop(module, whole)[start:])
            canvas += CANVAS
        begin += length
    return torch.cat(results + canvases)


def compare(found, expected, leaves, tolerance=1e-10):
    """Values, and the gradients of some scalar of them."""
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    pairs = [(found, expected), *zip(*(torch.autograd.grad((y * weight).sum(), leaves) for y in (found, expected)), strict=True)]
    for one, other in pairs:
        assert (one - other).abs().max() <= tolerance * max(other.abs().max(), 1)
        assert other.abs().max() > 1e-3


@pytest.mark.parametrize("kernel", [4, 1])
def test_layer_computes_the_recurrence(kernel):
    """Clean tokens of packed documents, and canvases that go on from inside them."""
    module, seen = layer(kernel=kernel), visibility()
    x = tokens(len(seen.canvas_id)).requires_grad_()
    plan = gated_delta_plan(first_runs(seen, None), kernel, CPU)
    found, kept = module(x, plan, None)
    assert kept is None
    compare(found, all_by_the_loop(module, x), [x, *module.parameters()])


def test_second_loop_goes_on_from_what_the_first_kept():
    """Gradients go back through states and tails; the canvases alone, compacted to some of them."""
    module, seen = layer(), visibility()
    again = np.isin(seen.canvas_keys, [0, 2, 4, 5])
    clean, canvas = tokens(seen.num_clean_keys).requires_grad_(), tokens(len(seen.canvas_keys), seed=1).requires_grad_()
    first, context = module(torch.cat([clean, canvas.detach()]), gated_delta_plan(first_runs(seen, again), 4, CPU), None)
    assert context.state.shape == (4, 4, 6, 5) and context.tail.shape == (4, 3, 2 * 12 + 20)
    found, _ = module(canvas[torch.from_numpy(again)], gated_delta_plan(second_runs(seen, again), 4, CPU), context)
    chosen = torch.from_numpy(np.concatenate([np.zeros(seen.num_clean_keys, bool), again]))
    compare(found, all_by_the_loop(module, torch.cat([clean, canvas]))[chosen], [clean, canvas, *module.parameters()])


@pytest.mark.parametrize("pieces", [((90, 2, 0), (1, 0, 7), (40, 66, 1)), ((0, 64, 64), (64, 0, 64))], ids=str)
def test_appended_tokens_go_on_from_each_rows_end(pieces):
    """Rows of unequal length, some without new tokens, some without any yet."""
    module, rows, parts, context = layer(), [tokens(sum(c), seed=r) for r, c in enumerate(zip(*pieces, strict=True))], [], None
    for number, counts in enumerate(pieces):
        starts = [sum(piece[row] for piece in pieces[:number]) for row in range(3)]
        x = torch.cat([rows[row][start:start + count] for row, (start, count) in enumerate(zip(starts, counts, strict=True))])
        y, context = module(x, gated_delta_plan(appended_runs(counts, context is not None), 4, CPU), context)
        parts.append(y.split(counts))
    for row, whole in enumerate(rows):
        torch.testing.assert_close(torch.cat([part[row] for part in parts]), by_the_loop(module, whole), rtol=1e-10, atol=1e-10)


def test_a_canvas_is_causal_inside():
    module, seen = layer(), visibility()
    plan, x = gated_delta_plan(first_runs(seen, None), 4, CPU), tokens(len(seen.canvas_id))
    before = module(x, plan, None)[0]
    x[seen.num_clean_keys + 2] += 1  # the third token of the first canvas
    moved = np.flatnonzero((module(x, plan, None)[0] - before).abs().amax(1).detach().numpy() > 1e-12)
    assert moved.tolist() == [seen.num_clean_keys + i for i in (2, 3, 4)]


def test_runs_of_a_pass():
    """The docstring's example: a b c d e, a canvas of two before d."""
    seen = Visibility(np.array([0] * 5 + [0, 0]), np.array([1, 2, 3, 4, 5, 3, 3]), np.array([-1] * 5 + [0, 0]), np.array([0, 0]), 5)
    again = np.array([True, True])
    assert first_runs(seen, again) == Runs((3, 2, 2), (0, 1, 1), kept=(1,))
    assert first_runs(seen, ~again).kept == () and first_runs(seen, None).kept is None
    assert second_runs(seen, again) == Runs((2,), (1,), num_contexts=1)
    plan = gated_delta_plan(first_runs(seen, again), 3, CPU)
    # Known rows: 0 zero, 1..7 the tokens a b c d e x y; before run 0 nothing, before the others b c.
    assert plan.tails.tolist() == [0, 0, 2, 3, 2, 3] and plan.kept_tails.tolist() == [2, 3]
    assert [(level.start, level.stop, level.parents.tolist()) for level in plan.levels] == [(0, 1, [0]), (1, 3, [0, 0])]
    assert plan.kept_states.tolist() == [1]


def test_rows_of_fill_are_zero():
    module, seen = layer(), visibility(((4, ()),))
    plan = gated_delta_plan(first_runs(seen, None), 4, CPU)
    y, _ = module(tokens(6), plan, None)
    assert not y[4:].any() and torch.equal(y[:4], module(tokens(6)[:4], plan, None)[0])


def test_no_tokens():
    """A rank without rows of its own still takes part."""
    module = layer()
    seen = visibility(((3, (2,)),))
    _, context = module(tokens(8), gated_delta_plan(first_runs(seen, np.zeros(CANVAS, bool)), 4, CPU), None)
    assert context.state.shape == (0, 4, 6, 5) and context.tail.shape == (0, 3, 44)
    y, kept = module(tokens(0).requires_grad_(), gated_delta_plan(second_runs(seen, np.zeros(CANVAS, bool)), 4, CPU), context)
    assert y.shape == (0, 7) and kept is None
    y.sum().backward()


def test_normalize_pair():
    q, k = (tokens(4, seed=s).requires_grad_() for s in (0, 1))
    assert torch.autograd.gradcheck(normalize_pair, (q, k))
    low = [tokens(4, seed=s, dtype=torch.bfloat16).requires_grad_() for s in (0, 1)]
    results = normalize_pair(*low)
    grads = [tokens(4, seed=s, dtype=torch.bfloat16) for s in (2, 3)]
    torch.autograd.backward(results, grads)
    for x, y, grad in zip(low, results, grads, strict=True):
        rstd = (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        rounded, dy = y.float(), grad.float()
        assert torch.equal(x.grad, (rstd * (dy - rounded * (dy * rounded).sum(-1, keepdim=True))).bfloat16())
        exact = x.float() * rstd
        assert not torch.equal(x.grad, (rstd * (dy - exact * (dy * exact).sum(-1, keepdim=True))).bfloat16())


def test_long_decays_stay_finite():
    """Beside a decay that leaves nothing, the masked half of the decay matrix would overflow."""
    module, seen = layer(torch.float32), visibility(((64, ()),))
    with torch.no_grad():
        module.A_log.fill_(8.0)
    x = tokens(64, dtype=torch.float32).requires_grad_()
    module(x, gated_delta_plan(first_runs(seen, None), 4, CPU), None)[0].square().sum().backward()
    assert torch.isfinite(x.grad).all() and all(torch.isfinite(p.grad).all() for p in module.parameters())


def test_bf16_holds_states_and_gates_in_fp32():
    module, seen = layer(torch.bfloat16), visibility(((9, (4,)),))
    y, kept = module(tokens(14, dtype=torch.bfloat16), gated_delta_plan(first_runs(seen, np.ones(CANVAS, bool)), 4, CPU), None)
    assert (y.dtype, kept.state.dtype, kept.tail.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert {n for n, p in module.named_parameters() if p.dtype == torch.float32} == {"A_log", "dt_bias"}
    assert all(p.placement.hold_fp32 == (p.dtype == torch.float32) for p in module.parameters())


def test_recompute_and_repeats_change_no_bit():
    seen, results = visibility(), []
    for parts in ((), (), ("core_attn",)):
        module, x = layer(torch.float32, recompute=parts), tokens(len(seen.canvas_id), dtype=torch.float32).requires_grad_()
        plan = gated_delta_plan(first_runs(seen, np.ones(len(seen.canvas_keys), bool)), 4, CPU)
        y, kept = module(x, plan, None)
        (y.square().sum() + kept.state.square().sum()).backward()
        results.append([y, x.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(one, other) for again in results[1:] for one, other in zip(results[0], again, strict=True))


def test_generation_goes_on_from_the_same_state():
    """Encoding in pieces, and a canvas without any token before it."""
    model = toy_model(config=LINEAR)
    text = [torch.arange(3, 3 + n) % 50 + 3 for n in (9, 5)]
    canvas = torch.arange(8).view(2, 4)
    logits = []
    for cuts in ((), (4,), (0, 5)):
        session, rows = Session(model, 2), torch.tensor([0, 1])
        session.denoise(canvas, None, rows)
        for start, stop in zip((0, *cuts), (*cuts, 9), strict=True):
            session.encode([row[start:stop] for row in text])
        logits.append(session.denoise(canvas, None, rows))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(logits[2], logits[0], rtol=1e-10, atol=1e-10)


def test_linear_attention_freq():
    types = parse(["--preset", "toy", "--linear-attention-freq", "3"]).model.layer_types
    assert types == ("linear", "linear", "sliding", "linear", "linear", "full")
    with pytest.raises(ValueError, match="both say which layers are linear"):
        parse(["--preset", "toy", "--linear-attention-freq", "3", "--layer-types", "linear*5,full"])
    with pytest.raises(ValueError, match="set it to 2 or more"):
        parse(["--preset", "toy", "--linear-attention-freq", "1"])


def test_export_is_refused():
    with pytest.raises(ValueError, match=r"linear layers \(0\)"):
        LINEAR.to_transformers()


def test_linear_attention_freq_with_a_checkpoint(tmp_path):
    """The command line that began a run also resumes it; another frequency is refused."""
    words = ["--preset", "toy", "--linear-attention-freq"]
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    (folder / "args.txt").write_text(to_arguments_text(parse([*words, "3"])))
    (folder / "complete.json").write_text("{}")
    stored = parse(["--load", str(tmp_path)]).model
    assert stored.linear_layers == (0, 1, 3, 4)
    for again in ([*words, "3"], [words[-1], "3"]):
        assert parse([*again, "--load", str(tmp_path)]).model == stored
    for other in ([*words, "2"], [words[-1], "2"]):
        with pytest.raises(ValueError, match="leave the flag out, or start from another checkpoint"):
            parse([*other, "--load", str(tmp_path)])


def test_chunks_follow_those_of_their_own_run():
    """After a run of one chunk, a longer run has other numbers in the levels that follow than in the first one."""
    plan = gated_delta_plan(Runs((10, 3 * CHUNK, 2 * CHUNK + 1), (0, 0, 0)), 4, torch.device("cpu"))
    assert [level.parents.tolist() for level in plan.levels] == [[0, 0, 0], [1, 2], [0, 1]]
    assert [(level.start, level.stop) for level in plan.levels] == [(0, 3), (3, 5), (5, 7)]
