"""Which checkpoints stay."""
from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .store import COMPLETE, DELETED, PARTIAL, REPLACED


@dataclass(frozen=True)
class Retention:
    """total_limit: so many of the newest stay; None: all. retain_interval: those of its multiples always stay, besides the limit's (1
    without one).
    """

    total_limit: int | None = None
    retain_interval: int | None = None

    def surplus(self, iterations: Iterable[int]) -> list[int]:
        """Which of these go."""
        limit = self.total_limit if self.total_limit is not None else 1 if self.retain_interval else None
        if limit is None:
            return []
        newest = sorted(iterations, reverse=True)
        return [i for i in newest[limit:] if not (self.retain_interval and i % self.retain_interval == 0)]


def prune(folder: Path, retention: Retention, *, keep: Path) -> None:
    """Delete what `retention` lets go, never `keep`, which has just been published, and what cut-short saves have left.

    A checkpoint loses its name before it loses a file.
    """
    complete = {int(match[1]): path for path in folder.iterdir()
                if (match := re.fullmatch(r"iter_(\d{7,})", path.name)) and (path / COMPLETE).is_file()}
    for iteration in retention.surplus(complete):
        if complete[iteration] != keep:
            complete[iteration].rename(complete[iteration].with_name(complete[iteration].name + DELETED))
    for path in list(folder.iterdir()):
        if re.fullmatch(rf"iter_\d{{7,}}({re.escape(DELETED)}|{re.escape(REPLACED)}|{re.escape(PARTIAL)})", path.name):
            shutil.rmtree(path)
