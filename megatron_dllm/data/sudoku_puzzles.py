"""Sudoku puzzles with exactly one solution: the solver, the generator and the split by solution grid.

A board of size n (4 or 9) has boxes of side b = sqrt(n). Puzzles and grids are uint8 [N, n*n], row by row, 0 for a blank cell.
The solver works on many boards at once: `candidates` is uint16 [n, n, M], bit d-1 set where digit d is still possible; the boards come
last so that every numpy operation runs along memory.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from typing import Literal

import numpy as np

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
SIZES = (4, 9)
# Puzzles are drawn in blocks of this many, each from a key of its own: puzzle i is the same however many are asked for.
BLOCK_SIZE = 1024
# Of the 288 grids of size 4. Of the 6.67e21 grids of size 9, in sixteenths.
HELD_OUT_4X4 = {"test": 58, "valid": 14}
HELD_OUT_9X9_SIXTEENTHS = {"test": 2, "valid": 1}
# Boards searched at a time: 4096 boards of 81 uint16 candidates stay inside the caches.
SEARCH_WIDTH = 4096
# Bits set in each set of nine digits (numpy counts bits itself only from 2.0 on).
NUM_BITS = np.array([value.bit_count() for value in range(512)], np.uint8)


@dataclass(frozen=True)
class PuzzleSet:
    """The puzzles numbered 0, 1, 2, ... of one (size, split, clues, seed)."""

    size: int
    split: Split
    min_clues: int
    max_clues: int
    seed: int

    def __post_init__(self):
        if self.size not in SIZES:
            raise ValueError(f"Sudoku size {self.size}: only {SIZES} are generated; set --sudoku-size to one of them")
        if self.split not in SPLITS:
            raise ValueError(f"Sudoku split '{self.split}': name one of {SPLITS}")
        if not 0 <= self.min_clues <= self.max_clues <= self.size**2:
            raise ValueError(f"Sudoku clues {self.min_clues} to {self.max_clues}: write the fewest first, from 0 to {self.size**2} cells")
        if self.seed < 0:
            raise ValueError(f"Sudoku seed {self.seed}: set --seed to 0 or more")


def generate(puzzles: PuzzleSet, count: int, *, num_workers: int = 0) -> np.ndarray:
    """The first `count` puzzles and their solutions, uint8 [count, 2, n*n]; the same for any number of worker processes."""
    blocks = range(-(-count // BLOCK_SIZE))
    if num_workers > 1 and len(blocks) > 1:
        # Spawned, since a fork of a process that has run torch threads may hang.
        with ProcessPoolExecutor(min(num_workers, len(blocks)), mp_context=get_context("spawn")) as pool:
            drawn = list(pool.map(_generate_block, [puzzles] * len(blocks), blocks))
    else:
        drawn = [_generate_block(puzzles, block) for block in blocks]
    return np.concatenate([np.empty((0, 2, puzzles.size**2), np.uint8), *drawn])[:count]


def _generate_block(puzzles: PuzzleSet, block: int) -> np.ndarray:
    """Puzzles block * BLOCK_SIZE and following with their solutions, uint8 [BLOCK_SIZE, 2, n*n]."""
    key = (puzzles.seed, puzzles.size, SPLITS.index(puzzles.split), block)
    draws = np.random.Philox(np.random.SeedSequence(key))
    if puzzles.size == 4:
        grids = grids_4x4(puzzles.split)
        solutions = grids[draws.random_raw(BLOCK_SIZE) % len(grids)]
    else:
        solutions = relabel_into_split(random_grids(puzzles.size, BLOCK_SIZE, draws), puzzles.split, draws)
    spread = np.uint64(puzzles.max_clues - puzzles.min_clues + 1)
    targets = puzzles.min_clues + (draws.random_raw(BLOCK_SIZE) % spread).astype(np.int64)
    return np.stack([carve(solutions, targets, draws), solutions], axis=1)


# --- solving


def solve(puzzles: np.ndarray, *, limit: int | None = 2) -> tuple[np.ndarray, np.ndarray]:
    """Solutions of each puzzle [N, n*n] by a complete search, given up once `limit` are known (None: all are found).

    Returns the puzzle each solution belongs to, int64 [S], and the solutions, uint8 [S, n*n]. A search step propagates singles and then
    halves a cell with the fewest candidates: its lowest digit, or any of the others.
    """
    size = _size_of(puzzles)
    stack = [(_candidates(puzzles, size), np.arange(len(puzzles)))]
    counts = np.zeros(len(puzzles), np.int64)
    owners_found, grids_found = [np.empty(0, np.int64)], [np.empty((0, size**2), np.uint8)]
    while stack:
        candidates, owners = stack.pop()
        if len(owners) > SEARCH_WIDTH:
            stack.append((candidates[..., SEARCH_WIDTH:], owners[SEARCH_WIDTH:]))
            candidates, owners = candidates[..., :SEARCH_WIDTH], owners[:SEARCH_WIDTH]
        if limit is not None:
            wanted = counts[owners] < limit
            candidates, owners = _boards(candidates, wanted), owners[wanted]
        candidates = propagate(candidates)
        alive = candidates.all(axis=(0, 1))
        done = alive & _is_single(candidates).all(axis=(0, 1))
        np.add.at(counts, owners[done], 1)
        owners_found.append(owners[done])
        grids_found.append(_digits(_boards(candidates, done)))
        open_boards = alive & ~done
        if open_boards.any():
            lowest, others = _halve(_boards(candidates, open_boards))
            stack.append((np.concatenate([lowest, others], axis=-1), np.tile(owners[open_boards], 2)))
    return np.concatenate(owners_found), np.concatenate(grids_found)


def has_one_solution(puzzles: np.ndarray) -> np.ndarray:
    """Whether each puzzle [N, n*n] has exactly one solution, bool [N]."""
    owners, _ = solve(puzzles, limit=2)
    return np.bincount(owners, minlength=len(puzzles)) == 1


def propagate(candidates: np.ndarray) -> np.ndarray:
    """Removes candidates [n, n, M] by naked and hidden singles until nothing changes; a board without a solution by then is all 0."""
    candidates = candidates.copy()
    active = np.arange(candidates.shape[-1])
    while len(active):
        before = _boards(candidates, active)
        after = _propagate_once(before)
        candidates[..., active] = after
        active = active[(before != after).any(axis=(0, 1))]
    return candidates


def _boards(candidates: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The chosen boards (indices or bool [M]) of [n, n, M], in C order (candidates[..., chosen] would not be)."""
    return np.take(candidates, np.flatnonzero(chosen) if chosen.dtype == bool else chosen, axis=-1)


