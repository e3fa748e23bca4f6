"""Trials of what layers are made of: each implementation that the code can choose, and the function that chooses."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dllm.kernels import reference
from megatron_dllm.kernels.launch import has_large_shared_memory
from megatron_dllm.moe import experts, permute, router
from megatron_dllm.transformer import hyper_connection, norms, residual_in_torch, rotary
from megatron_dllm.transformer.activations import gated_gelu
from megatron_dllm.transformer.core_attention import attend, attend_dense, attention_plan
from megatron_dllm.transformer.gated_delta_fla import FlaGatedDelta, check_fla
from megatron_dllm.transformer.gated_delta_plan import NOTHING, Runs, gated_delta_plan
from megatron_dllm.transformer.gated_delta_rule import Level, chunked_gated_delta_rule
from megatron_dllm.transformer.gated_delta_rule_reference import recurrent_gated_delta_rule
from megatron_dllm.transformer.rotary_flashinfer import FlashInferRotary, check_flashinfer
from megatron_dllm.transformer.visibility import CLEAN, Visibility

from .report import outcome_of
from .trials import Function, Trial, compared, numbers

EPS = 1e-6
TOKENS, HIDDEN, EXPERTS, CHOICES, INNER = 70, 128, 8, 2, 64
NORMS_APART = "torch, norms by themselves"  # whose kernel is taken on CUDA
NO_CUDA = "needs a CUDA device"
NO_SHARED_MEMORY = "needs sm_90 or sm_100, for their shared memory"


def trials(device: torch.device) -> Iterator[Trial]:
    """All of them, in the order of a layer."""
    yield from attention_trials(device)
    yield from gated_delta_trials(device)
    yield from row_trials(device)
    yield from expert_trials(device)
    yield from stream_trials(device)


def dtype_of(device: torch.device) -> torch.dtype:
    """What is usual there."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def pair(role: str, in_torch: Function, kernel: Callable[[], Function], oracle: Function, inputs: Callable[[torch.dtype], list[Tensor]],
         device: torch.device, dtype: torch.dtype | None = None, name: str = "torch") -> Iterator[Trial]:
    """Plain torch, and our kernel where there is CUDA; `kernel` imports it, for which Triton has to be there."""
    dtype = dtype or dtype_of(device)
    yield Trial(role, name, lambda: compared(in_torch, oracle, inputs(dtype)))
    yield Trial(role, "Triton kernel", lambda: compared(kernel(), oracle, inputs(dtype)), None if device.type == "cuda" else NO_CUDA)


def visibility() -> Visibility:
    """Two documents of 90 and 40 tokens; canvases of 16 after tokens 50 and 0 of the first and 20 of the second."""
    lengths, starts = (90, 40), ((0, 50), (0, 0), (90, 110))
    begins = np.repeat(np.cumsum((0, *lengths[:-1])), lengths)
    ids = np.repeat(np.arange(3), 16)
    first, past = (np.array([start[n] for start in starts])[ids] for n in range(2))
    return Visibility(np.concatenate([begins, first]), np.concatenate([np.arange(sum(lengths)) + 1, past]),
                      np.concatenate([np.full(sum(lengths), CLEAN), ids]), ids, sum(lengths))


def attention_trials(device: torch.device) -> Iterator[Trial]:
    """Work groups in fp32, which the kernels leave to them, and the kernels in bf16; the dense mask is the oracle."""
    seen = visibility()

    def measure(dtype: torch.dtype, head_dim: int, window: int | None) -> tuple[float, float]:
        inputs, plan = attention_inputs(seen, head_dim, dtype, device), attention_plan(seen, window, device)
        return compared(lambda q, k, v: attend(q, k, v, plan), lambda q, k, v: attend_dense(q, k, v, seen.windowed(window)), inputs)

    absent = None if has_large_shared_memory(device) else NO_CUDA if device.type != "cuda" else NO_SHARED_MEMORY
    for kind, window, head_dim in (("sliding", 24, 256), ("full", None, 512)):
        role = f"attention, {kind}, head {head_dim}"
        yield Trial(role, "torch: work groups", partial(measure, torch.float32, head_dim, window))
        yield Trial(role, "Triton kernels", partial(measure, torch.bfloat16, head_dim, window), absent)


