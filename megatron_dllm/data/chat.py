"""Chat rows and plain texts as a source: read, rendered and tokenized once, then taken from the token file that this left."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .formats import Conversation, Format, PlainText, recognise, rename, unused_columns
from .readers import Row, find_files, read_rows
from .report import Origin, SampleError, SkipReport
from .templates import Turn, TurnRenderer, supervised_places
from .token_file import INDEX, TokenFile, TokenFileWriter
from .tokenizers import Tokenizer

log = logging.getLogger(__name__)

LAYOUT_VERSION = 1  # part of every cache key: raise it when the same rows would give other tokens
PROGRESS_SECONDS = 10.0
CACHE_FOLDER = ".token_cache"


@dataclass(frozen=True)
class ChatOptions:
    """How rows become examples; all of it is part of the cache key, but for the place of the cache and the policy."""

    columns: Mapping[str, str] = field(default_factory=dict)
    supervise_turns: str = "all"
    refuse_bad_samples: bool = False
    cache: Path | None = None  # None: beside the data


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
        raise ValueError(f"{path}: no example in it; {'; '.join(source.skipped.lines()) or 'the files are empty'}")
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
    maker = _ExampleMaker(tokenizer, options)
    with TokenFileWriter(folder) as writer:
        due = time.monotonic() + PROGRESS_SECONDS
        for number, (origin, row) in enumerate(read_rows(files, maker.report)):
            maker.add(writer, number, origin, row)
            if time.monotonic() > due:
                log.info("tokenized %d rows, now in %s", number + 1, origin.file)
                due += PROGRESS_SECONDS
        maker.finish()
        writer.finish(maker.report, maker.notes)


class _ExampleMaker:
    """Rows to examples, with what has to be reported about them."""

    def __init__(self, tokenizer: Tokenizer, options: ChatOptions):
        self.tokenizer = tokenizer
        self.options = options
        self.report = SkipReport(refuse=options.refuse_bad_samples)
        self.notes: list[str] = []
        self._formats: dict[str, Format] = {}
        self._unused: dict[str, set[str]] = {}  # file: columns that its format does not read
        self._unknown: dict[str, list[str]] = {}  # file: columns of its first row that no format fits
        self._renderer: TurnRenderer | None = None

    def add(self, writer: TokenFileWriter, number: int, origin: Origin, row: Row) -> None:
        """Append the examples of row `number` of the source."""
        row = rename(row, self.options.columns)
        form = self._formats.get(origin.file) or self._recognise(origin.file, row)
        try:
            if form is None:
                raise SampleError("no known columns", f"it has {', '.join(sorted(row)) or 'none'}")
            self._unused.setdefault(origin.file, set()).update(unused_columns(form, row))
            sample = form.read(row)
            examples = self._document(sample) if isinstance(sample, PlainText) else self._turns(sample, origin)
            for unit, turn, truncated in examples:
                writer.add(turn.prompt, turn.response, key=(number, unit), origin=origin, truncated=truncated)
        except SampleError as error:
            self.report.skip(origin, error)

    def finish(self) -> None:
        """Note what was recognised. ValueError if a whole file had no row of a known format."""
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
        for meaning in sorted(set(meanings.values())):
            alike = [file for file, other in meanings.items() if other == meaning]
            self.notes.append(f"{alike[0]}{f' and {len(alike) - 1} more files' if alike[1:] else ''}: read as {meaning}")

    def _recognise(self, file: str, row: Row) -> Format | None:
        form = recognise(row)
        if form is None:
            self._unknown.setdefault(file, sorted(row))
            return None
        self._formats[file] = form
        return form

    def _document(self, sample: PlainText) -> Iterator[tuple[int, Turn, bool]]:
        """A text is all response, behind the token that begins a text and before the one that ends it."""
        if not sample.text.strip():
            raise SampleError("empty response")
        prompt = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        end = [] if sample.truncated else [self.tokenizer.eos_ids[0]]
        yield 0, Turn(prompt, self.tokenizer.encode(sample.text) + end), sample.truncated

    def _turns(self, sample: Conversation, origin: Origin) -> Iterator[tuple[int, Turn, bool]]:
        """(number of the assistant's turn, its tokens, cut short) of each supervised turn; one that cannot be used is skipped alone."""
        if self._renderer is None:
            self._renderer = TurnRenderer(self.tokenizer)
            self.notes += self._renderer.notes
        places = supervised_places(sample.messages, self.options.supervise_turns)
        if not places:
            raise SampleError("no assistant turn", f"its roles are {', '.join(message['role'] for message in sample.messages) or 'none'}")
        last = len(sample.messages) - 1
        for place, number in places:
            truncated = sample.truncated and place == last
            try:
                turn = self._renderer.turn(sample.messages, place, sample.tools, truncated=truncated)
            except SampleError as error:
                self.report.skip(f"{origin} turn {number + 1}", error)
            else:
                yield number, turn, truncated
