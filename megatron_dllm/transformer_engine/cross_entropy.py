"""Cross entropy of logits by the package's kernels, over a vocabulary cut over `tp` (--cross-entropy-fusion-impl te)."""
from __future__ import annotations

import inspect

import torch
from torch import Tensor

from ..parallel import Group
from ..tensor_parallel.cross_entropy import LogitLoss
from .engine import Engine

SENT_BYTES = 16  # four fp32 numbers a token


def engine_cross_entropy(engine: Engine) -> LogitLoss:
    """The package's LogitLoss. Its one exchange is its own; it is counted here. ValueError where the package is too old."""
    parallel_cross_entropy = engine.package.parallel_cross_entropy
    if "overwrite_input" not in inspect.signature(parallel_cross_entropy).parameters:
        raise ValueError("--cross-entropy-fusion-impl te: this transformer_engine puts the gradient elsewhere than 2.20, the version that "
                         "was tried; install that one, or set --cross-entropy-fusion-impl native")

    def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor, tp: Group, *,
                      wants_gradient: bool) -> tuple[Tensor, Tensor | None]:
        handle, done = None, None
        if tp.size > 1:
            handle = tp.handle
            done = tp.log.start("all_gather", tp.name, SENT_BYTES * len(logits) * (tp.size - 1), f"cross entropy over {tp.name} {tp.ranks}")
        with torch.set_grad_enabled(wants_gradient):
            leaf = logits[None].detach().requires_grad_(wants_gradient)
            per_token = parallel_cross_entropy(leaf, targets[None], dist_process_group=handle, overwrite_input=True)  # in its backward
            gradient = torch.autograd.grad(per_token, leaf, weights[None])[0][0] if wants_gradient else None
        if done is not None:
            done()
        return per_token.detach()[0], gradient

    return cross_entropy
