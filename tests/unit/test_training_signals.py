"""Stop reasons and their agreement over ranks, signals that arrive in a real process, and the status file."""
from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from megatron_dllm.parallel.context import CommunicationLog
from megatron_dllm.training.loop import Trainer
from megatron_dllm.training.mistakes import TrainingFailed
from megatron_dllm.training.signals import (
    EXIT_DURATION,
    EXIT_INTERVAL,
    SignalWatcher,
    StopPolicy,
    decode_reason,
    encode_reason,
    watched_signals,
)
from megatron_dllm.training.status import RunStatus, read_status

ROOT = Path(__file__).resolve().parents[2]


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


@pytest.mark.parametrize("reason", [None, EXIT_INTERVAL, EXIT_DURATION, "SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_encode_reason_round_trip(reason):
    assert decode_reason(encode_reason(reason)) == reason


def test_encode_reason_agrees_by_the_largest():
    def agreed(*reasons):
        return decode_reason(max(encode_reason(reason) for reason in reasons))

    assert agreed(None, None) is None
    assert agreed(None, EXIT_DURATION, None) == EXIT_DURATION
    assert agreed(EXIT_INTERVAL, EXIT_DURATION) == EXIT_DURATION
    assert agreed(EXIT_DURATION, "SIGHUP") == "SIGHUP"
    assert agreed("SIGINT", "SIGTERM") == "SIGTERM"


# (interval, minutes, iteration, elapsed seconds, signal) -> reason
POLICY = {
    "nothing is set": (None, None, 100, 1e9, None, None),
    "signal": (None, None, 1, 0.0, "SIGTERM", "SIGTERM"),
    "signal before flags": (1, 1, 1, 60.0, "SIGTERM", "SIGTERM"),
    "before the interval": (5, None, 4, 0.0, None, None),
    "at the interval": (5, None, 5, 0.0, None, EXIT_INTERVAL),
    "at its multiple": (5, None, 10, 0.0, None, EXIT_INTERVAL),
    "nothing done yet": (5, None, 0, 0.0, None, None),
    "before the duration": (None, 2, 1, 119.9, None, None),
    "at the duration": (None, 2, 1, 120.0, None, EXIT_DURATION),
    "both": (5, 2, 5, 120.0, None, EXIT_DURATION),
}


@pytest.mark.parametrize("case", POLICY)
def test_stop_policy_reason(case):
    interval, minutes, iteration, elapsed, name, expected = POLICY[case]
    policy = StopPolicy(exit_interval=interval, exit_duration_in_mins=minutes, started_at=1000.0)
    assert policy.reason(iteration, now=1000.0 + elapsed, signal_name=name) == expected


def test_watched_signals():
    assert watched_signals(None) == (signal.SIGTERM, signal.SIGINT)
    assert watched_signals("SIGTERM") == (signal.SIGTERM, signal.SIGINT)
    assert watched_signals("SIGUSR2") == (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "TERM", "15"])
def test_watched_signals_refuses(name):
    with pytest.raises(ValueError, match=f"--exit-signal {name}: not a signal .* SIGTERM, .*SIGUSR1"):
        watched_signals(name)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signal_watcher_records_and_restores(name):
    number = signal.Signals[name]
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    told = []
    with SignalWatcher(exit_signal="SIGUSR1", on_request=told.append) as signals:
        assert signals.requested is None
        os.kill(os.getpid(), number)
        wait_until(lambda: told)
        assert signals.requested == name
        # Later signals, also the second half of a Ctrl-C that torchrun passes on, change nothing.
        for later in (number, signal.SIGTERM):
            os.kill(os.getpid(), later)
        time.sleep(0.05)
        assert (signals.requested, told) == (name, [name])
    assert before == {s: signal.getsignal(s) for s in before}
    assert signal.set_wakeup_fd(-1) == -1


def test_signal_watcher_leaves_other_signals_alone():
    seen = []
    former = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        with SignalWatcher() as signals:
            os.kill(os.getpid(), signal.SIGUSR2)
            wait_until(lambda: seen)
            time.sleep(0.05)
            assert signals.requested is None
    finally:
        signal.signal(signal.SIGUSR2, former)


def _send(number: signal.Signals, process: int) -> None:
    """From a process that is not the parent, as whoever signals a group of processes."""
    subprocess.run(["kill", f"-{number.name.removeprefix('SIG')}", str(process)], check=True)


def _sleep_forever(ready):
    ready.set()
    time.sleep(60)


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="signals do not say who sent them")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signal_watcher_in_a_forked_child(name):
    """A data worker: a signal to the whole group does not end it, its parent's terminate() does, and none is taken for the parent's."""
    with SignalWatcher(exit_signal="SIGUSR1") as signals:
        fork = multiprocessing.get_context("fork")
        ready = fork.Event()
        worker = fork.Process(target=_sleep_forever, args=(ready,), daemon=True)
        worker.start()
        assert ready.wait(10)
        _send(signal.Signals[name], worker.pid)
        worker.join(0.2)
        assert worker.is_alive()
        worker.terminate()
        worker.join(10)
        assert worker.exitcode == 0
        time.sleep(0.05)
        assert signals.requested is None


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="signals do not say who sent them")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded, use of fork:DeprecationWarning")
def test_signal_watcher_beside_a_loader():
    """torch's loader gives its workers a handler that lets SIGTERM kill, and raises in the run when one is killed."""
    with SignalWatcher():
        batches = iter(DataLoader(range(100), batch_size=None, num_workers=1, multiprocessing_context="fork", prefetch_factor=1))
        next(batches)  # the worker is past its start
        worker, = multiprocessing.active_children()
        _send(signal.SIGTERM, worker.pid)
        worker.join(0.2)
        assert [int(batch) for batch in batches] == list(range(1, 100))
        worker.join(10)
        assert worker.exitcode == 0


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded, use of fork:DeprecationWarning")
def test_signal_watcher_ends_before_its_children():
    """An error of a data worker leaves the watcher while the workers, which have inherited it, are still there."""
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    worker = fork.Process(target=_sleep_forever, args=(ready,), daemon=True)

    def wait_no_longer(number, frame):
        raise TimeoutError("the watcher waits for its children")

    former = signal.signal(signal.SIGALRM, wait_no_longer)
    try:
        with SignalWatcher():
            worker.start()
            assert ready.wait(10)
            signal.alarm(5)
        assert worker.is_alive()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
        worker.kill()


