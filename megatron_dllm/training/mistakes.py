"""Which errors are told to people as they are, and which need the place that they come from."""
from __future__ import annotations

import traceback
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


class TrainingFailed(RuntimeError):
    """The run cannot go on, or has ended without all that was asked for; the text says why, and what the last good state is."""


def is_told(error: ValueError) -> bool:
    """Whether its text is all that is to be said: a `raise` of this package wrote it. One that torch, an extension or a wrong number raised
    says nothing without its traceback.
    """
    *_, last = traceback.extract_tb(error.__traceback__)
    return PACKAGE in Path(last.filename).parents and (last.line or "").startswith("raise ")
