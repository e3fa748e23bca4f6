"""Attention, rotary positions and cross entropy by the package itself on a GPU: against float64, at twice the error of others in bf16."""
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dllm.diffusion.inputs import to_device
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import linear_cross_entropy
from megatron_dllm.transformer.core_attention import attend_dense
from megatron_dllm.transformer.packed_attention import packed_plan
from megatron_dllm.transformer.rotary import inverse_frequencies, norm_and_rotate_pair, rotary_table
from megatron_dllm.transformer.visibility import Visibility
from megatron_dllm.transformer_engine import Engine, install
from megatron_dllm.transformer_engine.cross_entropy import engine_cross_entropy
from megatron_dllm.transformer_engine.norms import engine_rms_norm
from megatron_dllm.transformer_engine.rotary import EngineRotary
from tests.unit.test_transformer_engine_gpu import CUDA, WIDE, check, engine_of, numbers
from tests.unit.test_transformer_engine_roles import BOTH, visibility_of
from tests.unit.toy import toy_inputs, toy_model, toy_plan

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # the package warns when it is imported
TOKENS = 37


def engine() -> Engine:
    return engine_of(grouped=False)


def attend_in_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """From the mask as a whole, bool [Q, K], in the dtype given."""
    repeats = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)[0].transpose(0, 1)


def attention_inputs(visibility: Visibility, heads: int, groups: int, head_dim: int) -> list[Tensor]:
    num_keys = visibility.num_clean_keys + len(visibility.canvas_keys)
    shapes = ((len(visibility.canvas_id), heads, head_dim), (num_keys, groups, head_dim), (num_keys, groups, head_dim))
    return [numbers(*shape, seed=seed, scale=scale) for seed, (shape, scale) in enumerate(zip(shapes, (0.25, 0.25, 1.0), strict=True))]


BATCHES = {"odd": ([1, 300, 129, 37], [(1, 299, 33), (1, 20, 16), (3, 1, 3)]), "clean alone": ([64, 192], []),
           "a canvas alone": ([0], [(0, 0, 256)])}


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("head_dim", [8, 64, 256])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention(head_dim, window, batch):
    engine()
    lengths, canvases = BATCHES[batch]
    visibility = visibility_of(lengths, canvases)
    seen = visibility.windowed(window)
    mask, plan = torch.from_numpy(seen.dense()).to(CUDA), packed_plan(visibility, window, CUDA)
    check(plan.attend, partial(attend_in_torch, mask=mask), partial(attend_dense, visibility=seen),
          attention_inputs(visibility, 4, 2, head_dim), None)


def test_attention_after_kept_keys():
    """As a second pass has it: canvases alone, over some of the clean keys, which stand in another order."""
    engine()
    whole = visibility_of([200, 77], [(0, 130, 40), (1, 70, 24)])
    queries = whole.canvas_id >= 0
    visibility = whole.against_kept(queries, np.arange(277))
    order = np.random.default_rng(0).permutation(277)
    places = torch.from_numpy(np.concatenate([order, np.arange(277, 277 + 64)])).to(CUDA)
    mask, plan = torch.from_numpy(visibility.dense()).to(CUDA), packed_plan(visibility, None, CUDA, order)
    check(plan.attend, lambda q, k, v: attend_in_torch(q, k[places], v[places], mask),
          lambda q, k, v: attend_dense(q, k[places], v[places], visibility), attention_inputs(visibility, 4, 2, 128), None)


def test_the_host_waits_for_nothing():
    engine()
    visibility = visibility_of([300, 129], [(1, 100, 32)])
    plan, tensors = packed_plan(visibility, 100, CUDA), [x.requires_grad_() for x in attention_inputs(visibility, 4, 2, 128)]
    for mode in ("default", "error"):  # the first call plans
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out = plan.attend(*tensors)
            torch.autograd.grad(out, tensors, torch.ones_like(out))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("head_dim", "fraction"), [(256, 1.0), (512, 0.25)])
