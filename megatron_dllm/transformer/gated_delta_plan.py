"""Which tokens of a pass follow which, for layers that carry a state from token to token: worked out once a pass, from lengths alone.

A pass is a row of *runs*, each of tokens that follow each other. A run starts from nothing, from a state that an earlier pass kept, or
from the end of another run. A document a b c d e with a canvas x y that starts before its token d, in the first pass and the loop after it:

    first pass    run 0: a b c, from nothing    run 1: d e, from the end of run 0    run 2: x y, from the end of run 0
    second loop   run 0: x y, from what was kept of the first pass: the end of its run 0
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..context_parallel.heads import to_heads, to_tokens
from ..parallel import Group
from .gated_delta_rule import CHUNK, Level
from .rows import Rows
from .visibility import Visibility

NOTHING = 0  # the origin of a run that starts from nothing; 1 + c: from kept state c; 1 + num_contexts + r: from the end of run r


@dataclass(frozen=True)
class Runs:
    """lengths [R], none 0, cover the pass's tokens in order; origins [R], each of an earlier run; kept: the origins whose states are
    handed on (None: nothing is)."""

    lengths: tuple[int, ...]
    origins: tuple[int, ...]
    num_contexts: int = 0
    kept: tuple[int, ...] | None = None


def first_runs(visibility: Visibility, again: np.ndarray | None) -> Runs:
    """The runs of [clean ; canvas]; the states at the start of canvases that `again` (bool, a value a canvas token) marks are kept.

    None: no loop follows.
    """
    num_clean = visibility.num_clean_keys
    starts = set(visibility.first_key[:num_clean].tolist())
    ids, own = visibility.canvas_keys, slice(num_clean, None)
    firsts = np.flatnonzero(np.diff(ids, prepend=-1))
    # A canvas sees all clean tokens of its document before it.
    spans = list(zip(visibility.first_key[own][firsts].tolist(), visibility.past_key[own][firsts].tolist(), strict=True))
    bounds = sorted(starts | {past for _, past in spans} | {0, num_clean})
    ends = {past: 1 + run for run, past in enumerate(bounds[1:])}
    origins = [NOTHING if bound in starts else ends[bound] for bound in bounds[:-1]]
    at_canvas = [NOTHING if first == past else ends[past] for first, past in spans]
    kept = None if again is None else tuple(origin for origin, row in zip(at_canvas, firsts, strict=True) if again[row])
    lengths = (*np.diff(bounds).tolist(), *np.diff(firsts, append=len(ids)).tolist())
    return Runs(lengths, (*origins, *at_canvas), kept=kept)


def second_runs(visibility: Visibility, again: np.ndarray) -> Runs:
    """The runs of the canvas tokens that `again` marks, each canvas from its own kept state."""
    ids = visibility.canvas_keys[again]
    lengths = np.diff(np.flatnonzero(np.diff(ids, prepend=-1)), append=len(ids)).tolist()
    return Runs(tuple(lengths), tuple(range(1, 1 + len(lengths))), num_contexts=len(lengths))


def appended_runs(counts: Sequence[int], has_contexts: bool) -> Runs:
    """Generation: so many new tokens of each row after what is held of it; the state at every row's end is kept."""
    rows = len(counts)
    num_contexts = rows if has_contexts else 0
    old = [1 + row if has_contexts else NOTHING for row in range(rows)]
    active = [row for row in range(rows) if counts[row]]
    kept = list(old)
    for run, row in enumerate(active):
        kept[row] = 1 + num_contexts + run
    return Runs(tuple(int(counts[row]) for row in active), tuple(old[row] for row in active), num_contexts, tuple(kept))


