"""The watchdog: silent while there are beats, and what it writes when they stop."""

import threading
import time

from megatron_dllm.parallel import CommunicationLog, Watchdog, watchdog


def wait_in_a_collective(ended: threading.Event) -> bool:
    return ended.wait(20)


def test_watchdog_names_the_collective_and_writes_stacks(tmp_path):
    log, ended, codes = CommunicationLog(), threading.Event(), []

    def end(code):
        codes.append(code)
        ended.set()

    log.start("all_reduce", "dp", 8, "all_reduce over dp (0, 2)")()
    log.start("all_gather", "tp", 8, "all_gather over tp (0, 1)")
    with open(tmp_path / "report.txt", "w+") as output:
        with Watchdog(log, rank=3, seconds=0.2, output=output, end=end) as watching:
            watching.beat("iteration 12")
            assert wait_in_a_collective(ended)
        output.seek(0)
        report = output.read()
    assert codes == [124]
    lines = report.splitlines()
    assert lines[0].startswith("rank 3: no progress for 0.2 s since iteration 12")
    assert lines[1] == "rank 3: waits for all_gather over tp (0, 1)"  # the all-reduce has ended
    assert lines[2] == "rank 3: last collective started: all_gather over tp (0, 1)"
    assert "in wait_in_a_collective" in report


def test_watchdog_is_silent_while_there_are_beats(tmp_path):
    codes = []
    with open(tmp_path / "report.txt", "w+") as output:
        with Watchdog(CommunicationLog(), rank=0, seconds=3.0, output=output, end=codes.append) as watching:
            for number in range(8):  # longer than the limit in all
                time.sleep(0.4)
                watching.beat(f"iteration {number}")
        assert output.tell() == 0 and codes == []
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_watchdog_takes_collectives_for_progress(tmp_path):
    log, codes = CommunicationLog(), []
    with open(tmp_path / "report.txt", "w+") as output:
        with Watchdog(log, rank=0, seconds=2.0, output=output, end=codes.append):
            for _ in range(8):
                time.sleep(0.4)
                log.start("all_gather", "tp", 8, "all_gather over tp (0, 1)")()
        assert output.tell() == 0 and codes == []


def test_watchdog_leaves_the_reason_and_waits_for_no_disk(tmp_path, monkeypatch):
    log, ended, told = CommunicationLog(), threading.Event(), []
    monkeypatch.setattr(watchdog, "TELL_SECONDS", 0.1)
    log.start("all_gather", "tp", 8, "all_gather over tp (0, 1)")

    def tell(reason):
        told.append(reason)
        time.sleep(30)  # a file system that stands still

    with open(tmp_path / "report.txt", "w+") as output:
        with Watchdog(log, rank=3, seconds=0.2, output=output, end=lambda code: ended.set(), tell=tell):
            assert ended.wait(10)
    assert told == ["no progress for 0.2 s since start, waiting for all_gather over tp (0, 1)"]
