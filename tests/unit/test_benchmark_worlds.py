"""Parts in processes of their own: what is left of a part that fails, and when processes end."""
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.benchmarking import worlds

NAMES = ["first", "second", "third"]


def parts(monkeypatch, statuses):
    """What `run_parts` gives when the processes that begin with a part end with these statuses, after (how many parts)."""
    begun = []

    def processes(command, end):
        part, path = command
        begun.append(part)
        status, number = statuses[part]
        path.write_text(json.dumps([{"name": name} for name in NAMES[part:part + number]]))
        return status

    monkeypatch.setattr(worlds, "run_until", processes)
    return [result["name"] for result in worlds.run_parts(NAMES, lambda part, path: (part, path), end=0.0)], begun


@pytest.mark.parametrize(("statuses", "given", "begun", "told"), [
    ({0: (0, 3)}, NAMES, [0], ""),
    ({0: (1, 1), 2: (0, 1)}, ["first", "third"], [0, 2], "FAILED second: its processes ended with status 1"),
    ({0: (1, 0), 1: (1, 1), 2: (1, 0)}, ["second"], [0, 1], "FAILED third"),
    ({0: (1, 3)}, NAMES, [0], ""),
    ({0: (None, 1)}, ["first"], [0], "the time is over; not run: second, third"),
], ids=["all", "one fails", "two fail", "after the last", "no time"])
def test_a_part_that_ends_its_processes_leaves_the_others(monkeypatch, capsys, statuses, given, begun, told):
    assert parts(monkeypatch, statuses) == (given, begun)
    assert told in capsys.readouterr().out


def test_processes_are_told_to_end_in_time():
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert worlds.run_until(sleeper, time.monotonic() + 0.2) is None
    assert worlds.run_until([sys.executable, "-c", "raise SystemExit(3)"], time.monotonic() + 60) == 3


def test_whoever_ends_this_process_ends_them():
    code = ("import sys, time; sys.path.insert(0, '.'); from tools.benchmarking.worlds import run_until; "
            "child = \"import time; print('begun', flush=True); time.sleep(2); print('left')\"; "
            "run_until([sys.executable, '-c', child], time.monotonic() + 60)")
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        assert process.stdout.read() == "" and process.wait() == 128 + 15  # the pipe closes when its last writer has ended
