"""One backward for two passes through the same layers, the second of which has its tokens in the place of some of the first one's.

The first pass has [clean ; draft], the second [canvas], which sees the keys of the clean tokens. A draft's signal has no gradient, so the
backward is that of one pass of [clean ; canvas], although its forward could not be: the canvas is decoded with what became of its draft.
Backwards of each pass would read all weights twice, and start twice as many kernels.

So what the first pass keeps for its backward is recorded, what the second keeps as well, and then the second's rows are put in the place
of the drafts' (`KeptTensors.take_over`). Both run the same functions in the same order, so that what they keep corresponds, tensor by
tensor; nothing has to be known of the functions but what the rows of a tensor are:

    of one shape in both           weights, and what is made of weights alone: left as it is
    a row a token                  the second's rows are copied into the first's
    keys and values                are of all tokens in both: one memory, into which the second pass writes its own (ReplacedContext), or
                                   copies of it, from which rows are taken
    a row a choice, by expert      put in the order of the choices of both, as are the numbers that say where a choice's row stands

A layer whose functions keep anything else cannot be joined: `take_over` refuses it (training/draft_pass.py says where it may be tried).

Legend: T tokens of the first pass, S of the second, k experts a token.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from ..kernels.launch import takes
from ..moe.permute import Permutation, sort_each_by_expert
from ..tensor_parallel.adapted_linear import joined
from .rows import Rows

Pair = tuple[Tensor, Tensor]


class _Kept:
    """What stands in a graph for a tensor that was kept."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


@dataclass(frozen=True)
class _Routed:
    """Choices int64 [T, k] of a layer, and where their rows stand; `first`: how many tensors were kept before."""

    first: int
    indices: Tensor
    permutation: Permutation


class KeptTensors:
    """All that autograd keeps of a pass of so many tokens, in order, and its routing, layer by layer.

    given: what the pass is given (tables of positions and the like), which is equal for both passes' tokens, and not ours to write to.
    """

    def __init__(self, num_tokens: int, given: Iterable[Tensor] = ()):
        self.num_tokens = num_tokens
        self._given = {tensor.data_ptr() for tensor in given}
        self._kept: list[_Kept] = []
        self._routed: list[_Routed] = []

    def recorded(self) -> AbstractContextManager:
        """What is kept inside is recorded."""
        return saved_tensors_hooks(self._keep, _tensor_of)

    def note_routing(self, indices: Tensor, permutation: Permutation) -> None:
        """Of the layer that comes now."""
        self._routed.append(_Routed(len(self._kept), indices, permutation))

    def _keep(self, tensor: Tensor) -> _Kept:
        # Detached: a function's own result would hold the function, which holds what is kept, and nobody would ever let go of them.
        self._kept.append(_Kept(tensor.detach()))
        return self._kept[-1]

    @torch.no_grad()
    def take_over(self, later: KeptTensors, rows: Rows) -> None:
        """Have this pass's graph be that of a pass whose tokens `rows` are the later one's. Both are forgotten here, and `later`'s graph is
        void. ValueError where they have not kept the same things."""
        if len(self._kept) != len(later._kept) or len(self._routed) != len(later._routed):
            raise ValueError(f"the passes that are to have one backward kept {len(self._kept)} and {len(later._kept)} tensors in "
                             f"{len(self._routed)} and {len(later._routed)} layers with experts: their layers ran different functions; set "
                             "--draft-pass shared")
        if not self._kept:
            return
        moves = _Move.of_layers(self._routed, later._routed, rows)
        copies = _Copies(rows, self.num_tokens, later.num_tokens)
        layer = -1
        for number, (own, other) in enumerate(zip(self._kept, later._kept, strict=True)):
            while layer + 1 < len(moves) and self._routed[layer + 1].first <= number:
                layer += 1
            moved = moves[layer].moved(own.tensor, other.tensor) if layer >= 0 else None
            if moved is not None:
                own.tensor = moved
            elif own.tensor.data_ptr() not in self._given:
                copies.add(own.tensor, other.tensor)
        copies.make()
        self._kept, self._routed, later._kept, later._routed = [], [], [], []


def _tensor_of(kept: _Kept) -> Tensor:
    return kept.tensor


