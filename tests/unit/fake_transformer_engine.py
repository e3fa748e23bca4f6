"""Transformer Engine as far as we use it, on a CPU: products by torch, with the package's demands on shapes, devices and attributes.

Under its autocast both factors of a product are rounded to FP8 (e4m3, a scale a tensor), gradients pass as they are. What the real package
does is checked on a GPU (.gpu marks); this one checks what we do with it.
"""
from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST = 448.0  # of e4m3


class State:
    """What autocast has set: whether products are in FP8, and how many there were; calls of attention, rotary and cross entropy."""

    fp8, products_in_fp8 = False, 0
    attentions = rotations = losses = 0


class Autocast:
    def __init__(self, enabled: bool = True, *, recipe: object):
        self.enabled, self.recipe = enabled, recipe

    def __enter__(self):
        assert not State.fp8, "nested"
        State.fp8 = self.enabled

    def __exit__(self, *_):
        State.fp8 = False


def rounded(x: Tensor) -> Tensor:
    """x as FP8 has it; the gradient passes."""
    scale = x.detach().abs().max().float().clamp(min=1e-12) / LARGEST
    low = ((x.detach().float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)
    return x + (low - x).detach()


class Product(torch.autograd.Function):
    """x @ W.T as a view made within a function of its own, as the package's is: autograd lets nobody write to that."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight).view(-1, len(weight))

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def product(x: Tensor, weight: Tensor) -> Tensor:
    assert x.dtype == weight.dtype == torch.bfloat16 and x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1]
    if not State.fp8 or not len(x):
        return Product.apply(x, weight)
    assert all(size % 16 == 0 for size in (*x.shape, *weight.shape)), (x.shape, weight.shape)
    State.products_in_fp8 += 1
    return Product.apply(rounded(x), rounded(weight))


class Base(nn.Module):
    def fast_setattr(self, name: str, value: object) -> None:
        self.__dict__[name] = value


class Linear(Base):
    def __init__(self, in_features: int, out_features: int, *, bias: bool, params_dtype: torch.dtype, device: str):
        super().__init__()
        self.shape = out_features, in_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.shape == self.shape and len(x)
        return product(x, self.weight)


class GroupedLinear(Base):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, *, bias: bool, params_dtype: torch.dtype, device: str):
        super().__init__()
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            setattr(self, f"weight{number}", nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device)))
            setattr(self, f"bias{number}", torch.empty(0, device=device))

    def forward(self, x: Tensor, m_splits: list[int]) -> Tensor:
        assert len(m_splits) == self.num_gemms and sum(m_splits) == len(x)
        assert all(getattr(self, f"bias{number}").device == x.device for number in range(self.num_gemms))
        parts = x.split(m_splits)
        return torch.cat([product(part, getattr(self, f"weight{number}")) for number, part in enumerate(parts)])


class Fp8Padding(nn.Module):
    def __init__(self, num_gemms: int, align_size: int):
        super().__init__()
        self.align_size = align_size

    def padded(self, splits: list[int]) -> list[int]:
        return [-(-size // self.align_size) * self.align_size for size in splits]

    def forward(self, x: Tensor, splits: list[int]) -> tuple[Tensor, list[int]]:
        padded = self.padded(splits)
        return torch.cat([F.pad(part, (0, 0, 0, size - len(part))) for part, size in zip(x.split(splits), padded, strict=True)]), padded


class Fp8Unpadding(Fp8Padding):
    def forward(self, x: Tensor, splits: list[int]) -> Tensor:
        return torch.cat([part[:size] for part, size in zip(x.split(self.padded(splits)), splits, strict=True)])


def rmsnorm_fwd(x, weight, eps, out, quantizer, dtype, margin, zero_centered):
    assert out is None and quantizer is None and not zero_centered and x.is_contiguous() and x.dim() == 2 and dtype == "bf16"
    inverse_root = x.float().square().mean(-1).add(eps).rsqrt()
    return (x.float() * inverse_root[:, None] * weight.float()).to(x.dtype), None, inverse_root


def rmsnorm_bwd(grad, x, inverse_root, weight, margin, zero_centered):
    normed, grad = x.float() * inverse_root[:, None], grad.float()
    scaled = grad * weight.float()
    dx = inverse_root[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (grad * normed).sum(0).to(weight.dtype)


class DotProductAttention(nn.Module):
    """Sequences that lie one after the other, each by plain torch; as the real one it takes `unfused_attention` where it has no kernel."""

    def __init__(self, heads, head_dim, *, num_gqa_groups, attention_dropout, qkv_format, softmax_scale, attn_mask_type, attention_type,
                 window_size):
        super().__init__()
        assert heads % num_gqa_groups == 0 and attention_dropout == 0 and qkv_format == "thd" and softmax_scale == 1
        assert (attn_mask_type, attention_type) in (("padding_causal", "self"), ("padding", "cross"))
        assert window_size is None or (attention_type == "self" and window_size[1] == 0)
        self.sizes, self.causal, self.window = (heads, num_gqa_groups, head_dim), attention_type == "self", window_size
        self.unfused_attention = nn.Identity()

    def forward(self, query, key, value, *, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv):
        assert (query.shape[1], key.shape[1], query.shape[2]) == self.sizes and all(x.is_contiguous() for x in (query, key, value))
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32 and cu_seqlens_q.shape == cu_seqlens_kv.shape
        if query.shape[2] > 256:
            return self.unfused_attention({}, query, key, value, attn_mask_type="padding")
        State.attentions += 1
        counts = [torch.diff(ends).tolist() for ends in (cu_seqlens_q, cu_seqlens_kv)]
        assert sum(counts[0]) == len(query) and sum(counts[1]) == len(key) and min(*counts[0], *counts[1]) > 0
        assert max(counts[0]) <= max_seqlen_q and max(counts[1]) <= max_seqlen_kv
        pieces = zip(query.split(counts[0]), key.split(counts[1]), value.split(counts[1]), strict=True)
        return torch.cat([self._piece(*piece) for piece in pieces]).flatten(1)

    def _piece(self, query, key, value):
        scores = torch.einsum("qhd,khd->hqk", query.float(), key.float().repeat_interleave(self.sizes[0] // self.sizes[1], 1))
        if self.causal:
            assert len(query) == len(key)
            distance = torch.arange(len(query))[:, None] - torch.arange(len(key))
            hidden = (distance < 0) | (distance > (len(key) if self.window is None else self.window[0]))
            scores = scores.masked_fill(hidden, float("-inf"))
        value = value.float().repeat_interleave(self.sizes[0] // self.sizes[1], 1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(query.dtype)


def apply_rotary_pos_emb(x, angles, *, tensor_format, fused):
    """Of the first angles.shape[-1] numbers of a head, i is paired with i + half of these; rows [s, b, h, d] and angles [s, 1, 1, d]."""
    assert tensor_format == "sbhd" and fused and x.dim() == 4 and angles.shape == (len(x), 1, 1, angles.shape[-1])
    assert angles.dtype == torch.float32 and len(x)
    size = angles.shape[-1]
    low, high = x[..., :size].float().chunk(2, -1)
    turned = x[..., :size].float() * angles.cos() + torch.cat([-high, low], -1) * angles.sin()
    State.rotations += 1
    return torch.cat([turned.to(x.dtype), x[..., size:]], -1)


class CrossEntropy(torch.autograd.Function):
    """Of logits [1, n, v], each rank of a group with as many: three numbers a token from each. The gradient is written over the logits,
    or over a copy."""

    @staticmethod
    def forward(ctx, logits, targets, group, overwrite):
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        rows = targets - rank * logits.shape[-1]
        ours = (rows >= 0) & (rows < logits.shape[-1])
        at_target = logits.gather(-1, rows.where(ours, 0)[..., None])[..., 0].where(ours, float("-inf"))
        own = torch.stack([logits.amax(-1), logits.logsumexp(-1), at_target])
        parts = [torch.empty_like(own) for _ in range(size)]
        if group is None:
            parts = [own]
        else:
            dist.all_gather(parts, own, group=group)
        _, together, at_target = torch.stack(parts, dim=1)
        total = together.logsumexp(0)
        ctx.save_for_backward(logits.detach() if overwrite else logits.detach().clone(), rows, ours, total)
        return total - at_target.amax(0)

    @staticmethod
    def backward(ctx, grad):
        logits, rows, ours, total = ctx.saved_tensors
        wanted = (logits - total[..., None]).exp_()
        wanted.scatter_add_(-1, rows.where(ours, 0)[..., None], -ours.to(wanted.dtype)[..., None])
        return logits.copy_(wanted.mul_(grad[..., None])), None, None, None


def parallel_cross_entropy(logits, targets, *, dist_process_group, overwrite_input):
    assert logits.dim() == 3 and logits.dtype == torch.float32 and logits.is_contiguous() and 0 not in logits.shape
    assert targets.dtype == torch.int64 and targets.shape == logits.shape[:2]
    State.losses += 1
    return CrossEntropy.apply(logits, targets, dist_process_group, overwrite_input)


def install_fake(monkeypatch, *, fp8: tuple[bool, str] = (True, "")) -> ModuleType:
    """Put it where imports find it; `fp8`: whether it says that FP8 works, and why not. Returns transformer_engine.pytorch."""
    modules = {name: ModuleType(name) for name in (
        "transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.constants", "transformer_engine.common",
        "transformer_engine.common.recipe", "transformer_engine.pytorch.attention", "transformer_engine.pytorch.attention.rope",
        "transformer_engine_torch")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    package = modules["transformer_engine.pytorch"]
    for part in (Linear, GroupedLinear, Fp8Padding, Fp8Unpadding, DotProductAttention, parallel_cross_entropy):
        setattr(package, part.__name__, part)
    package.autocast = Autocast
    package.is_fp8_available = package.is_fp8_block_scaling_available = lambda return_reason: fp8
    modules["transformer_engine.pytorch.constants"].TE_DType = {torch.bfloat16: "bf16"}
    recipes = modules["transformer_engine.common.recipe"]
    recipes.Format = SimpleNamespace(E4M3="e4m3", HYBRID="hybrid")
    recipes.Float8CurrentScaling = lambda *, fp8_format: ("tensorwise", fp8_format)
    recipes.Float8BlockScaling = lambda *, fp8_format: ("blockwise", fp8_format)
    modules["transformer_engine_torch"].rmsnorm_fwd, modules["transformer_engine_torch"].rmsnorm_bwd = rmsnorm_fwd, rmsnorm_bwd
    modules["transformer_engine.pytorch.attention.rope"].apply_rotary_pos_emb = apply_rotary_pos_emb
    State.fp8, State.products_in_fp8 = False, 0
    State.attentions = State.rotations = State.losses = 0
    return package
