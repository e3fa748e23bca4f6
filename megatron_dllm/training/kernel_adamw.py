"""AdamW by this project's kernel (--optimizer-backend local): one launch for all masters of a decay, which writes their copies too."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..kernels.adamw import Rates, adamw_
from ..kernels.pieces import Pieces

Launch = tuple[dict[str, Any], torch.dtype | None, Pieces]


class KernelAdamW:
    """As torch's AdamW, as far as MasterOptimizer asks: gradients are each master's `grad`, all fp32, flat and on one CUDA device.

        param_groups  "params": masters; "copies": of each, a 16-bit tensor that gets its values, or None; "weight_decay"; "lr"; "step":
                      updates done
        state         moments of each master, by torch's names, from the first step on
        grad_scale    fp32 tensor that gradients are divided by as they are read, or None; not a number: nothing is updated

    Gradients and moments may be replaced by other tensors, but none of them may be moved within its tensor.
    """

    def __init__(self, groups: list[dict], *, lr: float, betas: tuple[float, float], eps: float):
        self.param_groups = [group | {"lr": lr, "step": 0} for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self.grad_scale: Tensor | None = None
        self.betas, self.eps = betas, eps
        self._launches: list[Launch] = []
        self._seen: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []

    @torch.no_grad()
    def step(self) -> None:
        """Update masters, moments and copies; the gradients stay as they are."""
        if not self._seen or any(master.grad is not gradient or self.state[master] is not state for master, gradient, state in self._seen):
            self._seen = []
            self._launches = [launch for group in self.param_groups for launch in self._plan(group)]
        for group in self.param_groups:
            group["step"] += 1
        for group, copy_dtype, pieces in self._launches:
            rates = Rates(group["lr"], group["weight_decay"], self.betas, self.eps, group["step"])
            adamw_(pieces, rates, self.grad_scale, copy_dtype)

    def take_back(self) -> None:
        """Count the last step, which updated nothing, as not made; before the first one that does there are no moments."""
        for group in self.param_groups:
            group["step"] -= 1
        if all(group["step"] == 0 for group in self.param_groups):
            self.state.clear()

    def _plan(self, group: dict[str, Any]) -> Iterator[Launch]:
        """A launch for each dtype of copies; makes the moments that are not there."""
        rows: dict[torch.dtype | None, list[list[Tensor]]] = {}
        for master, copy in zip(group["params"], group["copies"], strict=True):
            state = self.state[master]
            if not state:
                state.update(exp_avg=torch.zeros_like(master), exp_avg_sq=torch.zeros_like(master))
            self._seen.append((master, master.grad, state))
            row = [master.grad, master, state["exp_avg"], state["exp_avg_sq"]]
            rows.setdefault(None if copy is None else copy.dtype, []).append(row if copy is None else [*row, copy])
        for copy_dtype, pieces in rows.items():
            yield group, copy_dtype, Pieces.of(pieces)
