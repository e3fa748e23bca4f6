"""Token files in Megatron's indexed format: PREFIX.bin holds the tokens, one document after the other, PREFIX.idx says where they start.

PREFIX.idx, little-endian: b"MMIDIDX\\0\\0", uint64 version (1), uint8 dtype code, uint64 S sequences, uint64 D + 1 for D documents, then
int32 [S] sequence lengths in tokens, int64 [S] byte offsets of the sequences in PREFIX.bin, int64 [D + 1] first sequence of each
document and the end. What is written here has one sequence a document; files with several (sentences) are read too.
"""

from __future__ import annotations

import os
import shutil
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# Megatron's codes; 6 and 7 are floating point and cannot hold tokens.
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id fits, as Megatron decides it, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx. A context manager: both appear when the block ends, and neither if it ends in an error."""

    def __init__(self, prefix: str | Path, *, dtype: np.dtype | type = np.int32):
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODES:
            raise ValueError(f"{prefix}: tokens cannot be stored as {self.dtype}; choose one of {sorted(map(str, CODES))}")
        self.bin_path, self.idx_path = paths_of(prefix)
        self._drafts = [path.with_name(f"{path.name}.{os.getpid()}.part") for path in (self.bin_path, self.idx_path)]
        self._lengths = array("i")
        self._first_sequences = array("q", [0])
        self.bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._drafts[0].open("wb")

    @property
    def num_documents(self) -> int:
        return len(self._first_sequences) - 1

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one document. ValueError where a token does not fit the dtype."""
        tokens = np.asarray(tokens)
        stored = tokens.astype(self.dtype)
        if not np.array_equal(stored, tokens):
            raise ValueError(f"{self.bin_path}: document {self.num_documents} holds tokens {tokens.min()} to {tokens.max()}, "
                             f"which {self.dtype} cannot store; choose a wider dtype")
        self._bin.write(stored.tobytes())
        self._lengths.append(len(tokens))
        self._first_sequences.append(len(self._lengths))

    def append(self, prefix: str | Path) -> None:
        """Append all documents of another indexed file of the same dtype, sequence by sequence as they are there."""
        part = IndexedFile(prefix)
        if part.dtype != self.dtype:
            raise ValueError(f"{part.bin_path} holds {part.dtype}, {self.bin_path} holds {self.dtype}; "
                             "prepare both with the same tokenizer before merging them")
        with part.bin_path.open("rb") as source:
            shutil.copyfileobj(source, self._bin, 1 << 24)
        first = len(self._lengths)
        self._lengths.frombytes(part.sequence_lengths.tobytes())
        self._first_sequences.frombytes((part.first_sequences[1:] + first).tobytes())

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, exception_type: object, *exception: object) -> None:
        try:
            self._bin.close()
            if exception_type is None:
                self._write_index()
                # An old index beside a new .bin would lie about it: it goes first, and the new one comes last.
                self.idx_path.unlink(missing_ok=True)
                self._drafts[0].replace(self.bin_path)
                self._drafts[1].replace(self.idx_path)
        finally:
            for draft in self._drafts:
                draft.unlink(missing_ok=True)

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, np.int32)
        with self._drafts[1].open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(self._first_sequences)))
            file.write(lengths.tobytes())
            file.write(_byte_offsets(lengths, self.dtype).tobytes())
            file.write(self._first_sequences.tobytes())


