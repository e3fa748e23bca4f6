"""What is read, and how it becomes rows."""

from dataclasses import dataclass
from typing import Literal

from megatron_dllm.config.extensions import DATA_SOURCES
from megatron_dllm.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data"""

    data_source: Literal["auto", "chat", "indexed", "sudoku"] = flag(
        "Where examples come from: chat rows, indexed token files (.bin and .idx), generated puzzles, or auto: by the files' names.",
        "auto",
        further=lambda: tuple(DATA_SOURCES.rows),
    )
    data_path: tuple[str, ...] = flag(
        "Files, folders or globs; several may be blended by a weight before each: 0.3 A 0.7 B.", (), metavar="[WEIGHT] PATH"
    )
    data_columns: tuple[str, ...] = flag(
        "Names of the columns where they are not the usual ones, as ours=theirs: messages=dialogue.", (), metavar="OURS=THEIRS"
    )
    data_cache_path: str | None = flag("Folder of the prepared token files; without it: beside the data.", None, metavar="DIR")
    split: str = flag("Shares of the data for training, validation and test.", "969,30,1", metavar="A,B,C")
    seq_length: int = flag("Longest row in tokens: prompt and whole canvases, or several examples with --packing.", 2048)
    tokenizer_type: Literal["ByteTokenizer", "HuggingFaceTokenizer"] = flag(
        "ByteTokenizer is built in; HuggingFaceTokenizer reads --tokenizer-model.", "ByteTokenizer"
    )
    tokenizer_model: str | None = flag("Folder of a transformers tokenizer.", None, metavar="DIR")
    chat_template: str | None = flag("File with a chat template to use in place of the tokenizer's.", None, metavar="FILE")
    supervise_turns: Literal["all", "last"] = flag("Assistant turns of a conversation that become examples.", "all")
    packing: bool = flag("Put several examples into one row.", False)
    max_canvases_per_row: int = flag("Most canvases that a packed row carries.", 8)
    on_bad_sample: Literal["skip", "error"] = flag("What to do with a sample that cannot be used; skipped ones are counted.", "skip")
    num_workers: int = flag("Processes that prepare batches; 0: the training process itself.", 0)
    sudoku_size: Literal[4, 9] = flag("Side of the generated puzzles.", 4)
    sudoku_num_puzzles: int = flag("Puzzles to generate.", 20000)

    @property
    def makes_examples(self) -> bool:
        """Whether the source needs no files, and has a tokenizer of its own."""
        return self.data_source == "sudoku" or self.data_source in DATA_SOURCES.rows

    def blend(self) -> tuple[tuple[float, str], ...]:
        """`data_path` as (weight, path) pairs; paths without weights weigh 1 each. ValueError where a weight or a path is missing."""
        numbers = [_number(word) for word in self.data_path]
        if all(number is None for number in numbers):
            return tuple((1.0, path) for path in self.data_path)
        weights, paths = numbers[0::2], self.data_path[1::2]
        if len(weights) != len(paths) or None in weights or any(number is not None for number in numbers[1::2]):
            raise ValueError("weights and paths must alternate; write --data-path WEIGHT PATH WEIGHT PATH ...")
        if min(weights) <= 0:
            raise ValueError(f"weights must be positive, not {min(weights)}; leave out paths that are not to be drawn")
        return tuple(zip(weights, paths, strict=True))

    def split_shares(self) -> tuple[float, float, float]:
        """`split` as three shares that sum to 1; ValueError where it is not three numbers."""
        parts = [_number(word) for word in self.split.split(",")]
        if len(parts) != 3 or None in parts or min(parts) < 0 or parts[0] <= 0:
            raise ValueError("write three numbers, none negative and the first positive, such as 969,30,1")
        return tuple(part / sum(parts) for part in parts)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
