"""What each kernel computes, in plain torch on fp32 (float64 stays), gradients by autograd. Imports nothing of the kernels."""
from __future__ import annotations

import math

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * (mean(x^2) + eps)^-0.5 * weight over the last dimension."""
    wide = _wide(x)
    y = wide * (wide.square().mean(-1, keepdim=True) + eps) ** -0.5
    return (y if weight is None else y * _wide(weight)).to(x.dtype)


def norm_and_rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """rms_norm of every head of x [T, heads, d], then its pairs (i, i + d/2) turned by the angles of cos, sin [T, d/2]."""
    low, high = rms_norm(_wide(x), weight, eps).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def gated_gelu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up in gelu's tanh form, [N, I] from gate_up [N, 2, I] (Hendrycks and Gimpel, arXiv 1606.08415, section 2)."""
    gate, up = _wide(gate_up).unbind(1)
    return (0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up).to(gate_up.dtype)


def grouped_mlp(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
    """down_e (gelu(gate_e x) * up_e x) for the rows x of expert e: rows [N, H] sorted by expert, gate_up [E, 2, I, H], down [E, H, I],
    counts [E]. Rows after the last expert's give zero."""
    parts = [rows.new_zeros(0, rows.shape[1])]
    for x, (gate, up), out in zip(rows[:int(counts.sum())].split(counts.tolist()), gate_up, down, strict=True):
        wide = _wide(x)
        hidden = torch.stack([wide @ _wide(gate).mT, wide @ _wide(up).mT], dim=1)
        parts.append((gated_gelu(hidden) @ _wide(out).mT).to(rows.dtype))
    y = torch.cat(parts)
    return torch.cat([y, y.new_zeros(len(rows) - len(y), y.shape[1])])


def permute(x: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """rows [N, H]: rows[row[t, c]] = x[t] for every choice c of token t that has a row (row[t, c] < N)."""
    has_row = row < num_rows
    token = torch.arange(len(row), device=row.device)[:, None].expand(row.shape)
    return x[token[has_row][torch.argsort(row[has_row])]]


def unpermute(rows: Tensor, weights: Tensor, row: Tensor) -> Tensor:
    """y [T, H] = sum over choices c with a row of weights[t, c] * rows[row[t, c]]."""
    padded = torch.cat([_wide(rows), _wide(rows).new_zeros(1, rows.shape[1])])
    return (padded[row] * _wide(weights)[..., None]).sum(1).to(rows.dtype)


def softmax_statistics(product: Tensor, target: Tensor, softcap: float | None, observed: Tensor | None, bonus: Tensor | None) -> Tensor:
    """[1, 4, n] of the logits l = softcap * tanh(product / softcap), plus `bonus` at `observed`: their largest, the sum of
    exp(l - largest), l at `target`, and whether the first of the largest is at `target`. product [n, v]; target, observed [n],
    outside [0, v) for none."""
    logits = _logits(product, softcap, observed, bonus)
    largest, first = logits.max(1).values, logits.argmax(1)
    at_target = (logits * _one_hot(target, logits)).sum(1)
    total = (logits - largest[:, None]).exp().sum(1)
    return torch.stack([largest, total, at_target, (first == target).to(logits.dtype)])[None]


def logit_gradient(product: Tensor, target: Tensor, token_weights: Tensor, largest: Tensor, scale: Tensor, softcap: float | None,
                   observed: Tensor | None, bonus: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[n, v] in `dtype`: token_weights * (p - 1 at target), p = exp(l - largest) * scale, times the soft cap's derivative."""
    probability = (_logits(product, softcap, observed, bonus) - largest[:, None]).exp() * scale[:, None]
    grad = (probability - _one_hot(target, probability)) * token_weights[:, None]
    return (grad if softcap is None else grad * (1 - torch.tanh(_wide(product) / softcap) ** 2)).to(dtype)


def probabilities(product: Tensor, largest: Tensor, scale: Tensor, softcap: float | None, dtype: torch.dtype) -> Tensor:
    """[n, v] in `dtype`: exp(l - largest) * scale of the logits l."""
    return ((_logits(product, softcap, None, None) - largest[:, None]).exp() * scale[:, None]).to(dtype)


def _logits(product: Tensor, softcap: float | None, observed: Tensor | None, bonus: Tensor | None) -> Tensor:
    wide = _wide(product)
    logits = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    return logits if observed is None else logits + bonus[:, None] * _one_hot(observed, logits)


def _one_hot(index: Tensor, like: Tensor) -> Tensor:
    return (index[:, None] == torch.arange(like.shape[1], device=like.device)).to(like.dtype)


def after_attention(x: Tensor, y: Tensor, weight: Tensor, readers: tuple[Tensor, Tensor, Tensor], factor: float,
                    eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h = x + rms_norm(y, weight), then rms_norm(h, r) for each of three readers r, the last times `factor` and in at least fp32."""
    h = (_wide(x) + rms_norm(_wide(y), weight, eps)).to(x.dtype)
    first, second, third = (rms_norm(_wide(h), reader, eps) for reader in readers)
    return h, first.to(x.dtype), second.to(x.dtype), third * factor


def after_feed_forward(h: Tensor, a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, weight: Tensor, scalars: Tensor, num_first: int,
                       eps: float) -> Tensor:
    """(h + rms_norm(rms_norm(a, weight_a) + rms_norm(b, weight_b), weight)) * scalars[0] in the first rows, scalars[1] in the others."""
    total = rms_norm(rms_norm(_wide(a), weight_a, eps) + rms_norm(_wide(b), weight_b, eps), weight, eps)
    scale = _wide(scalars)[(torch.arange(len(h), device=h.device) >= num_first).long()]
    return ((_wide(h) + total) * scale[:, None]).to(h.dtype)


def route(logits: Tensor, scale: Tensor, bias: Tensor | None, choices: int, given: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, indices, probabilities) [T, k], [T, k], [T, E]: the k most probable experts, with the bias added, and what each gets."""
    probabilities = torch.softmax(logits, dim=1)
    score = probabilities if bias is None else probabilities + bias
    indices = torch.argsort(score, dim=1, descending=True, stable=True)[:, :choices] if given is None else given
    chosen = torch.stack([probabilities[token, experts] for token, experts in enumerate(indices)]) if len(logits) else logits[:, :choices]
    return chosen / chosen.sum(1, keepdim=True) * scale[indices], indices, probabilities


def adamw(gradient: Tensor, master: Tensor, mean: Tensor, square: Tensor, *, lr: float, weight_decay: float, betas: tuple[float, float],
          eps: float, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """(master, mean, square) after update `num_steps` (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, with eps as torch has it)."""
    first, second = betas
    mean, square = first * mean + (1 - first) * gradient, second * square + (1 - second) * gradient**2
    size = (square / (1 - second**num_steps)).sqrt() + eps
    return master * (1 - lr * weight_decay) - lr * mean / (1 - first**num_steps) / size, mean, square