class IndexedFile:
    """PREFIX.bin and PREFIX.idx, memory-mapped. ValueError naming the file where the two do not hold what they say.

    sequence_lengths  int32 [S]       tokens of each sequence
    first_sequences   int64 [D + 1]   document d has the sequences first_sequences[d] to first_sequences[d + 1]
    starts            int64 [D + 1]   and the tokens starts[d] to starts[d + 1] of the file
    """

    def __init__(self, prefix: str | Path):
        self.bin_path, self.idx_path = paths_of(prefix)
        for path in (self.bin_path, self.idx_path):
            if not path.is_file():
                raise ValueError(f"{path}: no such file; an indexed file is a .bin and an .idx of the same name (tools/preprocess_data.py)")
        self.dtype, num_sequences, num_offsets = self._read_header()
        start = HEADER.size
        self.sequence_lengths = np.memmap(self.idx_path, np.int32, "r", start, num_sequences) if num_sequences else np.empty(0, np.int32)
        start += 4 * num_sequences
        offsets = np.memmap(self.idx_path, np.int64, "r", start, num_sequences) if num_sequences else np.empty(0, np.int64)
        start += 8 * num_sequences
        self.first_sequences = np.memmap(self.idx_path, np.int64, "r", start, num_offsets)
        self._check(offsets)
        ends = np.concatenate([[0], np.cumsum(self.sequence_lengths, dtype=np.int64)])
        self.starts = ends[self.first_sequences]
        self._check_size(int(ends[-1]))
        self._tokens = np.memmap(self.bin_path, self.dtype, "r") if ends[-1] else np.empty(0, self.dtype)

    def __len__(self) -> int:
        """Documents."""
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def document(self, index: int) -> np.ndarray:
        """All tokens of one document, a read-only view in the file's dtype. IndexError outside 0..D-1."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {self.bin_path}, which has {len(self)}")
        return self.span(int(self.starts[index]), int(self.starts[index + 1]))

    def span(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop of the whole file, a read-only view."""
        return self._tokens[start:stop]

    def _read_header(self) -> tuple[np.dtype, int, int]:
        found = self.idx_path.stat().st_size
        with self.idx_path.open("rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise ValueError(f"{self.idx_path}: no index of tokens, since it does not begin with {MAGIC!r}; {REMAKE}")
        _, version, code, num_sequences, num_offsets = HEADER.unpack(header)
        if version != VERSION:
            raise ValueError(f"{self.idx_path}: version {version} of the format, and only {VERSION} is read; {REMAKE}")
        if code not in DTYPES:
            raise ValueError(f"{self.idx_path}: dtype code {code} stands for no integers; the known codes are {sorted(DTYPES)}; {REMAKE}")
        expected = HEADER.size + 12 * num_sequences + 8 * num_offsets
        if found != expected or not num_offsets:
            raise ValueError(f"{self.idx_path}: {found} bytes, but {num_sequences} sequences and {num_offsets} document bounds "
                             f"take {expected}; it was cut short or is of another kind; {REMAKE}")
        return np.dtype(DTYPES[code]), num_sequences, num_offsets

    def _check(self, offsets: np.ndarray) -> None:
        firsts = self.first_sequences
        if firsts[0] != 0 or firsts[-1] != len(offsets) or (np.diff(firsts) < 0).any():
            raise ValueError(f"{self.idx_path}: the documents do not divide its {len(offsets)} sequences from first to last; {REMAKE}")
        if len(offsets) and int(self.sequence_lengths.min()) < 0:
            raise ValueError(f"{self.idx_path}: sequence {int(self.sequence_lengths.argmin())} has a negative length; {REMAKE}")
        wrong = np.flatnonzero(offsets != _byte_offsets(self.sequence_lengths, self.dtype))
        if len(wrong):
            raise ValueError(f"{self.idx_path}: sequence {wrong[0]} starts at byte {offsets[wrong[0]]}, not where the one before ends; "
                             f"{REMAKE}")

    def _check_size(self, num_tokens: int) -> None:
        found, expected = self.bin_path.stat().st_size, num_tokens * self.dtype.itemsize
        if found != expected:
            raise ValueError(f"{self.bin_path}: {found} bytes, but {self.idx_path.name} counts {num_tokens} tokens of {self.dtype}, "
                             f"{expected} bytes; it was cut short or belongs to another index; {REMAKE}")


REMAKE = "make both files again with tools/preprocess_data.py"


class IndexedSource:
    """Documents of an indexed file as an ExampleSource: raw text, so the prompt is empty, or BOS alone where `bos_id` is given.

    A document longer than the sequence becomes several examples: consecutive pieces, as long as `seq_length` allows in whole canvases after
    the prompt, the last one shorter. Every piece but the last counts as truncated: the text goes on, so an end after it would be a lie.
    Each piece is an example of its own (key: document, piece), starts at position 0 and sees nothing of the piece before. Empty
    documents give no example; `num_empty` counts them.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        seq_length: int,
        canvas_length: int = 1,
        bos_id: int | None = None,
        vocab_size: int | None = None,
    ):
        self._file = IndexedFile(prefix)
        self.name = self._file.bin_path.name.removesuffix(".bin")
        self._bos = [] if bos_id is None else [bos_id]
        self._vocab_size = vocab_size
        room = (seq_length - len(self._bos)) // canvas_length * canvas_length
        if room <= 0:
            raise ValueError(f"a sequence of {seq_length} tokens holds no canvas of {canvas_length} after {len(self._bos)} prompt tokens; "
                             f"set --seq-length to at least {canvas_length + len(self._bos)}")
        lengths = np.diff(self._file.starts)
        self.num_empty = int((lengths == 0).sum())
        pieces = -(-lengths // room)
        document = np.repeat(np.arange(len(lengths)), pieces)
        piece = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        response = np.minimum(lengths[document] - piece * room, room)
        self._starts = self._file.starts[document] + piece * room
        self.lengths = np.stack([np.full_like(response, len(self._bos)), response], axis=1).astype(np.int32)
        self.truncated = piece < pieces[document] - 1
        self.keys = np.stack([document, piece], axis=1)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int) -> np.ndarray:
        """BOS if there is one, and the piece: int32 [prompt + response]. ValueError for a token outside `vocab_size`."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {self.name}, which has {len(self)}")
        start = int(self._starts[index])
        piece = self._file.span(start, start + int(self.lengths[index, 1]))
        if self._vocab_size is not None and not 0 <= int(piece.min()) <= int(piece.max()) < self._vocab_size:
            raise ValueError(f"{self.describe(index)}: tokens {piece.min()} to {piece.max()} in a vocabulary of {self._vocab_size}; "
                             "prepare the file with the tokenizer that the model is trained with")
        return np.concatenate([np.array(self._bos, np.int32), piece.astype(np.int32)])

    def describe(self, index: int) -> str:
        document, piece = self.keys[index]
        return f"{self.name} document {document} piece {piece}"


def paths_of(prefix: str | Path) -> tuple[Path, Path]:
    """PREFIX.bin and PREFIX.idx; the name of either file stands for the prefix too."""
    stem = str(prefix)[:-4] if str(prefix).endswith((".bin", ".idx")) else str(prefix)
    return Path(f"{stem}.bin"), Path(f"{stem}.idx")


def _byte_offsets(lengths: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """int64 [S]: where each sequence starts when they follow each other without gaps."""
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    return np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