@pytest.mark.parametrize("tokens", [1, 300])
def test_rotary(head_dim, fraction, tokens):
    """Of queries and keys that are parts of one projection, at positions up to 100,000."""
    engine()
    positions = 331 * torch.arange(tokens, device=CUDA)
    table = rotary_table(positions, inverse_frequencies(head_dim, 1e6, fraction, CUDA))

    def both(turn, projection: Tensor, *weights: Tensor) -> Tensor:
        query, key = projection.unflatten(1, (6, head_dim)).split([4, 2], dim=1)
        return torch.cat(turn(query, key, *weights, table, 1e-6), dim=1)

    inputs = [numbers(tokens, 6 * head_dim), *(1 + 0.2 * numbers(head_dim, seed=seed) for seed in (1, 2))]
    check(partial(both, EngineRotary(engine_rms_norm())), partial(both, norm_and_rotate_pair), partial(both, norm_and_rotate_pair), inputs,
          None)


@pytest.mark.parametrize("loo", [False, True])
@pytest.mark.parametrize("softcap", [30.0, None])
@pytest.mark.parametrize("vocabulary", [501, 50_003])
def test_cross_entropy(vocabulary, softcap, loo):
    """The larger vocabulary takes the package's kernel two pieces a row; the last chunk is a short one."""
    logit_loss, draw = engine_cross_entropy(engine()), torch.Generator().manual_seed(3)
    targets, observed = (torch.randint(0, vocabulary, (TOKENS,), generator=draw).to(CUDA) for _ in range(2))
    targets[0], targets[1], observed[2] = 0, vocabulary - 1, targets[2]
    weights, bonus = torch.rand(2, TOKENS, generator=draw).to(CUDA)
    weights[5] = 0
    score = partial(linear_cross_entropy, targets=targets, token_weights=weights, softcap=softcap, tp=ParallelContext.single(CUDA).tp,
                    vocab_size=vocabulary, observed=observed if loo else None, bonus=3 * bonus if loo else None,
                    chunk_bytes=16 * vocabulary * 4)
    inputs = [numbers(TOKENS, 64), numbers(vocabulary, 64, seed=1, scale=0.3)]
    check(lambda *x: score(*x, logit_loss=logit_loss).loss, lambda *x: score(*x).loss, lambda *x: score(*x).loss, inputs, None)
    found, wanted = score(*inputs, logit_loss=logit_loss), score(*(x.double() for x in inputs))
    assert torch.equal(found.correct, wanted.correct)
    torch.testing.assert_close(found.per_token.double(), wanted.per_token, rtol=1e-4, atol=1e-4)


def test_a_model():
    """Loss and gradients of the toy with all three roles."""
    plan = toy_plan(config=WIDE)

    def run(model, **options) -> tuple[float, Tensor]:
        inputs = toy_inputs(plan, config=WIDE, dtype=torch.promote_types(model.dtype, torch.float32), **options)
        total = model(to_device(inputs, model.context.device)).total
        total.backward()
        return total.item(), torch.cat([p.grad.cpu().double().flatten() for p in model.parameters()])

    exact_loss, exact = run(toy_model(config=WIDE))
    context = ParallelContext.single(CUDA)
    loss, gradient = run(toy_model(torch.bfloat16, config=WIDE, context=context))
    model = toy_model(torch.bfloat16, config=WIDE, context=context)
    install(model, Engine(engine().package, rotary=True, cross_entropy=True))
    low_loss, low_gradient = run(model, **BOTH)
    own, found = (((g - exact).norm() / exact.norm()).item() for g in (gradient, low_gradient))
    print(f"loss {exact_loss:.5f}, bf16 {loss:.5f}, package {low_loss:.5f}; gradients off by {own:.1e}, package {found:.1e}")
    assert found <= 2 * own and abs(low_loss - exact_loss) <= 0.01 * exact_loss
