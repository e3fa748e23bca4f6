"""Parts in processes of their own: what is left of a part that fails or hangs, and when processes end."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.benchmarking import worlds

NAMES = ["first", "second", "third"]
ROOT = Path(__file__).parents[2]
IMPORT = "import sys, time, signal; sys.path.insert(0, '.'); from pathlib import Path; from tools.benchmarking.worlds import *; "


def parts(monkeypatch, statuses, seconds=60.0):
    """What `run_parts` gives when the processes that begin with a part end with these statuses, after (how many parts)."""
    begun = []

    def processes(command, end):
        part, path = command
        begun.append(part)
        status, number = statuses[part]
        worlds.stack_file(path, 1).write_text("its stack\n")
        path.write_text(json.dumps([{"name": name} for name in NAMES[part:part + number]]))
        if status == 143:
            raise SystemExit(status)
        return status

    monkeypatch.setattr(worlds, "run_until", processes)
    return [result["name"] for result in worlds.run_parts(NAMES, lambda part, path: (part, path), end=time.monotonic() + seconds)], begun


@pytest.mark.parametrize(("statuses", "given", "begun", "told"), [
    ({0: (0, 3)}, NAMES, [0], ""),
    ({0: (1, 1), 2: (0, 1)}, ["first", "third"], [0, 2], "FAILED second: its processes ended with status 1"),
    ({0: (1, 0), 1: (1, 1), 2: (1, 0)}, ["second"], [0, 1], "FAILED third"),
    ({0: (1, 3)}, NAMES, [0], "all ran, but their processes did not end by themselves (status 1)\nrank 1:\nits stack\n"),
    ({0: (None, 3)}, NAMES, [0], "did not end by themselves (the time is over)"),
    ({0: (None, 1)}, ["first"], [0], "the time is over, in second; not run: third\nrank 1:\nits stack\n"),
    ({0: (143, 2)}, ["first", "second"], [0], "told to end, in third; not run: none"),
], ids=["all", "one fails", "two fail", "after the last", "after the last until the end", "no time", "told to end"])
def test_a_part_that_ends_its_processes_leaves_the_others(monkeypatch, capsys, statuses, given, begun, told):
    assert parts(monkeypatch, statuses) == (given, begun)
    assert told in capsys.readouterr().out


def test_no_part_begins_after_the_end(monkeypatch, capsys):
    assert parts(monkeypatch, {0: (1, 1)}, seconds=-1.0) == (["first"], [0])
    assert "the time is over, in second; not run: third" in capsys.readouterr().out


def test_processes_are_told_to_end_in_time():
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert worlds.run_until(sleeper, time.monotonic() + 0.2) is None
    assert worlds.run_until([sys.executable, "-c", "raise SystemExit(3)"], time.monotonic() + 60) == 3


def test_processes_that_ignore_it_are_killed_with_their_children(monkeypatch, tmp_path):
    monkeypatch.setattr(worlds, "STOP_SECONDS", 0.3)
    child = "import time; time.sleep(60)"
    stubborn = ("import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); "
                f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); child.wait()")
    start = time.monotonic()
    assert worlds.run_until([sys.executable, "-c", stubborn], start + 1.5) is None
    assert time.monotonic() - start < 15.0
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("a child goes on")


@pytest.mark.parametrize(("seconds", "end"), [(0.3, 60.0), (60.0, 0.3)], ids=["a piece of work", "the end"])
def test_what_takes_too_long_ends_itself_and_tells_where_it_was(tmp_path, seconds, end):
    path = tmp_path / "results.json"
    code = IMPORT + (f"watch = Watch(time.monotonic() + {end}, stack_file(Path({str(path)!r}), 2)); watch.allow(50); "
                     f"watch.allow({seconds})\ndef hangs():\n  time.sleep(60)\nhangs()")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 1
    told = worlds.stacks(path)
    assert told.startswith("rank 2:\nTimeout (0:00:00.") and "in hangs" in told


def test_whoever_is_told_to_end_tells_where_it_was(tmp_path):
    path = tmp_path / "results.json"
    code = IMPORT + f"Watch(time.monotonic() + 60, stack_file(Path({str(path)!r}), 0)); print('begun', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        assert process.wait() == -signal.SIGTERM
    assert worlds.stacks(path).startswith("rank 0:\n") and 'File "<string>", line 1' in worlds.stacks(path)


def test_whoever_ends_this_process_ends_them():
    code = ("import sys, time; sys.path.insert(0, '.'); from tools.benchmarking.worlds import run_until; "
            "child = \"import time; print('begun', flush=True); time.sleep(2); print('left')\"; "
            "run_until([sys.executable, '-c', child], time.monotonic() + 60)")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        assert process.stdout.read() == "" and process.wait() == 128 + 15  # the pipe closes when its last writer has ended
