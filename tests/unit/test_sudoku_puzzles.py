"""The Sudoku solver against plain backtracking, unique puzzles, and splits that share no grid."""

import itertools

import numpy as np
import pytest

from megatron_dllm.data import sudoku_puzzles
from megatron_dllm.data.sudoku import is_solved
from megatron_dllm.data.sudoku_puzzles import (
    PuzzleSet,
    carve,
    generate,
    grid_hash,
    grids_4x4,
    has_one_solution,
    propagate,
    random_grids,
    relabel_into_split,
    solve,
    split_of_9x9,
)

# A minimal puzzle with 17 clues and one that takes guessing; both are widely published.
SEVENTEEN = "000000010400000000020000000000050407008000300001090000300400200050100000000806000"
HARD = "850002400720000009004000000000107002305000900040000000000080070017000000000036040"


def board(text):
    return np.array([[int(digit) for digit in text]], np.uint8)


def backtrack(puzzle, size):
    """All solutions of one puzzle, cell by cell."""
    box = int(size**0.5)
    if 0 not in puzzle:
        return [puzzle]
    cell = puzzle.index(0)
    row, column = divmod(cell, size)
    seen = {
        puzzle[r * size + c]
        for r, c in itertools.product(range(size), repeat=2)
        if r == row or c == column or (r // box, c // box) == (row // box, column // box)
    }
    options = [digit for digit in range(1, size + 1) if digit not in seen]
    return [grid for digit in options for grid in backtrack(puzzle[:cell] + [digit] + puzzle[cell + 1 :], size)]


def philox(seed):
    return np.random.Philox(np.random.SeedSequence(seed))


def candidates(*rows):
    """One 4x4 board from rows of words: "124" says that these digits are possible."""
    return np.array([[[sum(1 << int(digit) - 1 for digit in word)] for word in row.split()] for row in rows], np.uint16)


ANY = "1234 1234 1234 1234"
PROPAGATED = {
    "naked single of a row": (("1 1234 2 3", ANY, ANY, ANY), (0, 1), "4"),
    "naked single of three units": (("1234 1234 1 1234", "1234 2 1234 1234", "3 1234 1234 1234", ANY), (0, 0), "4"),
    "hidden single of a row": (("1234 123 123 123", ANY, ANY, ANY), (0, 0), "4"),
    "hidden single of a column": (("123 1234 1234 1234", ANY, "123 1234 1234 1234", "123 1234 1234 1234"), (1, 0), "4"),
    "hidden single of a box": (("123 123 1234 1234", "123 1234 1234 1234", ANY, ANY), (1, 1), "4"),
    "two steps": (("1 1234 2 3", ANY, ANY, "1234 1 1234 1234"), (1, 1), "23"),
    "nothing to find": (("12 12 1234 1234", ANY, ANY, ANY), (0, 2), "1234"),
}


@pytest.mark.parametrize("case", PROPAGATED)
def test_propagate(case):
    rows, (row, column), expected = PROPAGATED[case]
    other = candidates(ANY, ANY, ANY, ANY)  # boards beside it, of which nothing is known, stay as they are
    after = propagate(np.concatenate([other, candidates(*rows), other], axis=-1))
    assert "".join(digit for digit in "1234" if after[row, column, 1] & 1 << int(digit) - 1) == expected
    assert (after[..., [0, 2]] == other).all()


@pytest.mark.parametrize(
    "rows",
    [
        ("123 123 123 123", ANY, ANY, ANY),
        ("1234 12 12 12", ANY, ANY, ANY),
        ("1234 1 2 1234", "1234 4 1234 1234", "3 1234 1234 1234", ANY),
    ],
    ids=["no place for a digit", "one place for two digits", "no digit for a cell"],
)
def test_propagate_empties_an_impossible_board(rows):
    assert not propagate(candidates(*rows)).any()


def test_solve_against_backtracking():
    """Random 4x4 clue sets: none, one and many solutions all occur, and all solutions are found."""
    draws = np.random.default_rng(0)
    puzzles = np.where(draws.random((60, 16)) < 0.3, draws.integers(1, 5, (60, 16)), 0).astype(np.uint8)
    puzzles[::2] = np.where(draws.random((30, 16)) < 0.4, grids_4x4()[draws.integers(0, 288, 30)], 0)
    expected = [sorted(backtrack([int(digit) for digit in puzzle], 4)) for puzzle in puzzles]
    # A clue that breaks a rule is found by solving only: the loop above never looks at the clues against each other.
    expected = [[grid for grid in grids if is_solved(np.zeros(16), np.array(grid))] for grids in expected]
    owners, grids = solve(puzzles, limit=None)
    found = [sorted(grids[owners == i].tolist()) for i in range(len(puzzles))]
    assert found == expected
    counts = {min(len(grids), 2) for grids in expected}
    assert counts == {0, 1, 2}
    assert has_one_solution(puzzles).tolist() == [len(grids) == 1 for grids in expected]


@pytest.mark.parametrize("text", [SEVENTEEN, HARD], ids=["17 clues", "hard"])
def test_solve_9x9(text):
    puzzle = board(text)
    owners, grids = solve(puzzle)
    assert owners.tolist() == [0]
    assert is_solved(puzzle[0], grids[0])
    # Without one of its clues a minimal puzzle has more solutions.
    if text == SEVENTEEN:
        for cell in np.flatnonzero(puzzle)[:4]:
            fewer = puzzle.copy()
            fewer[0, cell] = 0
            assert not has_one_solution(fewer)[0]


def test_solve_stops_at_its_limit(monkeypatch):
    monkeypatch.setattr(sudoku_puzzles, "SEARCH_WIDTH", 8)
    owners, grids = solve(np.zeros((3, 81), np.uint8), limit=2)
    assert (np.bincount(owners) >= 2).all()
    assert is_solved(np.zeros_like(grids), grids).all()
    assert len(grids) < 40


@pytest.mark.parametrize(
    ("puzzles", "message"),
    [
        (np.zeros((1, 15)), r"shape \(1, 15\): need"),
        (np.zeros(81), r"shape \(81,\): need"),
        (np.zeros((2, 25)), r"shape \(2, 25\): need"),
        (np.full((1, 16), 5), "of size 4 holds 5"),
    ],
    ids=["no square", "one board", "25", "digit"],
)
def test_solve_refuses(puzzles, message):
    with pytest.raises(ValueError, match=message):
        solve(puzzles.astype(np.uint8))


def test_grids_4x4():
    grids = grids_4x4()
    assert len(np.unique(grids, axis=0)) == 288
    assert is_solved(np.zeros_like(grids), grids).all()
    parts = {split: {grid.tobytes() for grid in grids_4x4(split)} for split in ("train", "valid", "test")}
    assert {split: len(part) for split, part in parts.items()} == {"train": 216, "valid": 14, "test": 58}
    assert len(set.union(*parts.values())) == 288


@pytest.mark.parametrize("size", [4, 9])
def test_random_grids(size):
    grids = random_grids(size, 100, philox(1))
    assert is_solved(np.zeros_like(grids), grids).all()
    assert len(np.unique(grids, axis=0)) > (99 if size == 9 else 60)
    # Every digit turns up in every cell: the draws reach all candidates.
    assert (np.sort(grids, axis=0)[[0, -1]] == [[1], [size]]).all()


def test_relabel_into_split():
    grids = random_grids(9, 64, philox(2))
    for number, split in enumerate(sudoku_puzzles.SPLITS):
        moved = relabel_into_split(grids, split, philox(3))
        assert (split_of_9x9(moved) == number).all()
        assert is_solved(np.zeros_like(moved), moved).all()


def test_split_of_9x9_shares():
    grids = random_grids(9, 1, philox(4))
    names = np.stack([philox(seed).random_raw(9).argsort() + 1 for seed in range(2000)])
    split = split_of_9x9(names[:, grids[0] - 1])
    assert np.abs(np.bincount(split, minlength=3) / 2000 - np.array([13, 1, 2]) / 16).max() < 0.03


def test_grid_hash_tells_cells_apart():
    grid = grids_4x4()[0]
    others = np.stack([np.roll(grid, shift) for shift in range(1, 16)] + [5 - grid])
    assert len({*grid_hash(others).tolist(), int(grid_hash(grid[None])[0])}) == 17
    # Pinned: another hash would move grids from one split to another between versions.
    assert int(grid_hash(np.arange(1, 17, dtype=np.uint8)[None])[0]) == 10619587854204892521


@pytest.mark.parametrize(("size", "target"), [(4, 4), (4, 7), (9, 34)])
def test_carve(size, target):
    grids = random_grids(size, 40, philox(5))
    puzzles = carve(grids, np.full(40, target), philox(6))
    assert has_one_solution(puzzles).all()
    assert ((puzzles == 0) | (puzzles == grids)).all()
    clues = (puzzles != 0).sum(axis=1)
    assert clues.min() >= target
    for puzzle, count in zip(puzzles, clues, strict=True):
        if count > target:  # then no clue can go
            fewer = np.repeat(puzzle[None], count, axis=0)
            fewer[np.arange(count), np.flatnonzero(puzzle)] = 0
            assert not has_one_solution(fewer).any()


def test_carve_is_greedy_cell_by_cell():
    grids = random_grids(4, 12, philox(7))
    order = philox(8).random_raw(12 * 16).reshape(12, 16).argsort(axis=1)
    expected = grids.copy()
    for i, cell in itertools.product(range(12), range(16)):
        attempt = expected[i : i + 1].copy()
        attempt[0, order[i, cell]] = 0
        if (attempt != 0).sum() >= 5 and has_one_solution(attempt)[0]:
            expected[i] = attempt[0]
    assert np.array_equal(carve(grids, np.full(12, 5), philox(8)), expected)


def test_generate_depends_on_its_key_alone(monkeypatch):
    monkeypatch.setattr(sudoku_puzzles, "BLOCK_SIZE", 16)
    base = PuzzleSet(9, "train", 36, 40, 1)
    drawn = generate(base, 30)
    assert np.array_equal(generate(base, 10), drawn[:10])
    assert has_one_solution(drawn[:, 0]).all()
    assert len(np.unique(drawn[:, 1], axis=0)) == 30
    clues = (drawn[:, 0] != 0).sum(axis=1)
    assert set(clues.tolist()) == {36, 37, 38, 39, 40}
    for other in (PuzzleSet(9, "train", 36, 40, 2), PuzzleSet(9, "test", 36, 40, 1)):
        assert not {grid.tobytes() for grid in generate(other, 16)[:, 1]} & {grid.tobytes() for grid in drawn[:, 1]}


def test_generate_with_workers():
    base = PuzzleSet(4, "train", 4, 8, 3)
    assert np.array_equal(generate(base, 1500, num_workers=2), generate(base, 1500))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((16, "train", 4, 8, 0), "size 16.*--sudoku-size"),
        ((4, "eval", 4, 8, 0), "split 'eval'"),
        ((4, "train", 9, 8, 0), "clues 9 to 8"),
        ((4, "train", 4, 17, 0), "from 0 to 16 cells"),
        ((4, "train", 4, 8, -1), "seed -1"),
    ],
)
def test_puzzle_set_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        PuzzleSet(*arguments)
