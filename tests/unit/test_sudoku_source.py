"""Puzzles as examples: tokens, cache, checkers, and the figures that a run prints."""

import numpy as np
import pytest

from megatron_dllm.data import sudoku_puzzles
from megatron_dllm.data.source import ExampleSource
from megatron_dllm.data.sudoku import (
    SudokuSource,
    SudokuTokenizer,
    draw_board,
    exact_match,
    is_solved,
    num_grids,
    num_shared_grids,
)
from megatron_dllm.data.sudoku_puzzles import PuzzleSet, generate, has_one_solution
from tools.sudoku import main

SOLVED = "1234341221434321"
PUZZLE = "1...3.1..1...32."


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Puzzles are drawn a block at a time, and these tests need few."""
    monkeypatch.setattr(sudoku_puzzles, "BLOCK_SIZE", 16)


def cells(text):
    return np.array([int(digit) for digit in text.replace(".", "0")], np.uint8)


@pytest.mark.parametrize("size", [4, 9])
def test_tokenizer_round_trip(size):
    tokenizer = SudokuTokenizer(size)
    assert tokenizer.vocab_size == 5 + size
    every = list(range(tokenizer.vocab_size))
    assert tokenizer.decode(every) == "<pad><eos><bos>.=" + "123456789"[:size]
    assert tokenizer.decode(every, skip_special_tokens=True) == ".=" + "123456789"[:size]
    assert tokenizer.encode(tokenizer.decode(every[3:])) == every[3:]
    assert tokenizer.encode(" 10\n.= ") == [5, 3, 3, 4]
    assert [tokenizer.is_special(token) for token in (0, 1, 2, 3, 5)] == [True, True, True, False, False]


def test_tokenizer_refuses():
    with pytest.raises(ValueError, match="'5' is no part of a 4x4"):
        SudokuTokenizer(4).encode("1235")
    for token in (-1, 9):
        with pytest.raises(ValueError, match=f"token id {token} is outside.*9"):
            SudokuTokenizer(4).decode([1, token])
    with pytest.raises(ValueError, match="size 6"):
        SudokuTokenizer(6)
    with pytest.raises(ValueError, match="no chat template"):
        SudokuTokenizer(4).apply_chat_template([])


def test_tokenizer_cells():
    tokenizer = SudokuTokenizer(4)
    assert tokenizer.cells(np.arange(9)).tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4]
    assert tokenizer.decode(tokenizer.prompt(cells(PUZZLE)[None])[0]) == f"<bos>{PUZZLE}="
    assert tokenizer.decode(tokenizer.response(cells(SOLVED)[None])[0]) == SOLVED


@pytest.mark.parametrize("size", [4, 9])
def test_source(size):
    source = SudokuSource(size, "valid", 7, 5)
    assert isinstance(source, ExampleSource)
    assert len(source) == 7
    assert source.lengths.tolist() == [[size**2 + 2, size**2]] * 7 and source.lengths.dtype == np.int32
    assert source.keys.tolist() == [[i, 0] for i in range(7)] and source.keys.dtype == np.int64
    assert not source.truncated.any()
    for i in range(7):
        tokens = source.tokens(i)
        assert tokens.dtype == np.int32
        puzzle, solution = source.tokenizer.decode(tokens, skip_special_tokens=True).split("=")
        assert has_one_solution(cells(puzzle)[None])[0]
        assert is_solved(cells(puzzle), cells(solution))
    assert source.describe(3) == f"sudoku-{size}x{size}-valid puzzle 3"
    for index in (-1, 7):
        with pytest.raises(IndexError, match=f"puzzle {index} of .*has 7"):
            source.tokens(index)


def test_source_clues():
    assert ((SudokuSource(4, "train", 50, 1, clues=(9, 9)).puzzles != 0).sum(axis=1) == 9).all()


def test_splits_share_no_grid(monkeypatch):
    monkeypatch.setattr(sudoku_puzzles, "BLOCK_SIZE", 1024)
    train = SudokuSource(4, "train", 4000, 1)
    for split, count in (("test", 58), ("valid", 14)):
        held_out = SudokuSource(4, split, 1000, 2)
        assert (num_grids(train), num_grids(held_out), num_shared_grids(train, held_out)) == (216, count, 0)
    assert num_shared_grids(train, SudokuSource(4, "train", 50, 7)) > 0


def test_cache(tmp_path):
    folder = tmp_path / "a b"
    first = SudokuSource(4, "train", 20, 1, cache_dir=folder)
    (file,) = folder.iterdir()
    again = SudokuSource(4, "train", 20, 1, cache_dir=folder)
    drawn = generate(PuzzleSet(4, "train", 4, 8, 1), 20)
    for source in (first, again):
        assert np.array_equal(np.stack([source.puzzles, source.solutions], axis=1), drawn)
    # What is read is the file: other keys must not meet in it.
    changed = np.load(file)
    changed[0, 0] = 0
    np.save(file, changed)
    assert not SudokuSource(4, "train", 20, 1, cache_dir=folder).puzzles[0].any()
    for other in ((4, "train", 20, 2), (4, "test", 20, 1), (4, "train", 19, 1), (9, "train", 20, 1)):
        assert SudokuSource(*other, cache_dir=folder).puzzles[0].any()
    assert SudokuSource(4, "train", 20, 1, cache_dir=folder, clues=(5, 8)).puzzles[0].any()
    assert len(list(folder.iterdir())) == 6


@pytest.mark.parametrize("damage", [lambda data: data[:-5], lambda data: b"", lambda data: b"PK" + data], ids=["cut", "empty", "no npy"])
def test_cache_damaged(tmp_path, damage):
    SudokuSource(4, "train", 20, 1, cache_dir=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=f"{file.name}.*delete it"):
        SudokuSource(4, "train", 20, 1, cache_dir=tmp_path)
    file.unlink()
    assert len(SudokuSource(4, "train", 20, 1, cache_dir=tmp_path)) == 20


def test_cache_of_another_shape(tmp_path):
    SudokuSource(4, "train", 20, 1, cache_dir=tmp_path)
    (file,) = tmp_path.iterdir()
    np.save(file, np.zeros((20, 2, 15), np.uint8))
    with pytest.raises(ValueError, match=r"holds uint8 \(20, 2, 15\), not uint8 \(20, 2, 16\); delete it"):
        SudokuSource(4, "train", 20, 1, cache_dir=tmp_path)


def test_source_refuses():
    with pytest.raises(ValueError, match="0 Sudoku puzzles.*--sudoku-num-puzzles"):
        SudokuSource(4, "train", 0, 1)


BROKEN = {
    "row": "1134341221434321",
    "only rows right": "1234123412341234",
    "only columns right": "1111222233334444",
    "only columns wrong": "1234341212343412",
    "only rows wrong": "1313242431314242",
    "only boxes wrong": "1234234134124123",
    "blank": "1234341221434320",
    "digit 5": "1234341221434325",
    "another grid": "4321214334121234",
}


def test_is_solved():
    assert is_solved(cells(PUZZLE), cells(SOLVED))
    for name, text in BROKEN.items():
        assert not is_solved(cells(PUZZLE), cells(text)), name
        # Without clues each is wrong for its own reason alone, and the last is right.
        assert is_solved(cells("." * 16), cells(text)) == (name == "another grid"), name
    both = np.stack([cells(SOLVED), cells(BROKEN["row"])])
    assert is_solved(np.stack([cells(PUZZLE)] * 2), both).tolist() == [True, False]


def test_exact_match():
    tokenizer = SudokuTokenizer(4)
    prompt = [2, *tokenizer.encode(PUZZLE + "=")]
    right = tokenizer.encode(SOLVED)
    answers = {
        "exact": (right, True),
        "with fill": ([*right, 1, 1, 0, 0], True),
        "short": (right[:-1], False),
        "more cells": ([*right, 5], False),
        "separator for a cell": ([4, *right[1:]], False),
        "end within": ([*right[:15], 1], False),
        **{name: (tokenizer.encode(text), False) for name, text in BROKEN.items() if "5" not in text},
    }
    result = exact_match([prompt] * len(answers), [np.array(tokens) for tokens, _ in answers.values()], tokenizer)
    assert dict(zip(answers, result.tolist(), strict=True)) == {name: right for name, (_, right) in answers.items()}
    assert exact_match([], [], tokenizer).tolist() == []


def test_exact_match_refuses():
    tokenizer = SudokuTokenizer(4)
    with pytest.raises(ValueError, match="a prompt of 3 tokens is no 4x4 puzzle, which has 18"):
        exact_match([[2, 3, 4]], [[1]], tokenizer)


def test_draw_board():
    assert draw_board(cells(PUZZLE)) == "1 . | . .\n3 . | 1 .\n----+----\n. 1 | . .\n. 3 | 2 ."


def test_tool_prints_the_shared_grids(capsys, tmp_path):
    assert main(["--sudoku-num-puzzles", "160", "--held-out-puzzles", "32", "--num-workers", "1", "--data-cache-path", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "solution grids shared with training: valid 0, test 0"
    assert lines[1] == "sudoku-4x4-test puzzle 0"
    assert len(list(tmp_path.iterdir())) == 3


def test_tool_fails_when_grids_are_shared(capsys, monkeypatch):
    monkeypatch.setattr(sudoku_puzzles, "grids_4x4", lambda split: all_grids)
    assert main(["--sudoku-num-puzzles", "80", "--held-out-puzzles", "80", "--num-workers", "1", "--show", "0"]) == 1
    assert "valid 0" not in capsys.readouterr().out


all_grids = sudoku_puzzles.grids_4x4()
