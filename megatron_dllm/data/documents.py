"""Documents from text files and from rows with a text column, tokenized by worker processes in the order of the input."""

from __future__ import annotations

import glob
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow.parquet as pq

from megatron_dllm.data.readers import SUFFIXES as ROW_SUFFIXES
from megatron_dllm.data.readers import read_rows
from megatron_dllm.data.report import SampleError, SkipReport
from megatron_dllm.data.tokenizers import Tokenizer, open_tokenizer

# A worker gets documents of this much text at a time: enough to make its round trip cheap, little enough to keep all workers busy.
BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 256
# Batches under way for each worker, which bounds what is held in memory.
BATCHES_PER_WORKER = 4

# auto: rows where the file's name ends like one that has them.
ReadAs: TypeAlias = Literal["auto", "text", "rows"]


@dataclass(frozen=True)
class Encoding:
    """How text becomes tokens; --tokenizer-type, --tokenizer-model and --append-eod."""

    tokenizer_type: str
    tokenizer_model: str | None
    append_eod: bool

    def tokenizer(self) -> Tokenizer:
        return _open_once(self.tokenizer_type, self.tokenizer_model)


class Document(NamedTuple):
    """A document before it is tokenized. `text` None: all of the file `path`. `done_bytes`: how much of the input lies behind it then."""

    name: str
    path: Path
    text: str | None
    done_bytes: int


class Encoded(NamedTuple):
    """A document's tokens, or why there are none."""

    name: str
    tokens: np.ndarray | None
    error: SampleError | None
    done_bytes: int


def find_text_files(paths: Sequence[str], *, suffixes: Sequence[str] = ()) -> list[Path]:
    """Files that the paths stand for: a file, a folder (searched to the bottom, hidden files left out), or a glob; none twice.

    `suffixes` picks among the files of folders. ValueError where a path stands for nothing.
    """
    found: dict[Path, None] = {}
    for path in paths:
        places = [Path(path)] if Path(path).exists() else [Path(place) for place in sorted(glob.glob(path, recursive=True))]
        if not places:
            raise ValueError(f"{path}: no such file or folder, and no file matches it as a pattern; correct --input")
        inner = [file for place in places for file in (_files_in(place, suffixes) if place.is_dir() else [place])]
        if not inner:
            raise ValueError(f"{path}: no file in it"
                             + (f" ends in {', '.join(suffixes)}; correct --suffixes" if suffixes else "; correct --input"))
        found.update(dict.fromkeys(inner))
    return list(found)


def _files_in(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(names):
            if not name.startswith(".") and (not suffixes or name.endswith(tuple(suffixes))):
                yield Path(parent, name)


def num_bytes(file: Path) -> int:
    """Size of a file; 0 for a link to nothing, which is reported when it is read."""
    return file.stat().st_size if file.exists() else 0


def holds_rows(file: Path, read_as: ReadAs) -> bool:
    """Whether a file is read as rows with a text column, each a document; otherwise the whole file is one."""
    return read_as == "rows" or (read_as == "auto" and file.name.endswith(ROW_SUFFIXES))


def read_documents(files: Sequence[Path], *, text_key: str, read_as: ReadAs, report: SkipReport) -> Iterator[Document]:
    """Every document of the files in order; rows that hold none go to `report`."""
    done = 0
    for file in files:
        size = num_bytes(file)
        if holds_rows(file, read_as):
            rows = _count_rows(file)
            for origin, row in read_rows([file], report):
                text = row.get(text_key)
                if isinstance(text, str):
                    # A row counts for its share of the file; where rows were not counted, the file counts when it is read.
                    yield Document(str(origin), file, text, done + (size * min(origin.line, rows) // rows if rows else 0))
                else:
                    problem = f"no {text_key!r} in this row" if text is None else f"{text_key!r} is a {type(text).__name__}, not a text"
                    report.skip(origin, SampleError("missing column", problem))
        else:
            yield Document(str(file), file, None, done + size)
        done += size


def _count_rows(file: Path) -> int | None:
    """Rows of a file where counting is much cheaper than reading: for the progress display alone."""
    if file.suffix == ".parquet":
        return pq.read_metadata(file).num_rows
    if file.suffix == ".jsonl":
        with file.open("rb") as stream:
            return sum(block.count(b"\n") for block in iter(lambda: stream.read(1 << 24), b"")) + 1
    return None


def encode_documents(documents: Iterator[Document], encoding: Encoding, *, num_workers: int) -> Iterator[Encoded]:
    """The tokens of each document, in order, whatever the number of workers; at 1 everything runs in this process."""
    batches = _batches(documents)
    if num_workers == 1:
        yield from chain.from_iterable(_encode_batch(batch, encoding) for batch in batches)
        return
    # Spawned: a tokenizer of transformers that has run threads does not survive a fork.
    pool = ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"))
    try:
        waiting: deque[Future[list[Encoded]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(_encode_batch, batch, encoding))
            if len(waiting) >= BATCHES_PER_WORKER * num_workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += num_bytes(document.path) if document.text is None else len(document.text)
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_batch(batch: list[Document], encoding: Encoding) -> list[Encoded]:
    return [_encode(document, encoding) for document in batch]


def _encode(document: Document, encoding: Encoding) -> Encoded:
    tokenizer = encoding.tokenizer()
    try:
        text = _read_text(document.path) if document.text is None else document.text
        if not text.strip():
            raise SampleError("empty document")
        tokens = tokenizer.encode(text)
        if not tokens:
            raise SampleError("no tokens", "the tokenizer makes none of it")
    except SampleError as error:
        return Encoded(document.name, None, error, document.done_bytes)
    end = [tokenizer.eos_ids[0]] if encoding.append_eod else []
    return Encoded(document.name, np.array([*tokens, *end], np.int32), None, document.done_bytes)


def _read_text(path: Path) -> str:
    """The file's text, line ends as they are, without a byte order mark. SampleError where it is no readable text."""
    if not path.is_file():
        raise SampleError("cannot be read", "no file, or not a regular one")
    try:
        content = path.read_bytes()
        if b"\0" in content:
            raise SampleError("not text", "it holds zero bytes")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SampleError("not UTF-8", f"{error.reason} at byte {error.start}") from error
    except OSError as error:
        raise SampleError("cannot be read", str(error.strerror)) from error


@cache
def _open_once(tokenizer_type: str, tokenizer_model: str | None) -> Tokenizer:
    """Opened once in each process: a large vocabulary takes seconds."""
    return open_tokenizer(tokenizer_type, tokenizer_model)
