"""The shape and dtype of every tensor that passes between stages: the one place that knows."""

from dataclasses import dataclass

from megatron_dllm.pipeline.actions import Action, Edge

# Edges of the self-conditioning signal: it acts before the expansion into residual streams.
_BEFORE_EXPANSION = frozenset({Edge.SOFT_EMBEDDING, Edge.SOFT_EMBEDDING_GRADIENT})


@dataclass(frozen=True)
class EdgeShape:
    """Rows, columns and dtype (torch's name for it) of a tensor on an edge."""

    tokens: int
    width: int
    dtype: str

    @property
    def size(self) -> int:
        return self.tokens * self.width

    def __str__(self) -> str:
        return f"[{self.tokens}, {self.width}] {self.dtype}"


@dataclass(frozen=True)
class EdgeShapes:
    """What decides the shape of an edge: the model, and from the batch plan the tokens of each microbatch on this rank.

    `tokens[microbatch][loop]` counts this rank's rows of the streams that pass in that loop, 0 where it has none. Width depends on the
    edge alone, never on the rank; both ends of an edge have the same tokens, so nothing is negotiated at run time.
    """

    hidden_size: int
    tokens: tuple[tuple[int, int], ...]
    mhc_num_residual_streams: int = 1
    dtype: str = "bfloat16"

    def of(self, action: Action) -> EdgeShape:
        """Shape of what a transfer carries: [T, hidden * streams] between stages, [T, hidden] (T of loop 1) for the soft embedding."""
        assert action.edge is not None, f"{action} is no transfer"
        # The soft embedding has the rows that loop 1 takes, whichever loop this rank's end of the edge belongs to.
        loop = 1 if action.edge in _BEFORE_EXPANSION else action.loop
        return EdgeShape(self.tokens[action.microbatch][loop], self.width(action.edge), self.dtype)

    def width(self, edge: str) -> int:
        """Columns of a tensor on `edge`."""
        return self.hidden_size * (1 if edge in _BEFORE_EXPANSION else self.mhc_num_residual_streams)
