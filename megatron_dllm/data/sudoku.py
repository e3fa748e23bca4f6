"""Sudoku as examples: the prompt is a puzzle, the response its only solution; a yardstick of quality that needs no download."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dllm.data.sudoku_puzzles import SIZES, PuzzleSet, Split, generate
from megatron_dllm.data.tokenizers import ChatTokens, Message

# Fewest and most clues of a puzzle, where the source is not told: a puzzle's number is drawn evenly from the range.
DEFAULT_CLUES = {4: (4, 8), 9: (29, 37)}
# Part of the cached files' names: raise it when the generator gives other puzzles for the same key.
CACHE_VERSION = 1


class SudokuTokenizer:
    """One token a cell: <pad> 0, <eos> 1, <bos> 2, "." (a blank cell) 3, "=" (puzzle from solution) 4, digit d at 4 + d."""

    SPECIALS = ("<pad>", "<eos>", "<bos>", ".", "=")
    BLANK = SPECIALS.index(".")
    SEPARATOR = SPECIALS.index("=")
    FIRST_DIGIT = len(SPECIALS)

    pad_id: int | None = 0
    eos_ids: tuple[int, ...] = (1,)
    bos_id: int | None = 2

    def __init__(self, size: int):
        if size not in SIZES:
            raise ValueError(f"Sudoku size {size}: set --sudoku-size to one of {SIZES}")
        self.size = size
        self.vocab_size = self.FIRST_DIGIT + size
        self.name = f"sudoku{size}"
        self.fingerprint = f"sudoku{size}-1"
        self._pieces = (*self.SPECIALS, *(str(digit) for digit in range(1, size + 1)))

    def encode(self, text: str) -> list[int]:
        """Ids of digits, "." or "0" for blanks, and "="; white space is passed over. ValueError for any other character."""
        ids = []
        for character in "".join(text.split()).replace("0", "."):
            if character not in self._pieces:
                raise ValueError(f"{character!r} is no part of a {self.size}x{self.size} Sudoku; write 1 to {self.size}, '.' and '='")
            ids.append(self._pieces.index(character))
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of the ids, without <pad>, <eos> and <bos> on request. ValueError for an id outside the vocabulary."""
        outside = [int(token) for token in ids if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(f"token id {outside[0]} is outside the Sudoku tokenizer's vocabulary of {self.vocab_size}")
        return "".join(self._pieces[token] for token in ids if not (skip_special_tokens and self.is_special(token)))

    def is_special(self, token_id: int) -> bool:
        return token_id < self.BLANK

    def apply_chat_template(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> ChatTokens:
        raise ValueError("the Sudoku tokenizer has no chat template; train on chat rows with another --tokenizer-type")

    def prompt(self, puzzles: np.ndarray) -> np.ndarray:
        """int32 [N, n*n + 2] of puzzles [N, n*n] (0: blank): <bos>, the cells, the separator."""
        cells = np.where(puzzles == 0, self.BLANK, puzzles + self.FIRST_DIGIT - 1).astype(np.int32)
        return np.pad(np.pad(cells, ((0, 0), (1, 0)), constant_values=self.bos_id), ((0, 0), (0, 1)), constant_values=self.SEPARATOR)

    def response(self, solutions: np.ndarray) -> np.ndarray:
        """int32 [N, n*n] of solved grids [N, n*n]."""
        return (solutions + np.int32(self.FIRST_DIGIT - 1)).astype(np.int32)

    def cells(self, ids: np.ndarray) -> np.ndarray:
        """Digits of cell tokens, int64 of the same shape; 0 for a blank and for every token that is no digit."""
        digits = np.asarray(ids, np.int64) - (self.FIRST_DIGIT - 1)
        return np.where((digits >= 1) & (digits <= self.size), digits, 0)

    def save_pretrained(self, path: Path) -> None:
        """Write it into a folder, as transformers' AutoTokenizer loads it."""
        from megatron_dllm.data.tokenizer_export import save_letter_tokenizer

        save_letter_tokenizer(path, self._pieces, replaced={"0": "."})


class SudokuSource:
    """The first `num_puzzles` puzzles of a split and their solutions, as an ExampleSource.

    The splits share no solution grid, whatever their seeds. `clues` is (fewest, most); `cache_dir` keeps the generated puzzles as a file
    for the next run; `num_workers` processes generate.
    """

    def __init__(
        self,
        size: int,
        split: Split,
        num_puzzles: int,
        seed: int,
        *,
        clues: tuple[int, int] | None = None,
        cache_dir: str | Path | None = None,
        num_workers: int = 0,
    ):
        if num_puzzles < 1:
            raise ValueError(f"{num_puzzles} Sudoku puzzles: set --sudoku-num-puzzles to at least 1")
        self.tokenizer = SudokuTokenizer(size)
        puzzle_set = PuzzleSet(size, split, *(clues or DEFAULT_CLUES[size]), seed)
        self.name = f"sudoku-{size}x{size}-{split}"
        drawn = _cached(puzzle_set, num_puzzles, Path(cache_dir), num_workers) if cache_dir else None
        if drawn is None:
            drawn = generate(puzzle_set, num_puzzles, num_workers=num_workers)
        self.puzzles, self.solutions = drawn[:, 0], drawn[:, 1]
        self.lengths = np.tile(np.array([[size**2 + 2, size**2]], np.int32), (num_puzzles, 1))
        self.truncated = np.zeros(num_puzzles, bool)
        self.keys = np.stack([np.arange(num_puzzles), np.zeros(num_puzzles, np.int64)], axis=1)

    def __len__(self) -> int:
        return len(self.puzzles)

    def tokens(self, index: int) -> np.ndarray:
        """<bos>, puzzle, separator, solution: int32 [2 * n*n + 2]."""
        if not 0 <= index < len(self):
            raise IndexError(f"puzzle {index} of {self.name}, which has {len(self)}")
        one = slice(index, index + 1)
        return np.concatenate([self.tokenizer.prompt(self.puzzles[one])[0], self.tokenizer.response(self.solutions[one])[0]])

    def describe(self, index: int) -> str:
        return f"{self.name} puzzle {index}"


def _cached(puzzle_set: PuzzleSet, count: int, folder: Path, num_workers: int) -> np.ndarray:
    """uint8 [count, 2, n*n] from the folder, generated and stored there first where they are missing."""
    kept = puzzle_set
    name = f"sudoku{kept.size}-{kept.split}-clues{kept.min_clues}to{kept.max_clues}-seed{kept.seed}-{count}-v{CACHE_VERSION}.npy"
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Ranks of a node may write at once: each its own file, and the last rename wins with the same bytes.
        part = path.with_name(f"{name}.{os.getpid()}.part")
        with part.open("wb") as file:
            np.save(file, generate(kept, count, num_workers=num_workers), allow_pickle=False)
        part.replace(path)
    try:
        drawn = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a readable file of puzzles ({error}); delete it, and it is made again") from error
    shape = (count, 2, kept.size**2)
    if drawn.shape != shape or drawn.dtype != np.uint8:
        raise ValueError(f"{path}: holds {drawn.dtype} {drawn.shape}, not uint8 {shape}; delete it, and it is made again")
    return drawn


def is_solved(puzzle: np.ndarray, solution: np.ndarray) -> np.ndarray:
    """Whether each solution [..., n*n] solves its puzzle (0: blank), bool [...]: clues kept, every digit in each row, column and box."""
    size = int(puzzle.shape[-1] ** 0.5)
    box = int(size**0.5)
    boards = solution.reshape(-1, box, box, box, box)  # band, row in band, stack, column in stack
    rows, columns, boxes = boards, boards.transpose(0, 3, 4, 1, 2), boards.transpose(0, 1, 3, 2, 4)
    every_digit = np.arange(1, size + 1)
    complete = [(np.sort(units.reshape(-1, size, size), axis=-1) == every_digit).all(axis=(1, 2)) for units in (rows, columns, boxes)]
    keeps_clues = ((puzzle == 0) | (puzzle == solution)).all(axis=-1)
    return np.logical_and.reduce(complete).reshape(solution.shape[:-1]) & keeps_clues


def exact_match(prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]], tokenizer: SudokuTokenizer) -> np.ndarray:
    """Whether each generated answer solves the puzzle of its prompt, bool [N].

    prompts    N token rows: <bos>, the cells, the separator
    generated  N token rows: the cells of the solution; behind them only <eos> and <pad> may follow
    """
    return np.array([_answers(prompt, answer, tokenizer) for prompt, answer in zip(prompts, generated, strict=True)], bool)