class _Copies:
    """Rows of one pass that go in the place of another's, copied at once; tensors that share their memory once."""

    def __init__(self, rows: Rows, num_tokens: int, num_later: int):
        self.rows, self.sizes = rows, (num_tokens, num_later)
        self._pairs: dict[tuple, Pair] = {}

    def add(self, tensor: Tensor, other: Tensor) -> None:
        """That of a row a token, along whichever dimension; of what has one shape nothing, unless it has a row for all tokens in both."""
        if tensor.shape == other.shape:
            self._add_alike(tensor, other)
            return
        unlike = [dim for dim, sizes in enumerate(zip(tensor.shape, other.shape, strict=False)) if sizes[0] != sizes[1]]
        if tensor.dim() != other.dim() or len(unlike) != 1 or (tensor.shape[unlike[0]], other.shape[unlike[0]]) != self.sizes:
            raise ValueError(f"passes of {self.sizes[0]} and {self.sizes[1]} tokens that are to have one backward kept tensors of shapes "
                             f"{tuple(tensor.shape)} and {tuple(other.shape)}, which no rule joins; set --draft-pass shared")
        if unlike != [0]:
            tensor, other = tensor.transpose(0, unlike[0]), other.transpose(0, unlike[0])
        self._pairs[tensor.data_ptr(), tensor.shape, tensor.stride()] = tensor, other

    def _add_alike(self, tensor: Tensor, other: Tensor) -> None:
        if tensor.data_ptr() == other.data_ptr() or not tensor.numel():
            return
        if len(tensor.shape) and len(tensor) == self.sizes[0]:  # keys, say, which the later pass has of all tokens, in another dtype
            self._pairs[tensor.data_ptr(), tensor.shape, tensor.stride()] = tensor, self.rows.take(other)
        elif not tensor.is_floating_point():
            raise ValueError(f"two passes that are to have one backward each kept {tuple(tensor.shape)} numbers of {tensor.dtype}, which "
                             "no rule joins; set --draft-pass shared")

    def make(self) -> None:
        index, pairs = self.rows.index, list(self._pairs.values())
        if isinstance(index, slice):
            # In one launch a dtype, but for rows with others between them, which would have each copied by itself.
            together: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
            for tensor, other in _side_by_side(pairs):
                if tensor.is_contiguous() and other.is_contiguous():
                    targets, sources = together.setdefault(other.dtype, ([], []))
                    targets.append(tensor[index])
                    sources.append(other)
                else:
                    tensor[index].copy_(other)
            for targets, sources in together.values():
                torch._foreach_copy_(targets, sources)
            return
        for tensor, other in pairs:
            self.rows.put(tensor, other)


def _side_by_side(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs, but those that are columns of one matrix in both, as queries, keys and values are, as the pair that these make."""
    found: list[Pair] = []
    for pair in sorted(pairs, key=lambda pair: pair[0].data_ptr()):
        if found and all(_are_columns(x) for x in (*found[-1], *pair)):
            whole = [joined([x.flatten(1) for x in columns], 1) for columns in zip(found[-1], pair, strict=True)]
            if all(x is not None for x in whole):
                found[-1] = whole[0], whole[1]
                continue
        found.append(pair)
    return found


def _are_columns(x: Tensor) -> bool:
    """Whether each row is in one piece, but not all of them together."""
    return x.dim() > 1 and x.numel() > 0 and not x.is_contiguous() and x[0].is_contiguous()


@dataclass(frozen=True)
class _Move:
    """How a layer's rows of choices come into the order of those of both passes.

    replaced  (old, new) of the first pass's numbers
    source    int64 [T k]: for each row, which it is of the first pass's rows, then the later one's
    num_later S k
    """

    replaced: Sequence[tuple[Tensor, Tensor]]
    source: Tensor
    num_later: int

    @classmethod
    def of_layers(cls, firsts: Sequence[_Routed], laters: Sequence[_Routed], rows: Rows) -> list[_Move]:
        """Of all layers at once: those of one are ten launches, each of a few microseconds."""
        if not firsts:
            return []
        own, others = ([routed.permutation for routed in all_routed] for all_routed in (firsts, laters))
        indices, source = torch.stack([routed.indices for routed in firsts]), torch.stack([each.row for each in own])
        of_later = torch.stack([routed.indices for routed in laters]), torch.stack([each.row for each in others]) + len(own[0].slot)
        for values, later in zip((indices, source), of_later, strict=True):
            rows.put(values.transpose(0, 1), later.transpose(0, 1))  # a row a token
        joint = sort_each_by_expert(indices, len(own[0].counts))
        sources = source.flatten(1).gather(1, torch.stack([each.slot for each in joint]))
        return [cls(((one.slot, both.slot), (one.row, both.row), (one.counts, both.counts)), chosen, len(other.slot))
                for one, other, both, chosen in zip(own, others, joint, sources.unbind(0), strict=True)]

    def moved(self, tensor: Tensor, other: Tensor) -> Tensor | None:
        """What `tensor` becomes; None where it is none of the layer's choices."""
        for old, new in self.replaced:
            if tensor.data_ptr() == old.data_ptr() and tensor.shape == old.shape:
                return new
        if tensor.dim() == 0 or (len(tensor), len(other)) != (len(self.source), self.num_later):
            return None
        if takes(tensor, other):
            from ..kernels.choose_rows import choose_rows  # Triton is there with CUDA alone

            return choose_rows(tensor, other, self.source)
        return torch.cat([tensor, other]).index_select(0, self.source)


def grafted(entered: Tensor, leaf: Tensor, result: Tensor) -> Tensor:
    """The values of `result`, as what its graph, which begins at `leaf`, makes of `entered`, of the same shape: whose gradient is then the
    leaf's. The graph's other leaves get theirs in `.grad` (or go their own ways), so that torch.autograd.grad does not see them."""
    if not result.requires_grad:
        return result
    return _Grafted.apply(entered, result.new_empty(0, requires_grad=True), leaf, [result])


class _Grafted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, entered: Tensor, ticket: Tensor, leaf: Tensor, results: list[Tensor]) -> Tensor:
        ctx.leaf, ctx.results = leaf, results
        return results[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        torch.autograd.backward(ctx.results.pop(), grad)
        (of_leaf, ctx.leaf.grad), ticket = (ctx.leaf.grad, None), grad.new_empty(0)
        return of_leaf if ctx.needs_input_grad[0] else None, ticket, None, None
