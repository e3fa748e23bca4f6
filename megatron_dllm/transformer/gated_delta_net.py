"""Gated delta net: attention of cost linear in the sequence, by a state that every token decays, reads and corrects.

It is causal everywhere: on clean tokens, and inside a canvas too, whose first token goes on from the clean tokens before the canvas.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..context_parallel.heads import heads_of
from ..parallel import ParallelContext, place
from ..tensor_parallel import ColumnParallelLinear, RowParallelLinear, column_layers
from ..tensor_parallel.initialization import Constant, Init, make_parameter
from .gated_delta_plan import GatedDeltaPlan
from .gated_delta_rule import CHUNK, chunked_gated_delta_rule
from .norms import RMSNorm
from .precision import accumulation_dtype, at_least_fp32
from .recompute import Recompute
from .rows import take_distinct

LARGEST_DECAY = 16.0  # heads start with decay rates from 1 to this


@dataclass(frozen=True)
class GatedDeltaContext:
    """What goes on after S places in the clean stream: state [S, h, k, v], at least fp32, and the last K-1 rows before the convolution
    [S, K-1, channels]. An output of one pass and an input of another, gradients included."""

    state: Tensor
    tail: Tensor


class GatedDeltaNet(nn.Module):
    """With h value heads (q and k heads are repeated to as many), each token's q, k, v after a short causal convolution and silu:

        S = exp(-exp(A_log) softplus(Wa x + dt_bias)) S;  S = S + k (sigmoid(Wb x) (v - S^T k))^T;  o = S^T q / sqrt(dk)
        y = Wo (norm(o) * silu(Wz x)), q and k of length 1

    Heads are cut over tp: q_proj, k_proj, v_proj, z_proj, a_proj, b_proj, the convolutions [channels, K], A_log and dt_bias [h] by output,
    o_proj by input. Under context parallelism a rank trades its tokens for all tokens of a share of these heads, of which it then has
    states and tails too. A_log and dt_bias are held in at least fp32; decay and state are computed in it.

    `rule` computes o [T, h, v] and the states to keep from q and k [T, h, k], v [T, h, v], the log of the decay and beta [T, h],
    the states [1 + S, h, k, v] that the plan's runs start from (the first is zero), and the plan.
    """

    def __init__(self, name: str, config: ModelConfig, layer: int, *, context: ParallelContext, init: Init, dtype: torch.dtype,
                 recompute: Recompute):
        super().__init__()
        self.recompute, self.cp, self.rule = recompute, context.cp, chunked_rule
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        heads, kernel = config.linear_num_value_heads, config.linear_conv_kernel_dim
        self.repeats, self.kernel = heads // config.linear_num_key_heads, kernel
        keys, values = config.linear_num_key_heads * self.key_dim, heads * self.value_dim
        shared = {"context": context, "init": init, "dtype": dtype}

        def column(which: str, features: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(f"{name}.{which}.weight", (features, config.hidden_size), **shared)

        def parameter(which: str, shape: tuple[int, ...], how: Init, *, hold_fp32: bool = False) -> nn.Parameter:
            placement = place(shape, context, cut={"tp": 0}, hold_fp32=hold_fp32)
            held = accumulation_dtype(dtype) if hold_fp32 else dtype
            return make_parameter(f"{name}.{which}", placement, init=how, dtype=held, device=context.device)

        self.q_proj, self.k_proj, self.v_proj = column("q_proj", keys), column("k_proj", keys), column("v_proj", values)
        self.z_proj, self.a_proj, self.b_proj = column("z_proj", values), column("a_proj", heads), column("b_proj", heads)
        narrow = init.with_std((3 * kernel) ** -0.5)
        self.q_conv, self.k_conv = parameter("q_conv", (keys, kernel), narrow), parameter("k_conv", (keys, kernel), narrow)
        self.v_conv = parameter("v_conv", (values, kernel), narrow)
        self.A_log = parameter("A_log", (heads,), _LogRates(), hold_fp32=True)
        self.dt_bias = parameter("dt_bias", (heads,), Constant(1.0), hold_fp32=True)
        self.norm = RMSNorm(f"{name}.norm", self.value_dim, eps=config.norm_epsilon, context=context, dtype=dtype,
                            partial=context.tp.size > 1)
        self.o_proj = RowParallelLinear(f"{name}.o_proj.weight", (config.hidden_size, values), **shared)

    def forward(self, x: Tensor, layer_pass: GatedDeltaPlan, earlier: GatedDeltaContext | None) -> tuple[Tensor, GatedDeltaContext | None]:
        """y [T, H] from x [T, H], and the states and tails that a later pass needs."""
        projections = (self.q_proj, self.k_proj, self.v_proj, self.z_proj, self.a_proj, self.b_proj)
        q, k, v, z, a, b = column_layers(x, projections)
        sizes = (self.key_dim, self.key_dim, self.value_dim, 1, 1)
        q, k, v, a, b = (self._of_our_heads(t, size, layer_pass) for t, size in zip((q, k, v, a, b), sizes, strict=True))
        mixed, tails = self._with_tails(torch.cat([q, k, v], -1), layer_pass, earlier)
        initial = self._initial_states(mixed, layer_pass, earlier)
        out, kept_state = self.recompute("core_attn", self._mix, mixed, a, b, initial, layer_pass)
        out = out if layer_pass.trade is None else layer_pass.trade.to_tokens(out, self.cp)
        heads = F.pad(out, (0, 0, 0, 0, 0, len(z) - len(out))).to(z.dtype)  # rows of fill
        gated = self.norm(heads) * F.silu(z.unflatten(-1, (-1, self.value_dim)))
        kept = None if kept_state is None else GatedDeltaContext(kept_state, tails)
        return self.o_proj(gated.flatten(1)), kept

    def _of_our_heads(self, x: Tensor, size: int, plan: GatedDeltaPlan) -> Tensor:
        """[all tokens, our heads * size] from the rows of our tokens [.., heads * size], fill at their end."""
        if plan.trade is None:
            return x[:plan.num_tokens]
        own = x[:plan.trade.counts[self.cp.rank]]
        return plan.trade.to_heads(own.unflatten(1, (-1, size)), self.cp).flatten(1)

    def _for_our_heads(self, parameter: Tensor, size: int, plan: GatedDeltaPlan) -> Tensor:
        """The part [our heads * size, ...] of a parameter of all heads of this tp rank."""
        if plan.trade is None:
            return parameter
        heads = len(parameter) // size
        own = heads_of(self.cp.rank, self.cp.size, heads)
        return parameter[own.start * size:own.stop * size]

    def _with_tails(self, rows: Tensor, plan: GatedDeltaPlan, earlier: GatedDeltaContext | None) -> tuple[Tensor, Tensor | None]:
        """Every run with the K-1 rows before it, and the tails to keep [S, K-1, channels]."""
        known = [rows.new_zeros(1, rows.shape[1]), *([] if earlier is None else [earlier.tail.flatten(0, 1)]), rows]
        known = torch.cat(known)
        kept = None if plan.kept_tails is None else known[plan.kept_tails].unflatten(0, (len(plan.kept_states), self.kernel - 1))
        # Rows may be in several tails, and gradients of these few are added up; the tokens themselves are only moved.
        return take_distinct(torch.cat([known[plan.tails], rows]), plan.unrolled), kept

    def _initial_states(self, rows: Tensor, plan: GatedDeltaPlan, earlier: GatedDeltaContext | None) -> Tensor:
        """[1 + S, h, k, v]: zero, then the kept ones."""
        shape = (1, len(self._for_our_heads(self.A_log, 1, plan)), self.key_dim, self.value_dim)
        zero = torch.zeros(shape, dtype=accumulation_dtype(rows.dtype), device=rows.device)
        return zero if earlier is None else torch.cat([zero, earlier.state])

    def _mix(self, unrolled: Tensor, a: Tensor, b: Tensor, initial: Tensor, plan: GatedDeltaPlan) -> tuple[Tensor, Tensor | None]:
        """o [T, h, v] and the states to keep."""
        if plan.num_tokens == 0:
            return initial.new_zeros(0, *initial.shape[1::2]), None if plan.kept_states is None else initial[plan.kept_states]
        sizes = {"q_conv": self.key_dim, "k_conv": self.key_dim, "v_conv": self.value_dim, "A_log": 1, "dt_bias": 1}
        *weights, rates, bias = (self._for_our_heads(getattr(self, name), size, plan) for name, size in sizes.items())
        weight = torch.cat(weights)
        convolved = short_convolution(take_windows(unrolled, self.kernel), weight, plan.token_rows - (self.kernel - 1))
        q, k, v = F.silu(convolved).split([len(part) for part in weights], -1)
        q, k = normalize_pair(*(t.unflatten(-1, (-1, self.key_dim)) for t in (q, k)))
        q, k = (t.repeat_interleave(self.repeats, 1) for t in (q, k))
        v = v.unflatten(-1, (-1, self.value_dim))
        decay = -at_least_fp32(rates).exp() * F.softplus(at_least_fp32(a) + at_least_fp32(bias))
        return self.rule(q, k, v, decay, at_least_fp32(b).sigmoid(), initial, plan)


def chunked_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, initial: Tensor,
                 plan: GatedDeltaPlan) -> tuple[Tensor, Tensor | None]:
    """The rule of `--gdn-kernel-backend torch`, in at least fp32."""
    chunks = [_in_chunks(x, plan) for x in (query, key, value, decay, beta)]
    out, states = chunked_gated_delta_rule(*chunks, initial, plan.levels)
    return take_distinct(out.flatten(0, 1), plan.places), None if plan.kept_states is None else states[plan.kept_states]


def _in_chunks(x: Tensor, plan: GatedDeltaPlan) -> Tensor:
    """[N, L, ...] of x [T, ...], zero where a chunk is short."""
    empty = x.new_zeros(plan.num_chunks * CHUNK, *x.shape[1:])
    return empty.index_copy(0, plan.places, x).unflatten(0, (plan.num_chunks, CHUNK))


def take_windows(rows: Tensor, kernel: int) -> tuple[Tensor, ...]:
    """The K views of `rows` that a convolution over K rows adds up, the earliest first."""
    count = len(rows) - kernel + 1
    return tuple(rows[tap:tap + count] for tap in range(kernel))


def short_convolution(windows: tuple[Tensor, ...], weight: Tensor, rows: Tensor) -> Tensor:
    """Each channel's sum over its last K rows, weight [channels, K]; of the results those at `rows`. Added up in at least fp32."""
    total = sum(at_least_fp32(window) * at_least_fp32(weight[:, tap]) for tap, window in enumerate(windows))
    return take_distinct(total.to(windows[0].dtype), rows)