def _answers(prompt: Sequence[int], answer: Sequence[int], tokenizer: SudokuTokenizer) -> bool:
    num_cells = tokenizer.size**2
    prompt, answer = np.asarray(prompt), np.asarray(answer)
    if len(prompt) != num_cells + 2:
        raise ValueError(f"a prompt of {len(prompt)} tokens is no {tokenizer.size}x{tokenizer.size} puzzle, which has {num_cells + 2}")
    fill = [tokenizer.pad_id, *tokenizer.eos_ids]
    if len(answer) < num_cells or not np.isin(answer[num_cells:], fill).all():
        return False
    return bool(is_solved(tokenizer.cells(prompt[1:-1]), tokenizer.cells(answer[:num_cells])))


def draw_board(cells: np.ndarray) -> str:
    """A board [n*n] as text, boxes apart, "." for a blank cell."""
    size = int(len(cells) ** 0.5)
    box = int(size**0.5)
    lines = []
    for row in cells.reshape(size, box, box):
        lines.append(" | ".join(" ".join(str(cell) if cell else "." for cell in part) for part in row))
    between = "\n" + "-+-".join(["-" * (2 * box - 1)] * box) + "\n"
    return between.join("\n".join(lines[band : band + box]) for band in range(0, size, box))


def num_shared_grids(one: SudokuSource, other: SudokuSource) -> int:
    """Different solution grids that both sources hold: 0 between two splits."""
    return len(_grids(one) & _grids(other))


def num_grids(source: SudokuSource) -> int:
    """Different solution grids of a source."""
    return len(_grids(source))


def _grids(source: SudokuSource) -> set[bytes]:
    return {grid.tobytes() for grid in np.asarray(source.solutions)}
