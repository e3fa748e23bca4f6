"""From the configuration to sources of examples and the order of their rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..config import DataConfig, ModelConfig
from ..config.extensions import DATA_SOURCES
from .chat import ChatOptions, open_chat_source
from .fitting import fit_report, fitted_lengths, num_cut
from .formats import parse_columns
from .indexed import IndexedSource
from .order import BlendedOrder, Order, Packing, RowOrder
from .source import ExampleSource
from .sudoku import SudokuSource, SudokuTokenizer
from .tokenizers import Tokenizer, check_tokenizer, open_tokenizer
from .views import BlendedSource, split_source

log = logging.getLogger(__name__)

SPLITS = ("train", "valid", "test")
HELD_OUT_PUZZLES = 500  # of Sudoku, for validation and again for test


class Sources(NamedTuple):
    """Examples to learn from and to be measured on; None where the split leaves none."""

    train: ExampleSource
    valid: ExampleSource | None
    test: ExampleSource | None


def build_tokenizer(data: DataConfig, model_eos_ids: Sequence[int] = ()) -> Tokenizer:
    """The tokenizer of the data. ValueError where flags and files do not fit together.

    `model_eos_ids` count as ends of turn too, which a tokenizer's folder does not always tell.
    """
    if data.data_source in DATA_SOURCES.rows:
        return DATA_SOURCES.rows[data.data_source].tokenizer(data)
    if data.data_source == "sudoku":
        return SudokuTokenizer(data.sudoku_size)
    return open_tokenizer(data.tokenizer_type, data.tokenizer_model, chat_template=data.chat_template, extra_eos_ids=model_eos_ids)


def build_sources(data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, *, seed: int) -> Sources:
    """Open, and prepare where they are not yet, the sources that the configuration names, each split and blended by weight.

    Every process may call this; the first to finish a token file serves all. ValueError if the tokenizer does not fit the model, and for
    whatever is wrong with the data.
    """
    check_tokenizer(tokenizer, vocab_size=model.vocab_size, eos_ids=model.eos_token_id)
    if data.data_source in DATA_SOURCES.rows:
        return DATA_SOURCES.rows[data.data_source].sources(data, seed)
    if data.data_source == "sudoku":
        return _sudoku(data, seed)
    if not data.data_path:
        raise ValueError("there is no data: set --data-path, or --data-source sudoku for generated puzzles")
    blend = data.blend()
    ranges = [split_source(_open(path, data, model, tokenizer), data.split_shares()) for _, path in blend]
    weights = [weight for weight, _ in blend]
    built = {}
    for place, split in enumerate(SPLITS):
        parts = [(one[place], weight) for one, weight in zip(ranges, weights, strict=True) if len(one[place])]
        built[split] = _joined(parts)
        if built[split] is None and data.split_shares()[place]:
            log.warning("no example is left for %s: the split %s of so few examples gives it none", split, data.split)
    if built["train"] is None:
        raise ValueError(f"--split {data.split} of {sum(len(part) for one in ranges for part in one)} examples leaves none to train on; "
                         "give more data or a larger first share")
    return Sources(**built)


def _joined(parts: Sequence[tuple[ExampleSource, float]]) -> ExampleSource | None:
    if len(parts) < 2:
        return parts[0][0] if parts else None
    return BlendedSource([part for part, _ in parts], [weight for _, weight in parts])


def _open(path: str, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer) -> ExampleSource:
    kind = data.data_source
    if kind == "auto":
        kind = "indexed" if path.endswith((".bin", ".idx")) or Path(f"{path}.idx").exists() else "chat"
        log.info("%s: taken as %s", path, "an indexed token file" if kind == "indexed" else "rows of chat or text")
    if kind == "indexed":
        return IndexedSource(path, seq_length=data.seq_length, canvas_length=model.canvas_length, bos_id=tokenizer.bos_id,
                             vocab_size=model.vocab_size)
    options = ChatOptions(
        columns=parse_columns(data.data_columns), supervise_turns=data.supervise_turns, refuse_bad_samples=data.on_bad_sample == "error",
        cache=Path(data.data_cache_path) if data.data_cache_path else None, num_workers=data.num_workers)
    return open_chat_source(path, tokenizer, options)


def _sudoku(data: DataConfig, seed: int) -> Sources:
    if data.data_path:
        raise ValueError(f"--data-source sudoku makes its own puzzles; drop --data-path {' '.join(data.data_path)}")
    counts = {"train": data.sudoku_num_puzzles, "valid": HELD_OUT_PUZZLES, "test": HELD_OUT_PUZZLES}
    return Sources(**{
        split: SudokuSource(data.sudoku_size, split, count, seed, cache_dir=data.data_cache_path, num_workers=data.num_workers)
        for split, count in counts.items()})


def build_order(source: ExampleSource, data: DataConfig, *, canvas_length: int, all_canvases: bool, seed: int,
                shuffle: bool = True) -> Order:
    """The rows of a source: shuffled anew each epoch, blended by weight, packed if the configuration says so.

    `all_canvases`: each example decodes all of its canvases (they count toward max_canvases_per_row), not one. Prompts without room are
    left out and logged. ValueError if a source of a blend has no example that fits, and for such a prompt under on_bad_sample "error".
    """
    refuse = data.on_bad_sample == "error"
    for line in fit_report(source, seq_length=data.seq_length, canvas_length=canvas_length, refuse=refuse).lines():
        log.warning("%s: %s", source.name, line)
    cut = num_cut(source, seq_length=data.seq_length, canvas_length=canvas_length)
    if cut:
        log.warning("%s: %d of %d responses are cut to whole canvases within --seq-length %d",
                    source.name, cut, len(source), data.seq_length)
    parts = source.parts if isinstance(source, BlendedSource) else (source,)
    orders = [_part_order(part, data, number, canvas_length=canvas_length, all_canvases=all_canvases, seed=seed, shuffle=shuffle)
              for number, part in enumerate(parts)]
    return BlendedOrder(orders, source.weights, [len(part) for part in parts]) if isinstance(source, BlendedSource) else orders[0]


def _part_order(source: ExampleSource, data: DataConfig, number: int, *, canvas_length: int, all_canvases: bool, seed: int,
                shuffle: bool) -> RowOrder:
    fitted = fitted_lengths(source.lengths, seq_length=data.seq_length, canvas_length=canvas_length)
    packing = Packing(data.seq_length, data.max_canvases_per_row) if data.packing else None
    canvases = np.where(fitted > 0, (fitted - source.lengths[:, 0]) // canvas_length, 0) if all_canvases else None
    try:
        return RowOrder(fitted, seed=seed, packing=packing, canvases=canvases, source=number, shuffle=shuffle)
    except ValueError as error:
        raise ValueError(f"{source.name}: {error}") from error
