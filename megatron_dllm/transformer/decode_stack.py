"""All layers over caches at fixed addresses in few launches, for generation on one GPU: the same as the blocks one by one, without what a
backward, several ranks, adapters or residual streams need.

A layer, beside what TransformerBlock computes:

    one product for queries, keys and values, whose weights are copied side by side
    one kernel from there to the cache; attention over the cache
    the router's product by matrix units, and its choices from there
    the dense MLP of few tokens in the experts' launches, which wait for memory; that of many on a stream of its own, beside the router,
        the sorting of rows and the experts
    kernels that wait for one other launched before that has ended
    one kernel for the sum over a token's experts, the norms after it, and the norm that the next layer begins with
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from ..kernels.launch import has_large_shared_memory
from ..tensor_parallel.linear import unadapted
from .attention import SelfAttention
from .block import TransformerBlock
from .key_cache import KeyCache
from .norms import RMSNorm, rms_norm
from .rotary import norm_and_rotate_pair
from .token_pass import LayerPass, TokenPass

if TYPE_CHECKING:
    from ..kernels.expert_rows import ExpertRows  # Triton is there with CUDA alone

FEW_ROWS = 48  # of an expert, on average, up to which the kernels for few rows are taken
# Tokens whose dense MLP runs in the launches of the experts: more would read its weights again and again. A step of 256 took 16.49 ms on
# an H200, with the dense MLP beside the router 16.62; asking for the next weights ahead made it 16.86 and 16.51. On another day it took
# 16.06, with the dense layer's tiles between the experts' 15.93, and with kernels launched before the last ones have ended 15.8.
MOST_TOGETHER = 256


def suits_decode_stack(blocks: Sequence[TransformerBlock], config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether the blocks are such that their layers can run this way: bf16, on one rank and a device with the grouped products' memory,
    with nothing in the place of our own linear layers, norms, attention and experts, or beside them."""
    plain = dtype == torch.bfloat16 and not config.enable_mhc_connections
    return plain and all(type(block.attention) is SelfAttention and _is_plain(block) for block in blocks)


