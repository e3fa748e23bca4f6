"""What every dispatcher does, in phases, so that its transfers run beside other work.

    plan = dispatcher.prepare(indices)         where every row goes; what dispatch replay records
    trip = dispatcher.trip(plan, weights)
    trip.dispatch(x)                           starts sending rows to the ranks of their experts
        ... the first half of the layer's dense MLP ...
    rows, counts = trip.after_dispatch()       the rows of our experts, in expert order
    trip.combine(experts(rows, counts))        starts sending results back
        ... its second half ...
    y = trip.after_combine()                   each token's results, weighted and summed

Backward runs the same phases the other way round, with the same overlap: autograd takes nodes in the reverse of the order in which they
were made.

Legend: T tokens of this rank, k choices a token, E experts, L of them here, N rows of these.
"""
from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from ...kernels.row_weights import LiveRows, RowWeights

LAYOUT_EXCHANGE = "layout_exchange"  # the kind under which the communication log counts what a replay spares


class Trip(Protocol):
    """One dispatch and its way back. Its phases are called once each, in the order of the module's docstring.

    live: our rows that alone have a gradient, if known; set before `dispatch`, and made use of where nothing goes to other ranks.
    """

    live: LiveRows | None

    def dispatch(self, x: Tensor) -> None:
        """Start sending x [T, H]."""

    def after_dispatch(self) -> tuple[Tensor, Tensor]:
        """(rows [N, H] in expert order, counts int64 [L])."""

    def take_weights(self) -> RowWeights | None:
        """The weights, for whoever computes the rows to multiply them with: `after_combine` then only sums. None where it has to do both,
        because rows come from other ranks, which have their weights. Called before `combine`, or not at all."""

    def combine(self, rows: Tensor) -> None:
        """Start sending results [N, H] back (with etp, our share of each, which is summed on the way)."""

    def after_combine(self) -> Tensor:
        """[T, H]."""


class Dispatcher(Protocol):
    """Holds groups and buffers, no state of a call: several trips may be under way."""

    def prepare(self, indices: Tensor) -> Any:
        """The plan of routing choices int64 [T, k]. Collective: every rank of the expert group calls it, those without tokens too.

        A plan is used again for the recompute of its call: a second trip with it exchanges no layout.
        """

    def trip(self, plan: Any, weights: Tensor) -> Trip:
        """A trip of tokens whose choices have `weights` [T, k], at least fp32."""


def check_tokens(num_tokens: int, max_tokens: int | None) -> None:
    """ValueError for more tokens than the bound, if there is one, that room was made for."""
    if max_tokens is not None and num_tokens > max_tokens:
        raise ValueError(f"--moe-max-tokens-per-rank {max_tokens}: this rank has {num_tokens} tokens in a pass; set it to {num_tokens} or "
                         "more on all ranks (clean tokens and canvases of the largest microbatch), or leave it out")
