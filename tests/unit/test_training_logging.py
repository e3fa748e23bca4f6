"""Log lines, the live display, metrics.jsonl over crashes and restarts, and the trackers."""
from __future__ import annotations

import io
import json
import math
import resource
import shutil
import signal
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from megatron_dllm.config import LoggingConfig
from megatron_dllm.training.logging import RunLogger, is_noise_level, log_line, metric_parts, noise_level_name
from megatron_dllm.training.metrics_file import MetricsFile, decode_record, encode_record, read_metrics
from megatron_dllm.training.progress import TimeLeft, format_duration, sparkline

METRICS = {
    "consumed_samples": 80, "learning_rate": 1e-4, "loss": 5.5, "encoder_loss": 3.25, "diffusion_loss": 2.25, "grad_norm": 1.23456,
    "iteration_ms": 12.34,
    "skipped": 0, "tokens_per_second": 3529.4, "tflops_per_device": 411.26, "mfu": 0.4158, "memory_allocated_bytes": 3 * 1024**3}


def logger(folder: Path | None, config: LoggingConfig | None = None, *, terminal: bool = False, **changes) -> tuple[RunLogger, io.StringIO]:
    """A logger of rank 0 that prints into the returned text, and the text."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=100, color_system=None, _environ={"TERM": "xterm"})
    return RunLogger(folder, config or LoggingConfig(), **{"rank": 0, "total_iterations": 100, "console": console} | changes), screen


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Values that JSON or a careless format would lose.
ODD_VALUES = {"nan": math.nan, "inf": math.inf, "minus inf": -math.inf, "third": 1 / 3, "least": 5e-324, "long": 2**63 + 1,
              "numpy": np.float64(0.1), "numpy nan": np.float64("nan"), "text": "é\n"}


@pytest.mark.parametrize("name", ODD_VALUES)
def test_encode_record_round_trip(name):
    value = ODD_VALUES[name]
    line = encode_record({"iteration": 1, name: value})
    assert "\n" not in line
    json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    back = decode_record(line)[name]
    assert back == value or (math.isnan(back) and math.isnan(value))
    assert type(back) is (float if isinstance(value, float) else type(value))


@pytest.mark.parametrize("value", [torch.tensor(1.0), True, None, [1.0], np.float32(1)], ids=lambda value: type(value).__name__)
def test_encode_record_refuses(value):
    with pytest.raises(TypeError, match="metric 'loss' is .* must be a float, int or str"):
        encode_record({"iteration": 1, "loss": value})


def test_metrics_file_resumes_as_if_never_interrupted(tmp_path):
    """Records of iterations 1 to 6, the last cut short by a crash; the run resumes after 4."""
    whole, path = tmp_path / "whole.jsonl", tmp_path / "metrics.jsonl"
    for target in (whole, path):
        file = MetricsFile(target, resumed_iteration=0)
        for iteration in range(1, 7):
            file.append({"iteration": iteration, "loss": 1 / iteration, "bad": math.nan})
        file.close()
    path.write_text(path.read_text()[:-9])
    file = MetricsFile(path, resumed_iteration=4)
    assert file.moved_to is None
    assert [record["iteration"] for record in read_metrics(path).records] == [1, 2, 3, 4]
    for iteration in (5, 6):
        file.append({"iteration": iteration, "loss": 1 / iteration, "bad": math.nan})
    file.close()
    assert path.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "whole.jsonl"]


def test_metrics_file_of_a_new_run_keeps_the_old_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for number, name in ((0, None), (1, "metrics.1.jsonl"), (2, "metrics.2.jsonl")):
        file = MetricsFile(path, resumed_iteration=0)
        assert (file.moved_to and file.moved_to.name) == name
        file.append({"iteration": 1, "run": number})
        file.close()
    assert [records(tmp_path / name)[0]["run"] for name in ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("resumed_iteration", [0, 7])
def test_metrics_file_empty(tmp_path, resumed_iteration):
    path = tmp_path / "metrics.jsonl"
    path.touch()
    assert read_metrics(path).records == ()
    MetricsFile(path, resumed_iteration=resumed_iteration).close()
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


TORN = {
    "cut in a name": ('{"iteration": 2, "lo', '{"iteration": 2, "lo'),
    "cut in a number that still parses": ('{"iteration": 2}\n{"iteration": 3', '{"iteration": 3'),
    "cut in a character": ('{"iteration": 2, "text": "\xc3', '{"iteration": 2, "text": "\ufffd'),
    "zeros after a power cut": ("\0\0\0\0", "\0\0\0\0"),
}


@pytest.mark.parametrize("case", TORN)
def test_read_metrics_sets_a_torn_last_line_apart(tmp_path, case):
    tail, torn = TORN[case]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n\n' + tail.encode("latin-1"))
    read = read_metrics(path)
    assert read.torn_line == torn
    assert read.records[0] == {"iteration": 1}


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"loss": 1}', '{"iteration": "one"}', '{"iteration": 1, "loss": NaN'])
def test_read_metrics_names_a_corrupt_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n' + line + '\n{"iteration": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: no metrics record .*; delete that line"):
        read_metrics(path)
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        MetricsFile(path, resumed_iteration=1)
    path.write_text(path.read_text().replace(line + "\n", ""))
    assert len(read_metrics(path).records) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_metrics_file_names_itself_when_the_disk_is_full(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    file = MetricsFile(tmp_path / "metrics.jsonl", resumed_iteration=0)
    with pytest.raises(OSError, match=r"cannot write metrics \(No space left on device\): .*metrics\.jsonl"):
        file.append({"iteration": 1})
    with pytest.raises(OSError, match="No space left"):
        file.close()


def test_metrics_file_is_begun_again_where_it_was_removed(tmp_path):
    (tmp_path / "run").mkdir()
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl", resumed_iteration=0)
    file.append({"iteration": 1})
    shutil.rmtree(tmp_path / "run")
    file.append({"iteration": 2})
    file.append({"iteration": 3})
    file.close()
    assert [record["iteration"] for record in read_metrics(file.path).records] == [2, 3]


def test_metrics_file_tears_no_line_when_there_is_room_again(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", resumed_iteration=0)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (25, limits[1]))
        for iteration in (1, 2):
            with pytest.raises(OSError, match="cannot write metrics"):
                file.append({"iteration": iteration, "loss": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "metrics.jsonl").stat().st_size == 25  # of a first line of 31 bytes
    file.append({"iteration": 3, "loss": 0.5})
    file.close()
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["iteration"] for record in found.records] == [1, 2, 3] and found.torn_line is None


def test_metric_parts_order():
    labels = [label for label, _ in metric_parts(METRICS)]
    assert labels == [
        "consumed samples", "elapsed time per iteration (ms)", "learning rate", "loss", "encoder loss", "diffusion loss", "grad norm",
        "number of skipped iterations", "tokens/s", "TFLOP/s per device", "MFU (%)", "memory (GiB)"]


def test_log_line():
    when = time.struct_time((2026, 1, 2, 3, 4, 5, 4, 2, 0))
    assert log_line(8, 100, METRICS, left_seconds=3725, when=when) == (
        "[2026-01-02 03:04:05] iteration   8/100 | consumed samples:           80 | elapsed time per iteration (ms): 12.3 | "
        "learning rate: 1.000000E-04 | loss: 5.500000E+00 | encoder loss: 3.250000E+00 | diffusion loss: 2.250000E+00 | "
        "grad norm: 1.235 | number of skipped iterations:   0 | tokens/s: 3529 | TFLOP/s per device: 411.3 | MFU (%): 41.6 | "
        "memory (GiB): 3.00 | time left: 1:02:05 |")


def test_log_line_with_non_finite_and_missing_values():
    line = log_line(1, 2, {"loss": math.nan, "grad_norm": math.inf}, left_seconds=math.nan, when=time.localtime())
    assert line.endswith("iteration 1/2 | loss: NAN | grad norm: inf | time left: ? |")


def test_noise_level_names_stay_out_of_the_log_line():
    name = noise_level_name("diffusion_loss", 0.25, 0.5)
    assert name == "diffusion_loss/t_0.25-0.50"
    assert is_noise_level(name) and is_noise_level("eval/" + name) and not is_noise_level("diffusion_loss")
    assert metric_parts({name: 1.0}) == []


def test_run_logger_writes_lines_and_records(tmp_path):
    made, screen = logger(tmp_path / "run")
    with made:
        made.log(8, METRICS)
        made.log_evaluation(8, {"loss": 4.0, noise_level_name("diffusion_loss", 0, 0.5): 1.5})
        made.log_generation(8, "1 + 1 =", " 2\x1b[2J\x08 [bold] :smile:")
        made.message("saved")
    lines = screen.getvalue().splitlines()
    assert lines[0].endswith("time left: ? |") and len(lines[0]) > 200
    assert lines[1] == "evaluation at iteration 8 | loss: 4.000000E+00 | t 0.00-0.50: 1.5000 |"
    assert lines[2:] == ["generation at iteration 8, prompt '1 + 1 =':", " 2·[2J· [bold] :smile:", "saved"]
    assert records(tmp_path / "run/metrics.jsonl") == [
        {"iteration": 8, **METRICS}, {"iteration": 8, "eval/loss": 4.0, "eval/diffusion_loss/t_0.00-0.50": 1.5}]
    assert records(tmp_path / "run/generations.jsonl") == [{"iteration": 8, "prompt": "1 + 1 =", "text": " 2\x1b[2J\x08 [bold] :smile:"}]


def test_run_logger_of_another_rank_does_nothing(tmp_path):
    made, screen = logger(tmp_path / "run", LoggingConfig(tensorboard_dir=str(tmp_path / "tb")), rank=1, terminal=True)
    with made:
        made.advance(1)
        made.log(1, METRICS)
        made.log_evaluation(1, METRICS)
        made.log_generation(1, "a", "b")
        made.message("hello")
    assert screen.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


def test_run_logger_without_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made, screen = logger(None)
    with made:
        made.log(8, METRICS)
        made.log_generation(8, "a", "b")
    assert "iteration   8/100" in screen.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_run_logger_resumes(tmp_path):
    for resumed, iterations in ((0, (1, 2, 3)), (2, (3, 4))):
        made, screen = logger(tmp_path, resumed_iteration=resumed)
        with made:
            for iteration in iterations:
                made.log(iteration, {"loss": float(resumed)})
                made.log_generation(iteration, "", str(resumed))
    assert [(record["iteration"], record["loss"]) for record in records(tmp_path / "metrics.jsonl")] == [(1, 0), (2, 0), (3, 2), (4, 2)]
    assert [record["text"] for record in records(tmp_path / "generations.jsonl")] == ["0", "0", "2", "2"]
    assert "earlier run" not in screen.getvalue()


def test_run_logger_says_where_an_earlier_runs_records_are(tmp_path):
    for _ in range(2):
        made, screen = logger(tmp_path)
        with made:
            made.log(1, {"loss": 1.0})
    assert f"{tmp_path}/metrics.jsonl held the records of an earlier run: kept as metrics.1.jsonl" in screen.getvalue()


def test_run_logger_on_a_terminal(tmp_path):
    """The bar, its rate and the newest losses are drawn; a message scrolls; the last log line stays."""
    made, screen = logger(tmp_path, terminal=True)
    with made:
        for iteration in (1, 2, 3):  # log() moves the bar too
            made.log(iteration, {"loss": 5.5 - iteration, "learning_rate": 0.5})
        made.message("saved [red] :smile:")
    shown = screen.getvalue()
    assert "iteration 3/100" in shown and " 3%" in shown and " left" in shown
    assert "learning rate 0.5   loss 2.5" in shown and "█▅▁" in shown
    assert "saved [red] :smile:" in shown
    assert "iteration   3/100 | learning rate: 5.000000E-01 | loss: 2.500000E+00 | time left: " in shown
    assert shown.count("| time left") == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_run_logger_where_the_output_is_ascii(tmp_path, terminal):
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, "ascii"), force_terminal=terminal, width=100, _environ={"TERM": "xterm"})
    with RunLogger(tmp_path, LoggingConfig(), rank=0, total_iterations=3, console=console) as made:
        for iteration in (1, 2):
            made.log(iteration, {"loss": 1.0 / iteration})
        made.log_generation(2, "é", "ü\udc80")
    console.file.flush()
    assert rb"\xfc\xb7" in raw.getvalue() and b"loss: 5.000000E-01" in raw.getvalue()
    assert records(tmp_path / "generations.jsonl")[0]["text"] == "ü\udc80"


def test_run_logger_restores_the_terminal_after_an_error(tmp_path):
    made, screen = logger(tmp_path, terminal=True)
    with pytest.raises(RuntimeError, match="boom"), made:
        made.log(1, {"loss": 1.0})
        raise RuntimeError("boom")
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert screen.getvalue().rindex(show) > screen.getvalue().rindex(hide)


def test_time_left():
    now = [0.0]
    left = TimeLeft(100, window=2, clock=lambda: now[0])
    assert math.isnan(left.seconds())
    for iteration, seconds in ((1, 0.0), (1, 50.0), (2, 100.0)):  # the second note of an iteration does not count
        now[0] = seconds
        left.note(iteration)
    assert left.seconds() == 98 * 100
    for iteration, seconds in ((3, 101.0), (6, 105.0)):  # the slow start leaves the window of two
        now[0] = seconds
        left.note(iteration)
    assert left.iterations_per_second() == 3 / 4
    assert left.seconds() == 94 * 4 / 3


@pytest.mark.parametrize("seconds, text", [(0, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05"), (90061, "1d 1:01:01"), (math.inf, "?")])
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


SPARKLINES = {
    "empty": ([], ""), "one": ([3.0], "▁"), "flat": ([3.0, 3.0], "▁▁"), "falling": ([7.0, 3.5, 0.0], "█▅▁"),
    "not finite": ([1.0, math.nan, 0.0], "█×▁"), "all nan": ([math.nan], "×"),
    "longer than the width": ([8.0, 6.0, 1.0, 1.0, 0.0, 0.0], "█▂▁")}


@pytest.mark.parametrize("case", SPARKLINES)
def test_sparkline(case):
    values, line = SPARKLINES[case]
    assert sparkline(values, 3) == line


def test_tensorboard_gets_every_scalar(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LoggingConfig(tensorboard_dir=str(tmp_path / "tb"))
    for resumed, iterations in ((0, (1, 2, 3)), (2, (3,))):
        made, _ = logger(tmp_path / "run", config, resumed_iteration=resumed, arguments=["--lr", "1"])
        with made:
            for iteration in iterations:
                made.log(iteration, {"loss": iteration + resumed / 8, "diffusion_loss": math.nan})
            made.log_generation(iteration, "a", "b")
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert {(event.step, event.value) for event in events.Scalars("loss")} == {(1, 1.0), (2, 2.0), (3, 3.25)}
    assert "generation/text_summary" in events.Tags()["tensors"] and "arguments/text_summary" in events.Tags()["tensors"]


def test_tensorboard_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="--tensorboard-dir tb: tensorboard is not installed; pip install tensorboard"):
        logger(tmp_path, LoggingConfig(tensorboard_dir="tb"))
    assert list(tmp_path.iterdir()) == []


def test_wandb_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="--wandb-project p: wandb is not installed; pip install wandb"):
        logger(tmp_path, LoggingConfig(wandb_project="p"))


class FakeRun:
    def __init__(self, **given):
        self.given, self.logged, self.finished = given, [], False
        self.id = given["id"] or f"id-{id(self)}"

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


def test_wandb_run_continues_on_resume_only(tmp_path, monkeypatch):
    runs: list[FakeRun] = []
    fake = types.SimpleNamespace(init=lambda **given: runs.append(FakeRun(**given)) or runs[-1], Html=lambda text: ("html", text))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for resumed in (0, 5, 0):
        made, _ = logger(tmp_path, LoggingConfig(wandb_project="p", wandb_exp_name="n"), resumed_iteration=resumed, arguments=["--lr", "1"])
        with made:
            made.log(resumed + 1, {"loss": 1.5})
            made.log_generation(resumed + 1, "<", "&")
    first, resumed, new = runs
    assert [run.given["id"] for run in runs] == [None, first.id, None] and new.id != first.id
    assert (first.given["project"], first.given["name"], first.given["config"]) == ("p", "n", {"arguments": "--lr 1"})
    assert first.logged == [(1, {"loss": 1.5}), (1, {"generation": ("html", "<pre>&lt;&amp;</pre>")})]
    assert resumed.finished
