"""Router, dispatch and experts of one layer."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..kernels.row_weights import LiveRows
from ..parallel import ParallelContext
from ..tensor_parallel.initialization import Init
from .balance import BalanceLosses, RoutedTokens, RoutingFigures, RoutingMonitor, with_loss
from .dispatchers.interface import Dispatcher, Trip
from .experts import Experts
from .permute import count_choices
from .replay import NOT_CHECKPOINTED, Call, Record
from .router import Router, Routing


class MoELayer(nn.Module):
    """y = sum over a token's k experts of weight * expert(x); x, y [T, H]. The router reads `residual`, not the experts' normed input.

    The T tokens are this rank's alone: no other rank of the stage has any of them (no token is dispatched twice), and none is fill. T may
    differ between the ranks of an expert group, and be zero; all of them make the same calls.
    """

    def __init__(self, name: str, config: ModelConfig, *, context: ParallelContext, init: Init, dtype: torch.dtype, dispatcher: Dispatcher,
                 grouped: bool = True, losses: BalanceLosses | None = None, monitor: RoutingMonitor | None = None, bias_rate: float = 0.0):
        super().__init__()
        self.name, self.dispatcher, self.losses, self.monitor = name, dispatcher, losses, monitor
        self.router = Router(f"{name}.router", config, context=context, init=init, dtype=dtype, bias_rate=bias_rate)
        self.experts = Experts(f"{name}.experts", config, context=context, init=init, dtype=dtype, grouped=grouped)

    def forward(self, x: Tensor, residual: Tensor, call: Call = NOT_CHECKPOINTED, tokens: RoutedTokens | None = None) -> Tensor:
        """y [T, H]. In three steps, to work on something else between them: `start`, `compute`, and the trip's `after_combine`."""
        trip = self.start(x, self.router.scaled(residual), call, tokens)
        self.compute(trip)
        return trip.after_combine()

    def start(self, x: Tensor, scaled: Tensor, call: Call = NOT_CHECKPOINTED, tokens: RoutedTokens | None = None) -> Trip:
        """Route, and begin to send tokens to their experts.

        scaled  what the router makes of the residual (Router.scaled)
        call    the checkpointed run that this is part of (see replay)
        tokens  what the tokens are, for balance losses and figures; without it there are none
        """
        record = call.recorded(self.name, len(x))
        routing, is_counted = self._route(scaled, None if record is None else record.indices, tokens, call)
        plan = self.dispatcher.prepare(routing.indices) if record is None else record.plan
        weights, fractions = routing.weights, None
        if tokens is not None:
            fractions = self.losses.fractions(routing.indices, tokens) if record is None else record.fractions
            weights = self._balanced(routing, tokens, fractions, call, is_counted=is_counted)
        # What is wholly without gradient is never recomputed.
        if not call.is_recompute and (x.requires_grad or weights.requires_grad or self.experts.is_trained):
            call.record(Record.of(self.name, routing.indices, plan, fractions))
        if tokens is not None and tokens.note_routing is not None:
            tokens.note_routing(routing.indices, plan.permutation)
        trip = self.dispatcher.trip(plan, weights)
        trip.live = self._live(routing.indices, tokens)
        trip.dispatch(x)
        return trip

    def _route(self, scaled: Tensor, indices: Tensor | None, tokens: RoutedTokens | None, call: Call) -> tuple[Routing, bool]:
        """The routing, and whether its figures are counted already."""
        needs_logits = self.losses is not None and self.losses.z_coeff > 0
        tally = None
        if self._is_noted(tokens, call) and not needs_logits and self.router.is_one_function(scaled):
            tally = self.monitor.tally(self.name, tokens, len(self.router.weight))
        return self.router(scaled, indices, needs_logits=needs_logits, tally=tally), tally is not None

    def _is_noted(self, tokens: RoutedTokens | None, call: Call) -> bool:
        """Whether the figures are: once, in the forward of training."""
        return tokens is not None and (torch.is_grad_enabled() or tokens.is_draft) and not call.is_recompute

    def _live(self, indices: Tensor, tokens: RoutedTokens | None) -> LiveRows | None:
        """Which rows have a gradient, where that spares the experts' kernels work: all experts are here."""
        num_live, num_experts = None if tokens is None else tokens.num_live, len(self.router.weight)
        if num_live is None or len(self.experts.gate_up) < num_experts or not (self.experts.skips_rows and torch.is_grad_enabled()):
            return None
        return LiveRows(num_live, count_choices(indices[:num_live], num_experts))

    def _balanced(self, routing: Routing, tokens: RoutedTokens, fractions: Tensor | None, call: Call, *, is_counted: bool) -> Tensor:
        """The routing's weights with the balance losses tied to them; figures are noted."""
        losses = self.losses(routing.logits, routing.probabilities, tokens, fractions)
        if self._is_noted(tokens, call):
            if is_counted:
                self.monitor.note_tallied(self.name, tokens, losses)
            else:
                self.monitor.note(self.name, RoutingFigures.of(routing.probabilities, routing.indices, tokens, losses))
            if self.router.bias is not None:
                self.router.bias.note(routing.indices, tokens)
        return with_loss(routing.weights, losses) if self.losses.is_used and routing.weights.requires_grad else routing.weights

    def compute(self, trip: Trip) -> None:
        """The experts' work on what arrived, and begin to send it back."""
        rows, counts = trip.after_dispatch()
        trip.combine(self.experts(rows, counts, trip.take_weights() if self.experts.takes_weights else None))