def _propagate_once(candidates: np.ndarray) -> np.ndarray:
    size, boards = candidates.shape[0], candidates.shape[-1]
    every_digit = candidates.dtype.type(2**size - 1)
    singles = np.where(_is_single(candidates), candidates, 0)
    fixed = np.zeros(candidates.shape, np.uint16)
    for unit, fixed_unit in zip(_units(singles), _units(fixed), strict=True):
        fixed_unit |= np.bitwise_or.reduce(unit, axis=(1, 3), keepdims=True)
    remaining = np.where(singles != 0, candidates, candidates & ~fixed)

    hidden = np.zeros(candidates.shape, np.uint16)
    possible = np.ones(boards, bool)
    for unit, hidden_unit in zip(_units(remaining), _units(hidden), strict=True):
        once, ever = np.zeros_like(unit[:, :1, :, :1]), np.zeros_like(unit[:, :1, :, :1])
        for i in range(unit.shape[1]):
            for j in range(unit.shape[3]):
                cell = unit[:, i : i + 1, :, j : j + 1]
                once = (once & ~cell) | (cell & ~ever)
                ever |= cell
        possible &= (ever == every_digit).all(axis=(0, 1, 2, 3))
        hidden_unit |= unit & once
    # A cell that is the only place for two digits is a contradiction too.
    possible &= _is_single(hidden).all(axis=(0, 1)) & remaining.all(axis=(0, 1))
    return np.where(hidden != 0, hidden, remaining) * possible


