"""What a suite refuses to do, told without a traceback."""
from __future__ import annotations

import sys
from collections.abc import Callable

from megatron_dllm.training.mistakes import is_told


class Refusal(Exception):
    """A user's mistake, or a machine that a suite cannot run on: what is wrong, and what to set or start instead."""


def status_of(run: Callable[[], int]) -> int:
    """The exit status of a suite: 0 where nothing was missed, 1 where something was, 2 for a Refusal or a mistake that the package tells,
    which are printed."""
    try:
        return 1 if run() else 0
    except (Refusal, ValueError) as refusal:
        if not (isinstance(refusal, Refusal) or is_told(refusal)):
            raise
        print(f"error: {refusal}", file=sys.stderr)
        return 2
