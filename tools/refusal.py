"""What a suite refuses to do, told without a traceback."""
from __future__ import annotations

import sys
from collections.abc import Callable


class Refusal(Exception):
    """A user's mistake, or a machine that a suite cannot run on: what is wrong, and what to set or start instead."""


def status_of(run: Callable[[], int]) -> int:
    """The exit status of a suite: 0 where nothing was missed, 1 where something was, 2 for a Refusal, which is printed."""
    try:
        return 1 if run() else 0
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