def _units(boards: np.ndarray) -> list[np.ndarray]:
    """Rows, columns and boxes of [n, n, M] (C order) as views [X, i, Y, j, M], the cells of a unit along i and j."""
    size, count = boards.shape[0], boards.shape[-1]
    box = int(size**0.5)
    shapes = (size, 1, 1, size), (1, size, size, 1), (box, box, box, box)
    return [boards.reshape(*shape, count) for shape in shapes]


def _is_single(candidates: np.ndarray) -> np.ndarray:
    """At most one candidate left."""
    return (candidates & (candidates - np.uint16(1))) == 0


def _halve(candidates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each board [n, n, M] with a cell of the fewest candidates (two at least) set to its lowest digit, and to any of the others."""
    count = candidates.shape[-1]
    flat = candidates.reshape(-1, count)
    options = NUM_BITS[flat]
    cell = np.where(options > 1, options, 255).argmin(axis=0)
    chosen = flat[cell, np.arange(count)]
    lowest_bit = chosen & (~chosen + np.uint16(1))
    lowest, others = flat.copy(), flat.copy()
    lowest[cell, np.arange(count)] = lowest_bit
    others[cell, np.arange(count)] = chosen & ~lowest_bit
    return lowest.reshape(candidates.shape), others.reshape(candidates.shape)


def _size_of(puzzles: np.ndarray) -> int:
    size = int(puzzles.shape[-1] ** 0.5)
    if puzzles.ndim != 2 or size not in SIZES or size * size != puzzles.shape[1]:
        raise ValueError(f"Sudoku puzzles of shape {puzzles.shape}: need [count, 16] or [count, 81]")
    if puzzles.size and int(puzzles.max()) > size:
        raise ValueError(f"a Sudoku puzzle of size {size} holds {int(puzzles.max())}: cells are 0 (blank) to {size}")
    return size


def _candidates(puzzles: np.ndarray, size: int) -> np.ndarray:
    """uint16 [n, n, N] of puzzles [N, n*n]."""
    bits = np.array([2**size - 1, *(1 << d for d in range(size))], np.uint16)
    return np.ascontiguousarray(bits[puzzles].T).reshape(size, size, len(puzzles))


def _digits(candidates: np.ndarray) -> np.ndarray:
    """uint8 [M, n*n] of boards [n, n, M] in which every cell is single."""
    digits = NUM_BITS[candidates - np.uint16(1)] + np.uint8(1)
    return np.ascontiguousarray(digits.reshape(candidates.shape[0] ** 2, candidates.shape[-1]).T)


# --- solved grids and their split


@cache
def grids_4x4(split: Split | None = None) -> np.ndarray:
    """The solved 4x4 grids of one split (None: all 288), uint8 [G, 16], in the order of their hashes."""
    _, grids = solve(np.zeros((1, 16), np.uint8), limit=None)
    grids = grids[np.argsort(grid_hash(grids))]
    grids.flags.writeable = False  # cached: shared by all callers
    test, valid = HELD_OUT_4X4["test"], HELD_OUT_4X4["valid"]
    parts = {None: grids, "test": grids[:test], "valid": grids[test : test + valid], "train": grids[test + valid :]}
    return parts[split]


def split_of_9x9(grids: np.ndarray) -> np.ndarray:
    """Index into SPLITS of each solved grid [N, 81], int64 [N]; it depends on the grid alone, never on a seed."""
    sixteenth = (grid_hash(grids) >> np.uint64(60)).astype(np.int64)
    test, valid = HELD_OUT_9X9_SIXTEENTHS["test"], HELD_OUT_9X9_SIXTEENTHS["valid"]
    return np.select([sixteenth < test, sixteenth < test + valid], [SPLITS.index("test"), SPLITS.index("valid")], SPLITS.index("train"))


def grid_hash(grids: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each row of cells [N, n*n], uint64 [N]: a polynomial in the cells, finished by splitmix64's mixing."""
    value = np.zeros(len(grids), np.uint64)
    for cells in grids.astype(np.uint64).T:
        value = value * np.uint64(0x100000001B3) + cells
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def random_grids(size: int, count: int, draws: np.random.Philox) -> np.ndarray:
    """Solved grids, uint8 [count, n*n]: digits are set at random in a most constrained cell, and a board that gets stuck starts again."""
    blank = np.full((size, size, 1), 2**size - 1, np.uint16)
    boards = np.repeat(blank, count, axis=-1)
    # Which of equally constrained cells comes first; with the number of candidates in front of it, a rank of all cells.
    priority = draws.random_raw(boards.size).reshape(-1, count) >> np.uint64(16)
    active = np.arange(count)
    while len(active):
        boards[..., active] = propagate(_set_random_cell(_boards(boards, active), np.take(priority, active, axis=1), draws))
        stuck = ~boards.all(axis=(0, 1))
        boards[..., stuck] = blank
        active = active[~_is_single(_boards(boards, active)).all(axis=(0, 1))]
    return _digits(boards)


def _set_random_cell(candidates: np.ndarray, priority: np.ndarray, draws: np.random.Philox) -> np.ndarray:
    """Boards [n, n, M], none solved, with a random digit in a cell of the fewest candidates; ties go to the lowest priority [n*n, M]."""
    size, count = candidates.shape[0], candidates.shape[-1]
    flat = candidates.reshape(-1, count).copy()
    options = NUM_BITS[flat].astype(np.uint64)
    rank = (options << np.uint64(48)) | priority
    cell = np.where(options > 1, rank, np.iinfo(np.uint64).max).argmin(axis=0)
    bits = np.uint16(1) << np.arange(size, dtype=np.uint16)[:, None]
    allowed = (flat[cell, np.arange(count)] & bits) != 0
    # Draws of at least 1, so that a digit that is not allowed never wins.
    digit = np.where(allowed, draws.random_raw(allowed.size).reshape(allowed.shape) | np.uint64(1), 0).argmax(axis=0)
    flat[cell, np.arange(count)] = bits[digit, 0]
    return flat.reshape(candidates.shape)


def relabel_into_split(grids: np.ndarray, split: Split, draws: np.random.Philox) -> np.ndarray:
    """9x9 grids [N, 81] with their digits renamed at random until each belongs to the split."""
    grids = grids.copy()
    outside = np.arange(len(grids))
    while len(outside):
        names = draws.random_raw(len(outside) * 9).reshape(-1, 9).argsort(axis=1).astype(np.uint8) + np.uint8(1)
        grids[outside] = np.take_along_axis(names, grids[outside].astype(np.int64) - 1, axis=1)
        outside = outside[split_of_9x9(grids[outside]) != SPLITS.index(split)]
    return grids


# --- puzzles


def carve(grids: np.ndarray, targets: np.ndarray, draws: np.random.Philox) -> np.ndarray:
    """Solved grids [N, n*n] with cells blanked in random order while the solution stays unique and `targets` [N] clues remain.

    A puzzle ends with more clues than its target where no cell can be blanked any more. Cells are tried in runs, which double after
    a success and halve after a failure: a run that leaves one solution would also have been blanked cell by cell, so this is greedy.
    """
    count, cells = grids.shape
    # place[i, c]: when cell c of board i is tried.
    place = draws.random_raw(count * cells).reshape(count, cells).argsort(axis=1).argsort(axis=1)
    puzzles = grids.copy()
    tried = np.zeros(count, np.int64)
    run = np.full(count, cells // 3)
    active = np.arange(count)
    while len(active):
        spare = (puzzles[active] != 0).sum(axis=1) - targets[active]
        length = np.minimum(np.minimum(run[active], spare), cells - tried[active])
        active, length = active[length > 0], length[length > 0]
        start = tried[active, None]
        blanked = (place[active] >= start) & (place[active] < start + length[:, None])
        attempt = np.where(blanked, 0, puzzles[active])
        unique = has_one_solution(attempt)
        puzzles[active[unique]] = attempt[unique]
        tried[active] += np.where(unique, length, length == 1)
        run[active] = np.where(unique, 2 * length, np.maximum(length // 2, 1))
    return puzzles
