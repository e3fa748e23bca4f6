"""An indexed token file: the examples of a source as memory-mapped arrays, in a folder whose name is a digest of all that made it.

    tokens.bin      int32, prompt and response of each example, one after the other
    offsets.npy     int64 [N + 1]   example i is tokens[offsets[i]:offsets[i + 1]]
    lengths.npy     int32 [N, 2]    (prompt tokens, response tokens)
    keys.npy        int64 [N, 2]    (row of the source, turn)
    origins.npy     int64 [N, 2]    (place in the list of files, line)
    truncated.npy   bool  [N]
    index.json      names of the files, counts, what was skipped; written last

The folder is filled under another name and then renamed, so that a cut-short run leaves nothing that could be taken for a whole one.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .report import Origin, SkipReport

INDEX = "index.json"
ARRAYS = {"lengths": np.int32, "keys": np.int64, "origins": np.int64, "truncated": np.bool_}


class TokenFileWriter:
    """Fills one token file. A context manager: leaving it without `finish` removes what was written."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".draft", dir=folder.parent))
        except OSError as error:
            raise ValueError(f"{folder.parent}: prepared tokens cannot be written here ({error}); set --data-cache-path to a folder "
                             "that can be written") from error
        self._tokens = open(self._draft / "tokens.bin", "wb")
        self._offsets = [0]
        self._columns: dict[str, list[Any]] = {name: [] for name in ARRAYS}
        self._files: dict[str, int] = {}

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._tokens.close()
        shutil.rmtree(self._draft, ignore_errors=True)  # gone already after `finish`

    def add(self, prompt: Sequence[int], response: Sequence[int], *, key: tuple[int, int], origin: Origin, truncated: bool) -> None:
        """Append one example."""
        for part in (prompt, response):
            self._tokens.write(np.asarray(part, np.int32).tobytes())
        self._offsets.append(self._offsets[-1] + len(prompt) + len(response))
        file = self._files.setdefault(origin.file, len(self._files))
        values = {"lengths": (len(prompt), len(response)), "keys": key, "origins": (file, origin.line), "truncated": truncated}
        for name, value in values.items():
            self._columns[name].append(value)

    def finish(self, report: SkipReport, notes: Sequence[str]) -> None:
        """Put the file in its place; if another process was faster, keep that one's, which is equal."""
        self._tokens.close()
        np.save(self._draft / "offsets.npy", np.asarray(self._offsets, np.int64))
        for name, dtype in ARRAYS.items():
            shape = (-1,) if name == "truncated" else (-1, 2)
            np.save(self._draft / f"{name}.npy", np.asarray(self._columns[name], dtype).reshape(shape))
        index = {"files": list(self._files), "skipped": report.to_json(), "notes": list(notes)}
        (self._draft / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        try:
            os.rename(self._draft, self.folder)
        except OSError:
            if not (self.folder / INDEX).exists():
                raise


class TokenFile:
    """A finished token file, as an ExampleSource. `skipped` and `notes` are what the making of it had to report."""

    def __init__(self, folder: Path, name: str):
        self.name = name
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        self.files: list[str] = index["files"]
        self.skipped = SkipReport.from_json(index["skipped"])
        self.notes: list[str] = index["notes"]
        self.lengths = np.load(folder / "lengths.npy", mmap_mode="r")
        self.keys = np.load(folder / "keys.npy", mmap_mode="r")
        self.truncated = np.load(folder / "truncated.npy", mmap_mode="r")
        self._origins = np.load(folder / "origins.npy", mmap_mode="r")
        self._offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        expected = int(self._offsets[-1]) * np.dtype(np.int32).itemsize
        found = (folder / "tokens.bin").stat().st_size
        if found != expected:
            raise ValueError(f"{folder / 'tokens.bin'}: {found} bytes where {expected} are needed; delete the folder, it is made again")
        self._tokens = np.memmap(folder / "tokens.bin", np.int32, "r") if expected else np.zeros(0, np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int) -> np.ndarray:
        """int32 [prompt + response], a copy. IndexError outside 0..N-1."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {self.name}, which has {len(self)}")
        return np.array(self._tokens[self._offsets[index]:self._offsets[index + 1]])

    def describe(self, index: int) -> str:
        """ "chat.jsonl:17 turn 2", turns counted from 1."""
        file, line = self._origins[index]
        return f"{Origin(self.files[file], int(line))} turn {int(self.keys[index, 1]) + 1}"
