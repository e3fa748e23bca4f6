"""Router, dispatch and experts of one layer."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..parallel import ParallelContext
from ..tensor_parallel.initialization import Init
from .dispatchers.interface import Dispatcher, Trip
from .experts import Experts
from .replay import NOT_CHECKPOINTED, Call, Record
from .router import Router


class MoELayer(nn.Module):
    """y = sum over a token's k experts of weight * expert(x); x, y [T, H]. The router reads `residual`, not the experts' normed input.

    The T tokens are this rank's alone: no other rank of the stage has any of them (no token is dispatched twice), and none is fill. T may
    differ between the ranks of an expert group, and be zero; all of them make the same calls.
    """

    def __init__(self, name: str, config: ModelConfig, *, context: ParallelContext, init: Init, dtype: torch.dtype, dispatcher: Dispatcher,
                 grouped: bool = True):
        super().__init__()
        self.name, self.dispatcher = name, dispatcher
        self.router = Router(f"{name}.router", config, context=context, init=init, dtype=dtype)
        self.experts = Experts(f"{name}.experts", config, context=context, init=init, dtype=dtype, grouped=grouped)

    def forward(self, x: Tensor, residual: Tensor, call: Call = NOT_CHECKPOINTED) -> Tensor:
        """y [T, H]. In two steps, to work on something else between them: `start`, `finish`."""
        return self.finish(self.start(x, residual, call))

    def start(self, x: Tensor, residual: Tensor, call: Call = NOT_CHECKPOINTED) -> Trip:
        """Route, and begin to send tokens to their experts. `call`: the checkpointed run that this is part of (see replay)."""
        record = call.recorded(self.name, len(x))
        routing = self.router(residual, None if record is None else record.indices)
        plan = self.dispatcher.prepare(routing.indices) if record is None else record.plan
        # What is wholly without gradient is never recomputed.
        if not call.is_recompute and (x.requires_grad or routing.weights.requires_grad or self.experts.down.requires_grad):
            call.record(Record.of(self.name, routing.indices, plan))
        trip = self.dispatcher.trip(plan, routing.weights)
        trip.dispatch(x)
        return trip

    def finish(self, trip: Trip) -> Tensor:
        """y [T, H]: the experts' work, and its way back."""
        trip.combine(self.experts(*trip.after_dispatch()))
        return trip.after_combine()