class _NormalizePair(torch.autograd.Function):
    """y = x * rstd with rstd = 1 / sqrt(sum x^2 + 1e-6), for q and k. Saved: y as rounded and rstd; dx = rstd * (dy - y * sum(dy * y))."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        results = []
        for x in (q, k):
            wide = at_least_fp32(x)
            rstd = (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            results.append(((wide * rstd).to(x.dtype), rstd))
        (q, q_rstd), (k, k_rstd) = results
        ctx.save_for_backward(q, q_rstd, k, k_rstd)
        return q, k

    @staticmethod
    def backward(ctx, *grads: Tensor):
        saved, results = ctx.saved_tensors, []
        for grad, rounded, rstd in ((grads[0], *saved[:2]), (grads[1], *saved[2:])):
            grad, y = at_least_fp32(grad), at_least_fp32(rounded)
            results.append((rstd * (grad - y * (grad * y).sum(-1, keepdim=True))).to(rounded.dtype))
        return tuple(results)


def normalize_pair(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [..., d], each of length 1 along the last dimension."""
    return _NormalizePair.apply(q, k)


class _LogRates:
    """log of decay rates spread evenly from 1 to LARGEST_DECAY over the heads."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, expert: int | None = None) -> Tensor:
        return torch.linspace(1.0, LARGEST_DECAY, *shape, dtype=torch.float64).log().to(dtype)

    def with_std(self, std: float) -> _LogRates:
        return self
