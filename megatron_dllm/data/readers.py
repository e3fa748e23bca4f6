"""Rows from .jsonl, .jsonl.gz, .json and .parquet files and from folders that datasets' save_to_disk wrote."""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .report import Origin, SampleError, SkipReport

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
ARROW = ".arrow"  # only inside a save_to_disk folder
ARROW_BATCH_ROWS = 1024

Row = dict[str, Any]


def find_files(path: str) -> list[Path]:
    """The data files that a file, a folder (searched to the bottom) or a glob stands for, in the order of their names.

    ValueError if nothing is found, a file is of an unknown kind, or a folder holds several splits of a dataset.
    """
    places = [Path(path)] if Path(path).exists() else [Path(found) for found in sorted(glob.glob(path, recursive=True))]
    if not places:
        raise ValueError(f"{path}: no such file or folder, and no file matches it as a pattern; correct --data-path")
    files = [file for place in places for file in (_files_in_folder(place) if place.is_dir() else [place])]
    for file in files:
        if not file.name.endswith((*SUFFIXES, ARROW)):
            raise ValueError(f"{file}: not one of {', '.join(SUFFIXES)} or a save_to_disk folder; convert it, "
                             "or make an indexed file of plain text with tools/preprocess_data.py")
    return files


def _files_in_folder(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").exists():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        if len(splits) != 1:
            raise ValueError(f"{folder}: holds the splits {splits}; name one of them, for example {folder / splits[0]}")
        return _files_in_folder(folder / splits[0])
    if (folder / "state.json").exists():
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / entry["filename"] for entry in state["_data_files"]]
    visible = (file for file in folder.rglob("*") if not any(part.startswith(".") for part in file.relative_to(folder).parts))
    inner = sorted(file for file in visible if file.name.endswith(SUFFIXES))
    if not inner:
        raise ValueError(f"{folder}: no {', '.join(SUFFIXES)} file in it, and no dataset that save_to_disk wrote; correct --data-path")
    return inner


def read_rows(files: Sequence[Path], report: SkipReport) -> Iterator[tuple[Origin, Row]]:
    """Each readable row with its origin. A corrupt line goes to `report`; a damaged container (gzip, parquet, arrow) is a ValueError."""
    for file in files:
        if file.name.endswith(".jsonl.gz"):
            yield from _json_lines(file, gzip.open, report)
        elif file.suffix == ".jsonl":
            yield from _json_lines(file, open, report)
        elif file.suffix == ".json":
            yield from _json_file(file, report)
        else:
            yield from _arrow_rows(file)


def _json_lines(file: Path, opener: Any, report: SkipReport) -> Iterator[tuple[Origin, Row]]:
    try:
        with opener(file, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                origin = Origin(str(file), number)
                if line.strip():
                    try:
                        # Byte order marks are found at the head of files made on Windows.
                        row = _as_row(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
                    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
                        report.skip(origin, SampleError("corrupt line", str(error)))
                    except SampleError as error:
                        report.skip(origin, error)
                    else:
                        yield origin, row
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file}: damaged gzip file ({error}); fetch or pack it again") from error


def _json_file(file: Path, report: SkipReport) -> Iterator[tuple[Origin, Row]]:
    """An array of objects; a .json file that does not begin with a bracket is read as JSON lines, as many of them are."""
    with open(file, "rb") as stream:
        head = stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not head.startswith(b"["):
        yield from _json_lines(file, open, report)
        return
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON ({error}); repair it, or store one object a line as .jsonl") from error
    for number, value in enumerate(rows, start=1):
        origin = Origin(str(file), number)
        try:
            row = _as_row(value)
        except SampleError as error:
            report.skip(origin, error)
        else:
            yield origin, row


def _as_row(value: Any) -> Row:
    if not isinstance(value, dict):
        raise SampleError("corrupt line", f"a JSON object is needed, this is a {type(value).__name__}")
    return value


def _arrow_rows(file: Path) -> Iterator[tuple[Origin, Row]]:
    try:
        number = 0
        for batch in _arrow_batches(file):
            for row in batch.to_pylist():
                number += 1
                yield Origin(str(file), number), _without_nulls(row)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file}: cannot be read ({error}); fetch or write it again") from error


def _arrow_batches(file: Path) -> Iterator[pa.RecordBatch]:
    if file.suffix == ".parquet":
        with pq.ParquetFile(file) as table:
            yield from table.iter_batches(batch_size=ARROW_BATCH_ROWS)
    else:
        with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
            yield from stream


def _without_nulls(value: Any) -> Any:
    """Structs without their null fields: a table gives every struct all fields, so null is how it writes an absent one."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