@dataclass(frozen=True)
class TokenTrade:
    """Own tokens of all heads against all tokens of own heads, over cp. counts: tokens by rank; order: where the pass's j-th token stands
    among the rows of rank 0, 1, ...; places: the inverse."""

    counts: tuple[int, ...]
    order: Rows
    places: Rows

    def to_heads(self, x: Tensor, cp: Group) -> Tensor:
        """All tokens of our heads from own tokens [n, heads, d]."""
        return self.order.take(to_heads(x, self.counts, cp))

    def to_tokens(self, x: Tensor, cp: Group) -> Tensor:
        """The inverse."""
        return to_tokens(self.places.take(x), self.counts, cp)


def tokens_by_rank(clean: Sequence[np.ndarray], canvas: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The numbers in [clean ; canvas] of each rank's tokens, from those of its clean and of its canvas tokens, each counted from 0."""
    num_clean = sum(map(len, clean))
    return [np.concatenate([own, num_clean + others]) for own, others in zip(clean, canvas, strict=True)]


@dataclass(frozen=True)
class RunLevel:
    """Whole runs whose origins are all known: their tokens, one run after the other; where each begins, and the end of the last; and the
    states before them (int64), among [initial ; ends of the runs of earlier levels]."""

    tokens: Rows
    bounds: tuple[int, ...]
    parents: Tensor


@dataclass(frozen=True)
class GatedDeltaPlan:
    """Runs on the device, R of them, for a convolution over K tokens and chunks of L.

    num_tokens    T, without fill
    tails         int64 [R (K-1)]: the K-1 rows before each run, among [a row of zeros ; kept tails ; tokens]
    unrolled      int64 [R (K-1) + T]: every run with its tail before it, among [tails ; tokens]
    token_rows    int64 [T]: where the tokens stand in the unrolled rows
    places        int64 [T]: where they stand in the chunks, [num_chunks * L]
    levels        the chunks by the number of chunks before them
    run_levels    the runs by the number of runs before them; run_order: where the pass's tokens stand among those of the levels
    trade         None: this rank has all tokens
    kept_states   int64 [S], among [zero ; kept states ; ends of chunks]; kept_runs the same among [zero ; kept states ; ends of the runs of
                  run_levels]; kept_tails int64 [S (K-1)], among the same as `tails`; or None
    """

    num_tokens: int
    tails: Tensor
    unrolled: Tensor
    token_rows: Tensor
    places: Tensor
    num_chunks: int
    levels: tuple[Level, ...]
    run_levels: tuple[RunLevel, ...]
    run_order: Rows
    kept_states: Tensor | None
    kept_runs: Tensor | None
    kept_tails: Tensor | None
    trade: TokenTrade | None


def gated_delta_plan(runs: Runs, kernel: int, device: torch.device, parts: Sequence[np.ndarray] | None = None) -> GatedDeltaPlan:
    """The plan of one pass; `kernel` is K. `parts`: by rank of cp, the numbers of its tokens, of which together the pass consists."""
    before, initial = kernel - 1, 1 + runs.num_contexts
    starts = np.cumsum(runs.lengths) - runs.lengths
    tokens = 1 + runs.num_contexts * before  # the first token's row among [a row of zeros ; kept tails ; tokens]
    # By origin: the rows before what starts there.
    tail_of = [np.zeros(before, np.int64), *(1 + c * before + np.arange(before) for c in range(runs.num_contexts))]
    tails = []
    for start, length, origin in zip(starts, runs.lengths, runs.origins, strict=True):
        tails.append(tail_of[origin])
        seen = np.concatenate([tails[-1], tokens + start + np.arange(length)])
        tail_of.append(seen[len(seen) - before:])
    num_tails, ends = len(tails) * before, [*(starts + runs.lengths)]
    unrolled = [np.concatenate([run * before + np.arange(before), num_tails + np.arange(start, end)])
                for run, (start, end) in enumerate(zip(starts, ends, strict=True))]
    token_rows = np.concatenate([np.zeros(0, np.int64), *(start + (run + 1) * before + np.arange(end - start)
                                                          for run, (start, end) in enumerate(zip(starts, ends, strict=True)))])
    places, levels, state_of = _chunks(runs, initial)
    run_levels, run_order, end_of = _run_levels(runs, initial, device)
    kept_states = kept_runs = kept_tails = None
    if runs.kept is not None:
        kept_states = _tensor([state_of[origin] for origin in runs.kept], device)
        kept_runs = _tensor([end_of[origin] for origin in runs.kept], device)
        kept_tails = _tensor(_joined([tail_of[origin] for origin in runs.kept]), device)
    trade = None
    if parts is not None:
        order = np.argsort(np.concatenate(parts))
        trade = TokenTrade(tuple(map(len, parts)), Rows.of(order, device), Rows.of(np.argsort(order), device))
    return GatedDeltaPlan(
        int(sum(runs.lengths)), _tensor(_joined(tails), device), _tensor(_joined(unrolled), device), _tensor(token_rows, device),
        _tensor(places, device), levels[-1].stop if levels else 0,
        tuple(Level(level.start, level.stop, level.parents.to(device)) for level in levels), run_levels, run_order, kept_states, kept_runs,
        kept_tails, trade)


def _run_levels(runs: Runs, initial: int, device: torch.device) -> tuple[tuple[RunLevel, ...], Rows, list[int]]:
    """The levels, where their tokens come from, and by origin the number of its state among [initial ; ends of the levels' runs]."""
    depth_of, members = [-1] * initial, []
    for run, origin in enumerate(runs.origins):
        depth = depth_of[origin] + 1
        if depth == len(members):
            members.append([])
        members[depth].append(run)
        depth_of.append(depth)
    starts = np.cumsum(runs.lengths) - runs.lengths
    end_of, levels, order = {origin: origin for origin in range(initial)}, [], []
    for own in members:
        parents = [end_of[runs.origins[run]] for run in own]
        lengths = [runs.lengths[run] for run in own]
        tokens = _joined([starts[run] + np.arange(runs.lengths[run]) for run in own])
        order.append(tokens)
        levels.append(RunLevel(Rows.of(tokens, device), (0, *np.cumsum(lengths).tolist()), _tensor(parents, device)))
        end_of |= {initial + run: len(end_of) + number for number, run in enumerate(own)}
    return tuple(levels), Rows.of(np.argsort(_joined(order)), device), [end_of[origin] for origin in range(initial + len(runs.lengths))]


def _chunks(runs: Runs, initial: int) -> tuple[np.ndarray, tuple[Level, ...], list[int]]:
    """Place of each token in the chunks, the levels, and by origin the number of its state among [initial ; ends of chunks]."""
    depth_of, by_level, last = [-1] * initial, [], [None] * initial  # by origin: its depth, and its last chunk
    chunks = []  # of every run: (level, number in it) of each of its chunks
    for length, origin in zip(runs.lengths, runs.origins, strict=True):
        parent = origin if last[origin] is None else last[origin]
        own = []
        for step in range(-(-length // CHUNK)):
            depth = depth_of[origin] + 1 + step
            if depth == len(by_level):
                by_level.append([])
            own.append((depth, len(by_level[depth])))
            by_level[depth].append(parent if step == 0 else own[-2][1])
        chunks.append(own)
        depth_of.append(own[-1][0])
        last.append(own[-1][1])
    first = np.cumsum([0, *map(len, by_level)])
    levels = tuple(Level(int(first[n]), int(first[n + 1]), torch.tensor(parents)) for n, parents in enumerate(by_level))
    places = [(first[depth] + number) * CHUNK + np.arange(min(CHUNK, length - step * CHUNK))
              for length, own in zip(runs.lengths, chunks, strict=True) for step, (depth, number) in enumerate(own)]
    state_of = [*range(initial), *(initial + int(first[own[-1][0]] + own[-1][1]) for own in chunks)]
    return _joined(places), levels, state_of


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _tensor(values, device: torch.device) -> Tensor:
    return torch.as_tensor(np.asarray(values, np.int64), device=device)
