"""Chat rows and plain texts as a source: read, rendered and tokenized once, then taken from the token file that this left."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .encoding import Job, RowEncoder, encode_rows
from .formats import Format, Row, recognise, rename, unused_columns
from .readers import find_files, read_rows
from .report import SampleError, SkipReport
from .token_file import INDEX, TokenFile, TokenFileWriter
from .tokenizers import Tokenizer

log = logging.getLogger(__name__)

LAYOUT_VERSION = 1  # part of every cache key: raise it when the same rows would give other tokens
PROGRESS_SECONDS = 10.0
CACHE_FOLDER = ".token_cache"


@dataclass(frozen=True)
class ChatOptions:
    """How rows become examples. Columns and turns are part of the cache key; the others change no token."""

    columns: Mapping[str, str] = field(default_factory=dict)
    supervise_turns: str = "all"
    refuse_bad_samples: bool = False
    cache: Path | None = None  # None: beside the data
    num_workers: int = 0  # processes that tokenize; below 2, this one


def open_chat_source(path: str, tokenizer: Tokenizer, options: ChatOptions) -> TokenFile:
    """The examples of the files that `path` (file, folder or glob) stands for, made now unless an equal token file is there.

    What was recognised and what was skipped is logged. ValueError for files that cannot be read, rows of no known format, a source without
    a single example and, under `refuse_bad_samples`, the first sample that cannot be used.
    """
    if not tokenizer.eos_ids:
        raise ValueError(f"tokenizer {tokenizer.name} has no end-of-sequence token; set eos_token in its tokenizer_config.json")
    files = find_files(path)
    folder = _cache_root(files[0], options) / cache_key(files, tokenizer, options)
    if not (folder / INDEX).exists():
        _prepare(files, tokenizer, options, folder)
    source = TokenFile(folder, path)
    for note in source.notes:
        log.info("%s: %s", path, note)
    for line in source.skipped.lines():
        log.warning("%s: %s", path, line)
    if options.refuse_bad_samples and source.skipped.total:
        raise ValueError(f"{path}: {source.skipped.lines()[0]}; repair or remove them, or set --on-bad-sample skip")
    if not len(source):
        raise ValueError(f"{path}: no example in it; {'; '.join(source.skipped.lines()) or 'the files are empty'}; correct --data-path, "
                         "or name the columns with --data-columns")
    log.info("%s: %d examples, %d tokens in %s", path, len(source), int(source.lengths.sum(dtype="int64")), folder)
    return source


def cache_key(files: Sequence[Path], tokenizer: Tokenizer, options: ChatOptions) -> str:
    """A digest of the files' names and contents, the tokenizer, its template and the options that change tokens."""
    parts = [LAYOUT_VERSION, tokenizer.fingerprint, sorted(options.columns.items()), options.supervise_turns]
    parts += [(str(file), _content_digest(file)) for file in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _cache_root(first: Path, options: ChatOptions) -> Path:
    return options.cache if options.cache is not None else first.parent / CACHE_FOLDER


def _content_digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _prepare(files: Sequence[Path], tokenizer: Tokenizer, options: ChatOptions, folder: Path) -> None:
    """Read, tokenize and store; several times as fast with several processes."""
    report = SkipReport(refuse=options.refuse_bad_samples)
    formats = _FileFormats()
    encoder = RowEncoder(tokenizer, options.supervise_turns)
    notes: dict[str, None] = {}
    due = time.monotonic() + PROGRESS_SECONDS
    with TokenFileWriter(folder) as writer:
        for encoded in encode_rows(_jobs(files, options, report, formats), encoder, num_workers=options.num_workers):
            notes |= dict.fromkeys(encoded.notes)
            for where, error in encoded.skipped:
                report.skip(where, error)
            for example in encoded.examples:
                writer.add(example.prompt, example.response, key=(encoded.number, example.unit), origin=encoded.origin,
                           truncated=example.truncated)
            if time.monotonic() > due:
                log.info("tokenized %d rows, now in %s", encoded.number + 1, encoded.origin.file)
                due += PROGRESS_SECONDS
        writer.finish(report, [*formats.notes(), *notes])


def _jobs(files: Sequence[Path], options: ChatOptions, report: SkipReport, formats: _FileFormats) -> Iterator[Job]:
    """The rows with the formats of their files; a row that comes before any of a known format is skipped."""
    for number, (origin, row) in enumerate(read_rows(files, report)):
        row = rename(row, options.columns)
        form = formats.of(origin.file, row)
        if form is None:
            report.skip(origin, SampleError("no known columns", f"it has {', '.join(sorted(row)) or 'none'}"))
        else:
            yield Job(number, origin, form, row)


class _FileFormats:
    """The format of each file, which its first row that has one decides, and the columns that the format does not read."""

    def __init__(self):
        self._formats: dict[str, Format] = {}
        self._unused: dict[str, set[str]] = {}
        self._unknown: dict[str, list[str]] = {}  # columns of the first row, for files without a format so far

    def of(self, file: str, row: Row) -> Format | None:
        form = self._formats.get(file) or recognise(row)
        if form is None:
            self._unknown.setdefault(file, sorted(row))
            return None
        self._formats[file] = form
        self._unused.setdefault(file, set()).update(unused_columns(form, row))
        return form

    def notes(self) -> list[str]:
        """What the files were read as. ValueError if a whole file had no row of a known format."""
        for file, columns in self._unknown.items():
            if file not in self._formats:
                raise ValueError(
                    f"{file}: its columns {', '.join(columns) or '(none)'} are of no known format (messages; conversations; prompt and "
                    "completion; instruction and output; text); name them with --data-columns, for example messages=" +
                    (columns[0] if columns else "COLUMN"))
        meanings = {}
        for file, form in self._formats.items():
            unused = ", ".join(sorted(self._unused[file]))
            meanings[file] = f"{form.name}; columns not used: {unused}" if unused else form.name
        notes = []
        for meaning in sorted(set(meanings.values())):
            alike = [file for file, other in meanings.items() if other == meaning]
            notes.append(f"{alike[0]}{f' and {len(alike) - 1} more files' if alike[1:] else ''}: read as {meaning}")
        return notes
