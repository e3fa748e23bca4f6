#!/usr/bin/env python3
"""Shows generated Sudoku puzzles, counts the solution grids of each split, and fails if training shares one with held-out puzzles.

    python tools/sudoku.py --sudoku-size 4 --sudoku-num-puzzles 20000 --seed 1234

Give the values of a training run to see what it is trained and measured on. With --data-cache-path the puzzles are kept there for that run;
many --num-workers make 9x9 puzzles fast.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_dllm.data.sudoku import DEFAULT_CLUES, SudokuSource, draw_board, num_grids, num_shared_grids  # noqa: E402
from megatron_dllm.data.sudoku_puzzles import SIZES, SPLITS  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """0; 1 when held-out puzzles share a grid with training, 2 for a mistake in what was given."""
    arguments = parse(argv)
    try:
        sources = {split: build(split, arguments) for split in SPLITS}
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    test = sources["test"]
    for i in range(min(arguments.show, len(test))):
        print(f"\n{test.describe(i)}\n" + side_by_side(draw_board(test.puzzles[i]), draw_board(test.solutions[i])))
    print()
    for split, source in sources.items():
        clues = (np.asarray(source.puzzles) != 0).sum(axis=1)
        different = len(np.unique(source.puzzles, axis=0))
        print(f"{split:<6} {len(source):>8} puzzles, {different:>8} different, {num_grids(source):>8} solution grids, "
              f"{clues.min()} to {clues.max()} clues, {clues.mean():.1f} on average")
    shared = {split: num_shared_grids(sources["train"], sources[split]) for split in ("valid", "test")}
    print("solution grids shared with training: " + ", ".join(f"{split} {count}" for split, count in shared.items()))
    return int(any(shared.values()))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    ranges = ", ".join(f"{low} {high} for size {size}" for size, (low, high) in DEFAULT_CLUES.items())
    add("--sudoku-size", type=int, choices=SIZES, default=4, help="side of the puzzles (default: 4)")
    add("--sudoku-num-puzzles", type=int, default=20000, metavar="N", help="puzzles to train on (default: 20000)")
    add("--held-out-puzzles", type=int, default=500, metavar="N", help="puzzles for validation, and again for test (default: 500)")
    add("--clues", type=int, nargs=2, metavar=("FEWEST", "MOST"), help=f"range of the number of clues (default: {ranges})")
    add("--seed", type=int, default=1234, metavar="N", help="(default: 1234)")
    add("--data-cache-path", metavar="DIR", help="folder that keeps the puzzles for the next run")
    add("--num-workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes that generate (default: one a core)")
    add("--show", type=int, default=3, metavar="N", help="test puzzles to draw (default: 3)")
    return parser.parse_args(argv)


def build(split: str, arguments: argparse.Namespace) -> SudokuSource:
    start = time.monotonic()
    count = arguments.sudoku_num_puzzles if split == "train" else arguments.held_out_puzzles
    source = SudokuSource(arguments.sudoku_size, split, count, arguments.seed, clues=tuple(arguments.clues) if arguments.clues else None,
                          cache_dir=arguments.data_cache_path, num_workers=arguments.num_workers)
    seconds = time.monotonic() - start
    print(f"{source.name}: {count} puzzles in {seconds:.1f} s, {count / seconds:.0f} a second", file=sys.stderr)
    return source


def side_by_side(left: str, right: str) -> str:
    return "\n".join(f"  {one}      {other}" for one, other in zip(left.split("\n"), right.split("\n"), strict=True))


if __name__ == "__main__":
    sys.exit(main())