def _is_plain(block: TransformerBlock) -> bool:
    experts, attention = block.moe.experts, block.attention
    linears = [block.mlp.gate_up, block.mlp.down, attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    norms = [module for module in block.modules() if isinstance(module, RMSNorm)]
    return (experts.backend == "grouped_mlp" and has_large_shared_memory(experts.down.device) and block.tp.size == 1
            and attention.turn is norm_and_rotate_pair and block.moe.router.adapter is unadapted and block.moe.router.bias is None
            and all(norm.function is rms_norm for norm in norms)
            and all(linear is None or linear.adapter is unadapted and linear.product is F.linear for linear in linears))


class DecodeStack:
    """final hidden states, normed, of x [T, H], as DiffusionGemma.run_layers gives them, for blocks that suit."""

    def __init__(self, blocks: Sequence[TransformerBlock], final_norm: Tensor):
        device = final_norm.device
        self.layers = [DecodeLayer(block) for block in blocks]
        self.next_norms = [*(block.input_layernorm.weight for block in blocks[1:]), final_norm]
        self.beside = Beside(torch.cuda.Stream(device) if device.type == "cuda" else None)

    def __call__(self, x: Tensor, token_pass: TokenPass, caches: Mapping[int, KeyCache]) -> Tensor:
        first = self.layers[0].block.input_layernorm
        normed = rms_norm(x, first.weight, first.eps)
        for layer, cache, next_norm in zip(self.layers, caches.values(), self.next_norms, strict=True):
            x, normed = layer(x, normed, token_pass, cache, next_norm, self.beside)
        return normed


class Beside:
    """Work on a stream of its own, beside what is put on the current one; without a stream, in its turn."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self.stream, self.is_apart = stream, False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """What is done in this context starts after what is on the current stream so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        self.is_apart = True
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """What is put on the current stream from now on comes after what was done beside it."""
        # A recording must not wait for a stream that has no part in it.
        if self.is_apart:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.is_apart = False


class DecodeLayer:
    """One block; `projection` [(h + 2 g) d, H], or [(h + g) d, H] where values are raw keys, is a copy, as are the router's weights in
    parts, [3, E, H]."""

    def __init__(self, block: TransformerBlock):
        from ..kernels.router_logits import in_parts  # Triton is there with CUDA alone

        attention = block.attention
        projections = [attention.q_proj, attention.k_proj] + ([] if attention.v_proj is None else [attention.v_proj])
        self.block, self.projection = block, torch.cat([layer.weight.detach() for layer in projections])
        self.router_parts = in_parts(block.moe.router.weight.detach())

    def __call__(self, x: Tensor, normed: Tensor, token_pass: TokenPass, cache: KeyCache, next_norm: Tensor,
                 beside: Beside) -> tuple[Tensor, Tensor]:
        """(y, rms_norm(y, next_norm)) of x [T, H] and `normed`, what the layer's first norm makes of it."""
        from ..kernels import decode_residual, grouped_decode, grouped_many, router_logits  # Triton is there with CUDA alone
        from ..kernels.expert_rows import expert_rows

        block, eps = self.block, self.block.input_layernorm.eps
        router = block.moe.router
        attended = self._attend(normed, token_pass.layers[block.kind], cache)
        readers = block.pre_feedforward_layernorm.weight, block.pre_feedforward_layernorm_2.weight, router.scale
        h, for_mlp, for_experts, scaled = decode_residual.after_attention(
            x, attended, block.post_attention_layernorm.weight, readers, router.root, eps)
        is_few = len(x) * router.topk <= FEW_ROWS * len(router.weight)
        together = is_few and len(x) <= MOST_TOGETHER
        choose = partial(router_logits.choose_experts, scaled, self.router_parts, router.per_expert_scale, router.topk)
        if together:
            weights, indices = choose()
            rows = expert_rows(indices, len(router.weight), grouped_decode.UP_TILING.rows)
            dense, results = self._together(for_mlp, for_experts, rows)
        else:
            with beside():
                dense = block.mlp(for_mlp)
            weights, indices = choose()
            height = grouped_decode.UP_TILING.rows if is_few else grouped_many.UP_TILING.height
            rows = expert_rows(indices, len(router.weight), height)
            results = (self._by_few_rows if is_few else self._by_many_rows)(for_experts, rows)
            beside.join()
        norms = (block.post_feedforward_layernorm_1, block.post_feedforward_layernorm_2, block.post_feedforward_layernorm)
        scalar = block.layer_scalars[0 if token_pass.num_clean else 1]
        return decode_residual.finish_layer(
            h, dense, results, rows.row, weights, *(norm.weight for norm in norms), scalar, next_norm, eps, early=together)

    def _attend(self, normed: Tensor, layer_pass: LayerPass, cache: KeyCache) -> Tensor:
        from ..kernels import place_heads

        attention, plan, rotary = self.block.attention, layer_pass.attention, layer_pass.rotary
        heads = attention.q_proj.weight.shape[0] // attention.head_dim
        query = place_heads.place_heads(
            F.linear(normed, self.projection), attention.q_norm.weight, attention.k_norm.weight, rotary.cos[:, 0], rotary.sin[:, 0],
            plan.own, cache.key.flatten(0, 1), cache.value.flatten(0, 1), heads, attention.eps)
        out = plan.attend_placed(query, cache)
        plan.move(cache)
        return F.linear(out.flatten(1), attention.o_proj.weight)

    def _by_few_rows(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """The experts' results [N, H] of x [T, H]."""
        from ..kernels import grouped_decode

        experts = self.block.moe.experts
        activated, _ = grouped_decode.activated_rows(x, experts.gate_up, rows, grouped_decode.UP_TILING)
        return grouped_decode.narrowed_rows(activated, experts.down, rows, grouped_decode.DOWN_TILING)[0]

    def _together(self, for_mlp: Tensor, x: Tensor, rows: ExpertRows) -> tuple[Tensor, Tensor]:
        """What the dense MLP makes of `for_mlp` [T, H]; then as `_by_few_rows`. Right after the rows are made."""
        from ..kernels import grouped_decode

        experts, mlp = self.block.moe.experts, self.block.mlp
        part = grouped_decode.Dense(for_mlp, mlp.gate_up.weight, mlp.down.weight)
        activated, dense = grouped_decode.activated_rows(x, experts.gate_up, rows, grouped_decode.UP_TILING, dense=part, follows_one=True)
        results, dense = grouped_decode.narrowed_rows(
            activated, experts.down, rows, grouped_decode.TOGETHER_DOWN_TILING, dense=part, dense_activated=dense)
        return dense, results

    def _by_many_rows(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """As `_by_few_rows`; right after the rows are made."""
        from ..kernels import grouped_many

        experts = self.block.moe.experts
        activated = grouped_many.activated_rows(x, experts.gate_up, rows, grouped_many.UP_TILING)
        return grouped_many.narrowed_rows(activated, experts.down, rows, grouped_many.DOWN_TILING)
