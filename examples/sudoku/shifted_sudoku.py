"""A task beside Sudoku for adapters to learn: the solution is written with every digit one higher, and 1 for the highest.

An extension: PYTHONPATH=examples/sudoku, --extension shifted_sudoku --data-source shifted-sudoku, and Sudoku's own flags.
"""
from __future__ import annotations

from megatron_dllm.config import DataConfig
from megatron_dllm.data.build import HELD_OUT_PUZZLES, Sources
from megatron_dllm.data.sudoku import SudokuSource, SudokuTokenizer
from megatron_dllm.extending import add_data_source


def shifted(data: DataConfig, split: str, count: int, seed: int) -> SudokuSource:
    source = SudokuSource(data.sudoku_size, split, count, seed, cache_dir=data.data_cache_path, num_workers=data.num_workers)
    source.name = f"shifted-{source.name}"
    source.solutions = source.solutions % data.sudoku_size + 1
    return source


def sources(data: DataConfig, seed: int) -> Sources:
    counts = {"train": data.sudoku_num_puzzles, "valid": HELD_OUT_PUZZLES, "test": HELD_OUT_PUZZLES}
    return Sources(**{split: shifted(data, split, count, seed) for split, count in counts.items()})


add_data_source("shifted-sudoku", tokenizer=lambda data: SudokuTokenizer(data.sudoku_size), sources=sources)
