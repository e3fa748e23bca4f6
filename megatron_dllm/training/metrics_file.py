"""metrics.jsonl: one JSON object a line, every float in full precision, NaN and the infinities as the strings "nan", "inf" and "-inf"."""
from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Record = dict[str, float | int | str]
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode_record(record: Mapping[str, float | int | str]) -> str:
    """The record as one line of strict JSON, without the line end. TypeError for a value that is no plain number or string."""
    for name, value in record.items():
        # A tensor would have to wait for its device here, unseen; a bool or None is a mistake of the caller.
        if isinstance(value, bool) or not isinstance(value, float | int | str):
            raise TypeError(f"metric {name!r} is {value!r} ({type(value).__name__}); it must be a float, int or str: read it with .item()")
    return json.dumps({name: _json_safe(value) for name, value in record.items()}, allow_nan=False)


def _json_safe(value: float | int | str) -> float | int | str:
    if isinstance(value, float):
        # numpy's float64 is a float whose own text is not JSON.
        return float(value) if math.isfinite(value) else str(float(value))
    return value


def decode_record(line: str) -> Record:
    """The inverse of `encode_record`. ValueError for text that is no JSON object with an iteration."""
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
        raise ValueError("a record is a JSON object with an integer `iteration`")
    return {name: NON_FINITE.get(value, value) if isinstance(value, str) else value for name, value in record.items()}


@dataclass(frozen=True)
class MetricsRead:
    """records: in file order. torn_line: the last line when a crash cut it short, else None."""

    records: tuple[Record, ...]
    torn_line: str | None


def read_metrics(path: Path) -> MetricsRead:
    """All records of the file. A last line that is cut short is set apart; any other corrupt line is a ValueError that names it."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records, torn = [], None
    last = max((number for number, line in enumerate(lines) if line.strip()), default=-1)
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            records.append(decode_record(line))
        except ValueError as error:
            if number != last:
                raise ValueError(f"{path}:{number + 1}: no metrics record ({error}): {line[:80]!r}; delete that line") from error
            torn = line
    return MetricsRead(tuple(records), torn)


class MetricsFile:
    """Appends records to a file, so that a run which resumes leaves the same file as one that was never interrupted.

    resumed_iteration: the last finished iteration; records after it, and a line cut short by a crash, are removed, since the run will
    write them again. A new run (0) in a directory with records keeps the old file beside its own, under the first free name
    metrics.1.jsonl, metrics.2.jsonl, ...; `moved_to` is that name, or None.
    """

    def __init__(self, path: Path, *, resumed_iteration: int):
        self.path = path
        self.moved_to: Path | None = None
        if path.exists() and path.stat().st_size > 0:
            if resumed_iteration > 0:
                _truncate(path, resumed_iteration)
            else:
                self.moved_to = _move_aside(path)
        # Unbuffered: after an error we know which bytes are in the file, so that no line is torn once there is room again.
        self._file = open(path, "ab", buffering=0)
        self._unwritten = b""

    def append(self, record: Mapping[str, float | int | str]) -> None:
        """Write one record through to the operating system: a killed process loses at most the line that it is writing. OSError where the
        disk refuses; the record is then written before the next one.
        """
        self._unwritten += (encode_record(record) + "\n").encode()
        self._write()

    def close(self) -> None:
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        try:
            self._reopen_if_lost()
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten):]
        except OSError as error:
            # A full disk gives an error without a file name.
            raise OSError(error.errno, f"cannot write metrics ({error.strerror})", str(self.path)) from error

    def _reopen_if_lost(self) -> None:
        """A file that somebody has removed takes records still, and nobody will see them."""
        try:
            lost = os.fstat(self._file.fileno()).st_nlink == 0
        except OSError as error:
            if error.errno != errno.ESTALE:  # a network's file system, which says so
                raise
            lost = True
        if lost:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file.close()
            self._file = open(self.path, "ab", buffering=0)


def _truncate(path: Path, iteration: int) -> None:
    """Keep the records up to `iteration`. The file is replaced whole, so an interruption leaves the old one or the new one."""
    kept = [record for record in read_metrics(path).records if record["iteration"] <= iteration]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(encode_record(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(temporary, path)


def _move_aside(path: Path) -> Path:
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)
    return target
