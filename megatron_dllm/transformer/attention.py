"""Self-attention of one layer over flat tokens [clean ; canvas], after an optional context of earlier clean keys."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..context_parallel.plan import ShardedPlan
from ..kernels.launch import takes
from ..parallel import ParallelContext
from ..tensor_parallel import ColumnParallelLinear, RowParallelLinear, column_layers, local_heads
from ..tensor_parallel.dropout import TokenDraws
from ..tensor_parallel.initialization import Init
from ..tensor_parallel.linear import unadapted
from .core_attention import AttentionPlan, attend
from .key_cache import BlockPlan, KeyCache
from .norms import RMSNorm, rms_norm
from .packed_attention import PackedPlan
from .precision import accumulation_dtype
from .recompute import Recompute
from .rotary import norm_and_rotate, norm_and_rotate_pair, norm_heads, norm_heads_and_keep, norm_joined_heads
from .rows import take_distinct
from .token_pass import LayerContext, LayerPass, ReplacedContext


class SelfAttention(nn.Module):
    """Grouped-query attention, scale 1.0: q = rope(q_norm(Wq x)), k = rope(k_norm(Wk x)), v = norm(Wv x) without scale or rope.

    Full layers have no Wv: v is the normed Wk x, taken before k_norm and rope (docs/model.md section 2).
    """

    def __init__(self, name: str, config: ModelConfig, layer: int, *, context: ParallelContext, init: Init, dtype: torch.dtype,
                 recompute: Recompute):
        super().__init__()
        self.recompute, self.cp, self.turn = recompute, context.cp, norm_and_rotate_pair
        self.head_dim, self.eps = config.head_dim(layer), config.norm_epsilon
        queries, keys = (heads * self.head_dim for heads in (config.num_attention_heads, config.kv_heads(layer)))
        copies = local_heads(config.num_attention_heads, config.kv_heads(layer), context.tp).kv_copies
        shared = {"context": context, "init": init, "dtype": dtype}
        self.q_proj = ColumnParallelLinear(f"{name}.q_proj.weight", (queries, config.hidden_size), **shared)
        self.k_proj = ColumnParallelLinear(f"{name}.k_proj.weight", (keys, config.hidden_size), copies=copies, **shared)
        self.v_proj = None
        if not config.is_full(layer):
            self.v_proj = ColumnParallelLinear(f"{name}.v_proj.weight", (keys, config.hidden_size), copies=copies, **shared)
        self.o_proj = RowParallelLinear(f"{name}.o_proj.weight", (config.hidden_size, queries), **shared)
        norm = {"eps": self.eps, "context": context, "partial": context.tp.size > 1, "dtype": dtype}
        self.q_norm, self.k_norm = (RMSNorm(f"{name}.{which}_norm", self.head_dim, **norm) for which in "qk")

    def forward(self, x: Tensor, layer_pass: LayerPass, earlier: LayerContext | ReplacedContext | KeyCache | None,
                ) -> tuple[Tensor, LayerContext | ReplacedContext | None]:
        """y [T, H] from x [T, H], and the keys and values that a later pass needs. A cache at fixed addresses gets them by itself."""
        if self._projects_at_once(x):
            query, key, value, *kept = self._normed_at_once(x, layer_pass)
        else:
            keeps = layer_pass.kept is not None and earlier is None
            query, key, value, *kept = self._normed(*self._project(x, layer_pass.draws), layer_pass, keeps=keeps)
        if isinstance(layer_pass.attention, BlockPlan):
            return self.o_proj(layer_pass.attention.attend(query, key, value, earlier).flatten(1), layer_pass.draws), None
        if earlier is not None:
            key, value = earlier.followed_by(key, value)
        out = self.recompute("core_attn", self._attend, query, key, value, layer_pass.attention)
        if layer_pass.kept is not None and not kept:
            kept = take_distinct(key, layer_pass.kept), take_distinct(value, layer_pass.kept)
        y = self.o_proj(out.flatten(1), layer_pass.draws)
        if layer_pass.replaced is not None:
            return y, ReplacedContext(key.detach(), value.detach(), layer_pass.replaced)
        return y, LayerContext(*kept) if kept else None

    def context(self, x: Tensor, layer_pass: LayerPass) -> LayerContext:
        """The keys and values of x [T, H], the first tokens of a pass, for a pass of later ones: where nobody asks what x attends to."""
        projections, draws = self._projections[1:], None if layer_pass.draws is None else layer_pass.draws.map(lambda words: words[:len(x)])
        key, *value = (y.unflatten(-1, (-1, self.head_dim)) for y in column_layers(x, projections, draws))
        turned = norm_and_rotate(key, self.k_norm.weight, layer_pass.rotary[:len(x)], self.eps)
        return LayerContext(turned, rms_norm(value[0] if value else key, None, self.eps))

    def _normed(self, query: Tensor, key: Tensor, value: Tensor, layer_pass: LayerPass, *, keeps: bool) -> tuple[Tensor, ...]:
        """All three normed, queries and keys turned; with `keeps`, where our kernel does it, also the keys and values to hand on."""
        weights, table = (self.q_norm.weight, self.k_norm.weight), layer_pass.rotary
        if self.turn is norm_and_rotate_pair:
            if keeps and takes(query):
                num_live = None if layer_pass.draws is None else layer_pass.draws.num_live
                return norm_heads_and_keep(query, key, value, *weights, table, self.eps, layer_pass.places, len(layer_pass.kept), num_live)
            return norm_heads(query, key, value, *weights, table, self.eps)
        return *self.turn(query, key, *weights, table, self.eps), rms_norm(value, None, self.eps)

    def _projects_at_once(self, x: Tensor) -> bool:
        """Whether one product makes queries, keys and values: on a CPU, where a product and its gradients cost more than the copy of small
        weights."""
        alone = all(layer.adapter is unadapted and layer.factors is None and layer.product is F.linear for layer in self._projections)
        # In 16 bits each product is rounded by itself, as it is on GPUs.
        on_cpu = not x.is_cuda and x.dtype == accumulation_dtype(x.dtype)
        return on_cpu and alone and self.q_proj.tp.size == 1 and self.turn is norm_and_rotate_pair

    def _normed_at_once(self, x: Tensor, layer_pass: LayerPass) -> tuple[Tensor, Tensor, Tensor]:
        """`_project` and `_normed` by one product."""
        weights = [layer.weight for layer in self._projections]
        joined = F.linear(x, torch.cat(weights)).unflatten(1, (-1, self.head_dim))
        num_queries, num_keys = (len(weight) // self.head_dim for weight in weights[:2])
        return norm_joined_heads(joined, num_queries, num_keys, self.q_norm.weight, self.k_norm.weight, layer_pass.rotary, self.eps)

    @property
    def _projections(self) -> list[ColumnParallelLinear]:
        return [self.q_proj, self.k_proj] if self.v_proj is None else [self.q_proj, self.k_proj, self.v_proj]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan | ShardedPlan | PackedPlan) -> Tensor:
        """[T, h, d]; generation has whole sequences also where training shares them."""
        if isinstance(plan, PackedPlan):
            return plan.attend(query, key, value)
        return plan.attend(query, key, value, self.cp) if isinstance(plan, ShardedPlan) else attend(query, key, value, plan)

    def _project(self, x: Tensor, draws: TokenDraws | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, h, d], raw keys and raw values [T, g, d]; x is gathered once for all of them."""
        query, key, *value = (y.unflatten(-1, (-1, self.head_dim)) for y in column_layers(x, self._projections, draws))
        return query, key, value[0] if value else key
