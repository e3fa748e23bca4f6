"""AdamW over fp32 masters: what each trainable parameter is stepped in, how its gradient is accumulated, and the norm of the whole.

A parameter of 16 bits has an fp32 master, and its gradients are added up in an fp32 buffer, microbatch by microbatch; the parameter itself is the
copy that is computed with. A parameter of 32 or 64 bits is its own master. The update itself is torch's.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import OptimizerConfig
from ..transformer.precision import accumulation_dtype

STATES = ("exp_avg", "exp_avg_sq")  # the moments, by torch's names, which are also those of checkpoints


@dataclass(frozen=True)
class Held:
    """A trainable parameter, by global name, and its master (the parameter itself where that is precise enough)."""

    name: str
    parameter: nn.Parameter
    master: Tensor

    @property
    def is_copied(self) -> bool:
        """Whether the parameter is a 16-bit copy of its master."""
        return self.master is not self.parameter


class MasterAdamW:
    """AdamW. Matrices decay, vectors and scalars (norms, scales) do not."""

    def __init__(self, model: nn.Module, config: OptimizerConfig):
        self.clip_grad = config.clip_grad
        self.held = tuple(_hold(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
        if not self.held:
            raise ValueError("nothing is trainable: every parameter is frozen")
        groups = [
            {"params": [h.master for h in self.held if (h.master.ndim > 1) == decayed], "weight_decay": decay}
            for decayed, decay in ((True, config.weight_decay), (False, 0.0))]
        self.adam = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True)

    def grad_norm(self) -> Tensor:
        """L2 norm of the whole gradient, in at least fp32."""
        return torch.nn.utils.get_total_norm([h.master.grad for h in self.held if h.master.grad is not None])

    def num_zeros(self) -> int:
        """Elements of the whole gradient that are exactly zero (all of a parameter without a gradient)."""
        return sum(h.master.numel() if h.master.grad is None else int((h.master.grad == 0).sum()) for h in self.held)

    @torch.no_grad()
    def step(self, lr: float, grad_norm: Tensor) -> None:
        """Clip to --clip-grad, update the masters at this learning rate, refresh the copies, drop the gradients."""
        for h in self.held:
            if h.master.grad is None:  # an expert stack or module that nothing reached still decays and has its moments fade
                h.master.grad = torch.zeros_like(h.master)
        if self.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_([h.master for h in self.held], self.clip_grad, grad_norm)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        for h in self.held:
            if h.is_copied:
                h.parameter.copy_(h.master)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget what has been accumulated (after a step, or instead of one)."""
        for h in self.held:
            h.master.grad = None

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the masters from the parameters, after weights were loaded into the model."""
        for h in self.held:
            if h.is_copied:
                h.master.copy_(h.parameter)

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, master) of every trainable parameter."""
        for h in self.held:
            yield h.name, h.master.detach()

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """(name, state, tensor) of every moment; empty before the first step."""
        for h in self.held:
            for state in STATES:
                if state in self.adam.state.get(h.master, {}):
                    yield h.name, state, self.adam.state[h.master][state]

    def num_steps(self) -> int:
        """Updates done so far."""
        state = self.adam.state.get(self.held[0].master, {})
        return int(state["step"].item()) if state else 0

    @torch.no_grad()
    def load(self, masters: Mapping[str, Tensor], states: Mapping[tuple[str, str], Tensor], num_steps: int) -> None:
        """Take over masters and moments, by name; the copies follow. KeyError where one is missing."""
        for h in self.held:
            h.master.copy_(masters[h.name])
            h.parameter.copy_(h.master)
            if num_steps:
                self.adam.state[h.master] = {
                    "step": torch.tensor(float(num_steps), device=h.master.device),
                    **{state: states[h.name, state].to(h.master, copy=True) for state in STATES}}


def _hold(name: str, parameter: nn.Parameter) -> Held:
    held = Held(name, parameter, parameter)
    if accumulation_dtype(parameter.dtype) != parameter.dtype:
        held = Held(name, parameter, parameter.detach().to(accumulation_dtype(parameter.dtype)))

        def accumulate(source: nn.Parameter) -> None:
            gradient = source.grad.to(held.master.dtype)
            held.master.grad = gradient if held.master.grad is None else held.master.grad.add_(gradient)
            source.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)
    return held
