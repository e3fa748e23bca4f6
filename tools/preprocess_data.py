#!/usr/bin/env python3
"""Turns raw text and code into an indexed token file (PREFIX.bin and PREFIX.idx) for --data-path PREFIX.

A document is a whole text file, or the text of one row of a .jsonl, .jsonl.gz, .json or .parquet file. Examples:

    python tools/preprocess_data.py --input src docs/*.md --suffixes .py .md --output-prefix data/code --append-eod
    python tools/preprocess_data.py --input dump.jsonl.gz --json-key content --output-prefix data/dump --append-eod \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model path/to/tokenizer
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_dllm.data.documents import Encoding, encode_documents, find_text_files, num_bytes, read_documents  # noqa: E402
from megatron_dllm.data.indexed import IndexedWriter, paths_of, token_dtype  # noqa: E402
from megatron_dllm.data.report import SkipReport  # noqa: E402
from megatron_dllm.training.progress import format_duration  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """0; 2 for a mistake in what was given."""
    arguments = parse(argv)
    try:
        print("\n".join(preprocess(arguments)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenProcessPool:
        print(f"error: one of the {arguments.workers} processes died, perhaps for want of memory; set a smaller --workers", file=sys.stderr)
        return 2
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, folders (searched to the bottom) or globs")
    add("--output-prefix", required=True, metavar="PREFIX", help="where PREFIX.bin and PREFIX.idx go; older ones are replaced")
    add("--suffixes", nargs="+", default=[], metavar=".EXT", help="read only files with these endings from folders")
    add("--read-as", choices=("auto", "text", "rows"), default="auto",
        help="text: a file is a document; rows: each row is; auto: rows where the name ends like such a file (default: auto)")
    add("--json-key", default="text", metavar="KEY", help="column of a row that holds its text (default: text)")
    add("--tokenizer-type", choices=("ByteTokenizer", "HuggingFaceTokenizer"), default="ByteTokenizer", help="(default: ByteTokenizer)")
    add("--tokenizer-model", metavar="DIR", help="folder of a transformers tokenizer")
    add("--append-eod", action="store_true", help="put the end-of-sequence token behind every document")
    add("--on-bad-sample", choices=("skip", "error"), default="skip",
        help="what to do with a document that cannot be read; skipped ones are counted and named (default: skip)")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes that tokenize (default: one a core)")
    add("--log-interval", type=float, default=5.0, metavar="SECONDS", help="between progress lines where there is no terminal (default: 5)")
    arguments = parser.parse_args(argv)
    if arguments.workers < 1:
        parser.error(f"--workers {arguments.workers}: at least 1 process must tokenize")
    return arguments


def preprocess(arguments: argparse.Namespace) -> list[str]:
    """Writes the indexed file and returns the lines of its summary. ValueError where nothing can be made of the input."""
    start = time.monotonic()
    outputs = [path.resolve() for path in paths_of(arguments.output_prefix)]
    files = [file for file in find_text_files(arguments.input, suffixes=arguments.suffixes) if file.resolve() not in outputs]
    encoding = Encoding(arguments.tokenizer_type, arguments.tokenizer_model, arguments.append_eod)
    tokenizer = encoding.tokenizer()
    if arguments.append_eod and not tokenizer.eos_ids:
        raise ValueError(f"--append-eod: the tokenizer {tokenizer.name} has no end-of-sequence token; "
                         "set eos_token in its tokenizer_config.json")
    report = SkipReport(refuse=arguments.on_bad_sample == "error")
    documents = read_documents(files, text_key=arguments.json_key, read_as=arguments.read_as, report=report)
    total_bytes = sum(map(num_bytes, files))
    num_tokens = 0
    with (IndexedWriter(arguments.output_prefix, dtype=token_dtype(tokenizer.vocab_size)) as writer,
          ProgressDisplay(total_bytes, arguments.log_interval) as progress):
        for encoded in encode_documents(documents, encoding, num_workers=arguments.workers):
            if encoded.error is None:
                writer.add_document(encoded.tokens)
                num_tokens += len(encoded.tokens)
            else:
                report.skip(encoded.name, encoded.error)
            progress.show(encoded.done_bytes, writer.num_documents, num_tokens)
        if not writer.num_documents:
            raise ValueError("\n".join([f"no document in {len(files)} files; name others with --input, or set --suffixes, --read-as and "
                                        "--json-key as they are", *report.lines()]))
    seconds = time.monotonic() - start
    return [*report.lines(),
            f"{writer.bin_path}, {writer.idx_path.name}: {writer.num_documents} documents, {num_tokens} tokens ({writer.dtype}) of "
            f"{len(files)} files, {total_bytes / 1e6:.1f} MB; {report.total} skipped; "
            f"{format_duration(seconds)}, {total_bytes / 1e6 / seconds:.2f} MB/s"]


class ProgressDisplay:
    """A bar with rate and time left on a terminal, else a plain line every `interval` seconds; both on standard error."""

    def __init__(self, total_bytes: int, interval: float):
        self._total, self._interval = total_bytes, interval
        self._start = self._last = time.monotonic()
        console = Console(stderr=True)
        columns = TextColumn("{task.fields[counts]}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=console) if console.is_terminal else None

    def __enter__(self) -> ProgressDisplay:
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, counts="")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, done_bytes: int, num_documents: int, num_tokens: int) -> None:
        """`done_bytes` of the input are behind us."""
        counts = f"{num_documents} documents, {num_tokens} tokens"
        if self._bar:
            self._bar.update(self._task, completed=done_bytes, counts=counts)
            return
        now = time.monotonic()
        if now - self._last >= self._interval:
            self._last = now
            rate = done_bytes / (now - self._start)
            left = format_duration((self._total - done_bytes) / rate) if rate else "?"
            print(f"{counts}, {done_bytes / 1e6:.1f} of {self._total / 1e6:.1f} MB, {rate / 1e6:.2f} MB/s, {left} left", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