# The main thread waits in C without the interpreter, as in a collective whose other side is gone: no Python handler can run.
STUCK = """
import hashlib, sys
from megatron_dllm.training.signals import SignalWatcher
from megatron_dllm.training.status import RunStatus
from pathlib import Path
with RunStatus(Path(sys.argv[1]), rank=0, total_iterations=9) as status, SignalWatcher(
        on_request=lambda name: print(name, flush=True), on_abort=lambda: status.failed("interrupted twice")):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def test_signal_watcher_second_interrupt_ends_a_stuck_process(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        # One Ctrl-C under torchrun: twice within milliseconds, and the process goes on.
        for _ in range(2):
            process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "SIGINT\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(SignalWatcher.SAME_KEY_SECONDS + 0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
    finally:
        process.kill()
        _, stderr = process.communicate()
    assert "exiting at once" in stderr
    assert read_status(tmp_path / "status.json")["reason"] == "interrupted twice"


def status_of(folder: Path) -> dict:
    assert [path.name for path in folder.iterdir()] == ["status.json"]  # no temporary file is left
    return json.loads((folder / "status.json").read_text())


def test_run_status_states(tmp_path):
    folder = tmp_path / "new" / "run"
    with RunStatus(folder, rank=0, total_iterations=10, iteration=2) as status:
        made = status_of(folder)
        assert made["pid"] == os.getpid() and made["started_at"] <= made["updated_at"]
        expected = {"state": "running", "iteration": 2, "total_iterations": 10, "reason": None, "checkpoint": None}
        assert made | expected == made
        status.progress(5, checkpoint=folder / "iter_0000005")
        expected |= {"iteration": 5, "checkpoint": f"{folder}/iter_0000005"}
        assert status_of(folder) | expected == status_of(folder)
        status.stopped(7, "SIGTERM", checkpoint=folder / "iter_0000007")
    expected |= {"state": "stopped", "iteration": 7, "reason": "SIGTERM", "checkpoint": f"{folder}/iter_0000007"}
    assert status_of(folder) | expected == status_of(folder)
    with RunStatus(folder, rank=0, total_iterations=10) as status:
        assert status_of(folder)["state"] == "running"
        status.finished(10)
    assert status_of(folder)["state"] == "finished" and status_of(folder)["reason"] is None


@pytest.mark.parametrize("rank", [0, 3])
def test_run_status_failure_passes_on(tmp_path, rank):
    with pytest.raises(KeyError, match="missing"), RunStatus(tmp_path, rank=rank, total_iterations=10) as status:
        status.progress(4)
        raise KeyError("missing")
    made = status_of(tmp_path)
    assert (made["state"], made["reason"], made["rank"], made["iteration"]) == ("failed", "KeyError: 'missing'", rank, 4)


def test_run_status_progress_is_written_every_few_seconds(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with RunStatus(tmp_path, rank=0, total_iterations=10) as status:
        seen = []
        for iteration, now[0] in ((1, 1.0), (2, 4.9), (3, 5.0), (4, 9.9), (5, 10.0)):
            status.progress(iteration)
            seen.append(status_of(tmp_path)["iteration"])
        status.finished(6)
    assert seen == [0, 0, 3, 3, 5]


def test_run_status_keeps_the_first_failure(tmp_path):
    with pytest.raises(RuntimeError), RunStatus(tmp_path, rank=0, total_iterations=10):
        with pytest.raises(ValueError), RunStatus(tmp_path, rank=1, total_iterations=10):
            raise ValueError("the cause")
        raise RuntimeError("connection closed by peer")
    assert status_of(tmp_path)["reason"] == "ValueError: the cause"


def test_run_status_that_cannot_be_written_hides_no_failure(tmp_path, capsys):
    with pytest.raises(KeyError, match="the cause"), RunStatus(tmp_path / "run", rank=0, total_iterations=10):
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("no folder any more")
        raise KeyError("the cause")
    assert "status.json cannot say that the run failed: " in capsys.readouterr().err


def test_run_status_leaves_nothing_of_what_a_full_disk_refuses(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunStatus(tmp_path, rank=0, total_iterations=10) as status:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            status.progress(4, checkpoint=tmp_path)
        assert status_of(tmp_path)["iteration"] == 0
        status.finished(10)
    assert status_of(tmp_path)["state"] == "finished"


def test_run_status_says_what_it_goes_on_from(tmp_path):
    with RunStatus(tmp_path, rank=0, total_iterations=10, iteration=4, checkpoint=Path("runs/iter_4")) as status:
        assert status_of(tmp_path)["checkpoint"] == "runs/iter_4"
        status.finished(10)


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), TrainingFailed("2 in a row")])
def test_a_rank_that_has_lost_another_says_what_to_look_for(tmp_path, capsys, error):
    run = SimpleNamespace(parallel=SimpleNamespace(distributed_timeout_minutes=1))
    context = SimpleNamespace(world=SimpleNamespace(size=2, rank=1), log=CommunicationLog())
    status = RunStatus(tmp_path, rank=1, total_iterations=10, iteration=4, checkpoint=Path("runs/iter_4"))
    with pytest.raises(type(error)), Trainer._watch(SimpleNamespace(run=run, context=context, pipeline=None), status):
        raise error
    told = capsys.readouterr().err
    if isinstance(error, TrainingFailed):
        assert not told
    else:
        assert told.startswith("rank 1: ended by an error after iteration 4; --load goes on from runs/iter_4. ")
        assert told.endswith("one was killed: the launcher says which, its host why (memory, a GPU, a signal)\n")


def test_run_status_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    with RunStatus(tmp_path / "run", rank=0, total_iterations=10) as status:
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("no folder any more")
        for iteration in (4, 5):
            status.progress(iteration, checkpoint=tmp_path)
        status.finished(10)
    assert capsys.readouterr().err.count("the run goes on") == 1


def test_run_status_of_another_rank_writes_only_failures(tmp_path):
    with RunStatus(tmp_path, rank=1, total_iterations=10) as status:
        status.progress(1)
        status.finished(10)
    assert list(tmp_path.iterdir()) == []


def test_run_status_without_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="x"), RunStatus(None, rank=0, total_iterations=10) as status:
        status.progress(1)
        raise ValueError("x")
    assert list(tmp_path.iterdir()) == []


def test_run_status_must_be_told_the_end(tmp_path):
    with pytest.raises(AssertionError, match="without finished"), RunStatus(tmp_path, rank=0, total_iterations=10):
        pass