def attention_inputs(seen: Visibility, head_dim: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Queries of four heads, keys and values of two; logits of a deviation of about 2."""
    count = len(seen.canvas_id)
    shapes = (count, 4, head_dim), (count, 2, head_dim), (count, 2, head_dim)
    query, key, value = (numbers(*shape, device=device, dtype=torch.float32, seed=n, grad=False) for n, shape in enumerate(shapes))
    shrink = 1.5 / head_dim**0.25
    return [x.to(dtype).requires_grad_() for x in (query * shrink, key * shrink, value)]


def gated_delta_trials(device: torch.device) -> Iterator[Trial]:
    """Two chunks of a sequence, and the whole of it in bf16 where it is a package's; the oracle is a loop over its tokens."""
    length, heads, size = 24, 2, 64

    def rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.zeros(1, dtype=torch.int64, device=query.device)
        chunks = [x.unflatten(0, (2, length // 2)) for x in (query, key, value, decay, beta)]
        start = query.new_zeros(1, heads, size, size)
        outputs, states = chunked_gated_delta_rule(*chunks, start, [Level(0, 1, first), Level(1, 2, first)])
        return outputs.flatten(0, 1), states[-1]

    def loop(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        return recurrent_gated_delta_rule(query, key, value, decay, beta, query.new_zeros(heads, size, size))

    def fla(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        plan = gated_delta_plan(Runs((length,), (NOTHING,), kept=(1,)), 4, device)
        start = torch.zeros(1, heads, size, size, device=device)
        outputs, states = FlaGatedDelta(chunk_gated_delta_rule)(query, key, value, decay, beta, start, plan)
        return outputs, states[0]

    def inputs(dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (numbers(length, heads, size, device=device, dtype=torch.float32, seed=n, grad=False) for n in range(3))
        decay, beta = (numbers(length, heads, device=device, dtype=torch.float32, seed=n, grad=False) for n in range(2))
        rows = (x.to(dtype) for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))
        return [x.requires_grad_() for x in (*rows, -F.softplus(decay), beta.sigmoid())]

    yield Trial("gated delta rule", "torch: chunks", lambda: compared(rule, loop, inputs(torch.float32)))
    refused = outcome_of(partial(check_fla, device, (size,)))
    absent = refused.first_line.partition("fla: ")[2] if refused.error else None
    yield Trial("gated delta rule", "flash-linear-attention", lambda: compared(fla, loop, inputs(torch.bfloat16)), absent, optional=True)


def row_trials(device: torch.device) -> Iterator[Trial]:
    """Norms, rotary and what stands between a layer's parts."""
    def weights(dtype: torch.dtype, count: int, size: int = HIDDEN) -> list[Tensor]:
        return [(numbers(size, device=device, dtype=dtype, seed=n, grad=False) / 4 + 1).requires_grad_() for n in range(count)]

    def rows(dtype: torch.dtype, count: int) -> list[Tensor]:
        return [numbers(TOKENS, HIDDEN, device=device, dtype=dtype, seed=n) for n in range(count)]

    def rms_norm_kernel() -> Function:
        from megatron_dllm.kernels import rms_norm as kernel

        return lambda x, w: kernel.rms_norm(x, w, EPS)

    yield from pair("RMSNorm", lambda x, w: norms._RMSNorm.apply(x, w, EPS), rms_norm_kernel, lambda x, w: reference.rms_norm(x, w, EPS),
                    lambda dtype: rows(dtype, 1) + weights(dtype, 1), device)

    angle = torch.rand(TOKENS, 32, generator=torch.Generator().manual_seed(4)).to(device) * 6
    cos, sin = angle.cos(), angle.sin()

    def rotary_kernel() -> Function:
        from megatron_dllm.kernels import norm_and_rotate as kernel

        return lambda x, w: kernel.norm_and_rotate(x, w, cos, sin, EPS)

    yield from pair("norm of heads, rotary",
                    lambda x, w: rotary.rotate(norms._RMSNorm.apply(x, w, EPS), rotary.RotaryTable(cos[:, None], sin[:, None])),
                    rotary_kernel, lambda x, w: reference.norm_and_rotate(x, w, cos.double(), sin.double(), EPS),
                    lambda dtype: [numbers(TOKENS, 4, 64, device=device, dtype=dtype), *weights(dtype, 1, 64)], device)

    def flashinfer(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        from flashinfer import apply_rope_with_cos_sin_cache

        one, table = torch.ones(64, device=device), rotary.RotaryTable(cos[:, None], sin[:, None])
        return FlashInferRotary(apply_rope_with_cos_sin_cache)(query, key, one, one, table, EPS)

    def heads() -> list[Tensor]:
        return [numbers(TOKENS, count, 64, device=device, dtype=dtype_of(device), seed=count, grad=False) for count in (4, 2)]

    def turned(*pair: Tensor) -> tuple[Tensor, ...]:
        return tuple(reference.norm_and_rotate(x, torch.ones_like(x[0, 0]), cos.double(), sin.double(), EPS) for x in pair)

    refused = outcome_of(partial(check_flashinfer, device, (64,)))
    yield Trial("norm of heads, rotary", "FlashInfer, no gradient", lambda: compared(flashinfer, turned, heads()),
                refused.first_line.partition("rope: ")[2] if refused.error else None, optional=True)

    def after_attention(function: Function) -> Function:
        return lambda x, y, w, a, b, c: function(x, y, w, (a, b, c), 0.5, EPS)

    def after_attention_kernel() -> Function:
        from megatron_dllm.kernels import residual as kernel

        return after_attention(kernel.after_attention)

    yield from pair("residual and norms after attention", after_attention(residual_in_torch.after_attention), after_attention_kernel,
                    after_attention(reference.after_attention), lambda dtype: rows(dtype, 2) + weights(dtype, 4), device, name=NORMS_APART)
    scalars = torch.tensor([0.75, 1.25], device=device)

    def after_feed_forward(function: Function) -> Function:
        return lambda h, a, b, u, v, w: function(h, a, b, u, v, w, scalars.to(h.dtype), TOKENS // 2, EPS)

    def after_feed_forward_kernel() -> Function:
        from megatron_dllm.kernels import residual as kernel

        return after_feed_forward(kernel.after_feed_forward)

    yield from pair("residual and norms after experts", after_feed_forward(residual_in_torch.after_feed_forward),
                    after_feed_forward_kernel, after_feed_forward(reference.after_feed_forward),
                    lambda dtype: rows(dtype, 3) + weights(dtype, 3), device, name=NORMS_APART)

    def gelu_kernel() -> Function:
        from megatron_dllm.kernels import gated_gelu as kernel

        return kernel.gated_gelu

    def gelu_in_torch(gate_up: Tensor) -> Tensor:
        return F.gelu(gate_up[:, 0], approximate="tanh") * gate_up[:, 1]

    yield from pair("gelu gate", gelu_in_torch, gelu_kernel, reference.gated_gelu,
                    lambda dtype: [numbers(TOKENS, 2, INNER, device=device, dtype=dtype)], device)


def expert_trials(device: torch.device) -> Iterator[Trial]:
    """Router, the way into expert order and back, and the products; one expert has no row."""
    draw = torch.Generator().manual_seed(2)
    indices = torch.rand(TOKENS, EXPERTS - 1, generator=draw).argsort(1)[:, :CHOICES].to(device)
    order = permute.sort_by_expert(indices, EXPERTS)
    num_rows = TOKENS * CHOICES

    def routed(function: Function) -> Function:
        def weights_and_probabilities(logits: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            weights, _, probabilities = function(logits, scale, None, CHOICES, None)
            return weights, probabilities
        return weights_and_probabilities

    def route_kernel() -> Function:
        from megatron_dllm.kernels import router as kernel

        return routed(kernel.route)

    yield from pair("router", routed(router.route_in_torch), route_kernel, routed(reference.route), lambda dtype: [
        numbers(TOKENS, EXPERTS, device=device, dtype=dtype), (numbers(EXPERTS, device=device, dtype=dtype, grad=False) / 4 + 1)
        .requires_grad_()], device, torch.float32)  # fmt: skip

    def permute_kernel() -> Function:
        from megatron_dllm.kernels import permute as kernel

        return lambda x: kernel.permute(x, order.row, num_rows)

    yield from pair("tokens into expert order", lambda x: permute._Permute.apply(x, order.slot, order.row, False), permute_kernel,
                    lambda x: reference.permute(x, order.row, num_rows),
                    lambda dtype: [numbers(TOKENS, HIDDEN, device=device, dtype=dtype)], device)

    def unpermute_kernel() -> Function:
        from megatron_dllm.kernels import permute as kernel

        return lambda rows, weights: kernel.unpermute(rows, weights, order.row)

    yield from pair("and back, weighted", lambda rows, weights: permute._Unpermute.apply(rows, weights, order.slot, order.row, False),
                    unpermute_kernel, lambda rows, weights: reference.unpermute(rows, weights, order.row),
                    lambda dtype: [numbers(num_rows, HIDDEN, device=device, dtype=dtype),
                                   numbers(TOKENS, CHOICES, device=device, dtype=torch.float32)], device)
    yield from product_trials(device, order.counts, num_rows)


def product_trials(device: torch.device, counts: Tensor, num_rows: int) -> Iterator[Trial]:
    """The experts' feed-forward: a loop, torch's grouped product, our kernels."""
    def feed_forward(product: experts.ExpertProduct) -> Function:
        return lambda rows, gate_up, down: product(gated_gelu(product(rows, gate_up.flatten(1, 2), counts).unflatten(1, (2, -1))), down,
                                                   counts)

    def inputs(dtype: torch.dtype) -> list[Tensor]:
        shapes = (num_rows, HIDDEN), (EXPERTS, 2, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
        draws = [numbers(*shape, device=device, dtype=torch.float32, seed=n, grad=False) for n, shape in enumerate(shapes)]
        return [x.to(dtype).requires_grad_() for x in (draws[0], draws[1] / HIDDEN**0.5, draws[2] / INNER**0.5)]

    def oracle(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return reference.grouped_mlp(rows, gate_up, down, counts)

    def kernels() -> tuple[float, float]:
        from megatron_dllm.kernels.grouped_mlp import grouped_mlp

        return compared(lambda rows, gate_up, down: grouped_mlp(rows, gate_up, down, counts), oracle, inputs(torch.bfloat16))

    dtype = dtype_of(device)
    yield Trial("experts", f"loop, {str(dtype)[6:]}", lambda: compared(feed_forward(experts.looped_linear), oracle, inputs(dtype)))
    yield Trial("experts", "torch: grouped_mm, bfloat16",
                lambda: compared(feed_forward(experts.grouped_linear), oracle, inputs(torch.bfloat16)))
    yield Trial("experts", "Triton kernels, bfloat16", kernels,
                None if has_large_shared_memory(device) else NO_CUDA if device.type != "cuda" else NO_SHARED_MEMORY)


def stream_trials(device: torch.device) -> Iterator[Trial]:
    """mHC: what a part reads of four streams, and how its output, here y times what it read, is written to them."""
    streams, rounds, on_cuda = 4, 20, device.type == "cuda"
    outputs = streams**2 + 2 * streams

    def chosen(x: Tensor, y: Tensor, *weights: Tensor) -> Tensor:
        read, x, post, res = hyper_connection._Read.apply(x, *weights, streams, rounds, None, None, None, None)
        return hyper_connection._Write.apply(x, y * read, hyper_connection.Mix(post, res, None), post, res, None, None)[0]

    def oracle(x: Tensor, y: Tensor, *weights: Tensor) -> Tensor:
        read, mapped = hyper_connection.read_in_torch(x, hyper_connection.Weights(*weights, streams, rounds))
        mixed = torch.einsum("tij,tjc->tic", mapped.res, x.unflatten(1, (streams, -1)))
        return (mixed + mapped.post[:, :, None] * (y * read)[:, None]).flatten(1)

    def inputs() -> list[Tensor]:
        low, wide = (partial(numbers, device=device, dtype=dtype) for dtype in (dtype_of(device), torch.float32))
        weight = (numbers(outputs, streams * HIDDEN, device=device, dtype=torch.float32, grad=False) / 20).requires_grad_()
        return [low(TOKENS, streams * HIDDEN), low(TOKENS, HIDDEN), weight, wide(3), wide(outputs)]

    yield Trial("mHC: streams read, written", "Triton kernels" if on_cuda else "torch", lambda: compared(chosen, oracle, inputs()))
    if not on_cuda:
        yield Trial("mHC: streams read, written", "Triton kernels", lambda: (0.0, 0.0), NO_CUDA)
