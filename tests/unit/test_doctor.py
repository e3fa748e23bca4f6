"""tools/doctor.py: a wrong implementation, a raising one and a broken part are told and end it with 1; paths stay out of the Markdown."""
import functools
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from megatron_dllm.moe import experts
from megatron_dllm.transformer import mlp
from tools import doctor
from tools.checkup import installed, whole, worlds
from tools.checkup.choices import dispatcher_rows, refusal
from tools.checkup.layers import trials
from tools.checkup.report import ABSENT, FAILED, MISSING, NOTE, OK, Row, Section, as_markdown, as_text, verdict_line
from tools.checkup.trials import Trial, compared, numbers, trials_section
from tools.checkup.worlds import merged

CPU = torch.device("cpu")


@pytest.fixture
def alone(monkeypatch):
    """The doctor without what starts processes."""
    monkeypatch.setattr(installed, "_import_problem", lambda module: None if find_spec(module.partition(".")[0]) else "not here")
    monkeypatch.setattr(worlds, "trials", lambda device: iter(()))


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--device", "cpu", *words])
    status = doctor.main()
    return status, capsys.readouterr().out


def verdicts(text, part):
    return [line.split()[0] for line in text.splitlines() if f"  {part}  " in line]


def test_a_sound_machine_gives_0(alone, monkeypatch, capsys, tmp_path):
    status, text = run(monkeypatch, capsys, "--markdown", str(tmp_path / "table.md"))
    assert status == 0, text
    assert FAILED not in text and "AdamW, 3 steps" in text and "--cuda-graph-impl local" in text
    written = (tmp_path / "table.md").read_text()
    assert written.startswith("# tools/doctor.py on CPU\n") and "| experts | loop, float32 |" in written


def test_a_wrong_implementation_gives_1(alone, monkeypatch, capsys):
    right = experts.looped_linear
    wrong = functools.wraps(right)(lambda rows, weight, counts: right(rows, weight, counts.flip(0)))
    monkeypatch.setattr(experts, "looped_linear", wrong)
    status, text = run(monkeypatch, capsys)
    assert status == 1
    assert verdicts(text, "experts")[:2] == [FAILED, OK], "the loop fails, the grouped product stays right"
    # The toy's oracle, in float64, goes by the loop; in fp32 it goes by the grouped product.
    named = "are wrong: experts (loop, float32), toy model, loss (fp32 on cpu), toy model, gradients (fp32 on cpu)"
    assert text.splitlines()[-1].endswith(named)


def test_a_part_that_raises_gives_1(alone, monkeypatch, capsys):
    def broken(device):
        raise KeyError("planted")
    monkeypatch.setattr(installed, "machine_section", broken)
    status, text = run(monkeypatch, capsys)
    assert status == 1 and "KeyError: 'planted'" in text and "== What flags take" in text, "the others are told all the same"


def test_missing_requirements_end_it_with_their_commands(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "missing", lambda lines: ["torch>=2.11.0a0", "einops>=0.8", "pyyaml>=6 (found 5)"])
    status, text = run(monkeypatch, capsys)
    assert status == 1 and "python -m pip install 'torch>=2.11.0a0'" in text and "einops" in text and "pyyaml" not in text


def test_a_requirement_outside_its_range_is_missing(monkeypatch):
    monkeypatch.setattr(installed, "missing", lambda lines: [line for line in lines if line.startswith("numpy")])
    monkeypatch.setattr(installed, "_import_problem", lambda module: None)
    rows = {row.cells[0]: row for row in installed.packages_section(CPU).rows}
    assert rows["numpy"].verdict == MISSING and rows["numpy"].cells[-1] == "python -m pip install 'numpy>=1.26'"
    assert rows["torch"].verdict == OK


@pytest.mark.parametrize("problem, found, device, verdict", [
    (None, "3.6.0", "cpu", OK), ("No module named 'triton'", "", "cpu", ABSENT), ("No module named 'triton'", "", "cuda", MISSING),
    ("ImportError: undefined symbol", "3.6.0", "cpu", FAILED)])  # fmt: skip
def test_a_package_is_needed_by_what_uses_it(monkeypatch, problem, found, device, verdict):
    monkeypatch.setattr(installed, "_version", lambda names: found)
    row = installed._optional_row(installed.OPTIONAL[0], problem, "", torch.device(device))
    assert row.verdict == verdict and (row.cells[-1] == "") == (problem is None)


def test_trials_tell_errors_and_go_on():
    def raising():
        raise RuntimeError("first\nsecond")
    x = numbers(3, device=CPU, dtype=torch.float32)
    rows = trials_section("", [
        Trial("a", "raises", raising), Trial("b", "off", lambda: compared(lambda x: x * 1.001, lambda x: x, [x])),
        Trial("c", "no number", lambda: compared(lambda x: x / 0 * 0, lambda x: x, [x])),
        Trial("d", "wrong gradient", lambda: compared(lambda x: x + x.detach(), lambda x: 2 * x, [x])),
        Trial("e", "right", lambda: compared(lambda x: x + x, lambda x: 2 * x, [x])), Trial("f", "", raising, "no device"),
        Trial("g", "", raising, "not installed", optional=True)], CPU).rows  # fmt: skip
    assert [row.verdict for row in rows] == [FAILED] * 4 + [OK, NOTE, ABSENT]
    assert rows[0].cells[-1] == "RuntimeError: first" and rows[2].cells[2] == "inf"


def test_reports_count_faults_and_keep_paths_out_of_the_markdown():
    rows = (Row(OK, ("a", "found")), Row(FAILED, ("b", "cannot open /home/someone/lib/part.so, see --flag a|b")), Row(NOTE, ("c", "")))
    section = Section("Title", ("what", "found"), rows)
    assert as_text([section]).splitlines()[:2] == ["== Title", "        what  found"]
    assert "| FAILED | b | cannot open part.so, see --flag a\\|b |" in as_markdown("", [section], "")
    assert verdict_line([section]) == "1 of 2 that are needed or could be tried are wrong: b"


def test_the_worst_of_the_ranks_counts():
    assert merged([{"a": (0.1, 1.0), "b": (0.0, 1.0)}, {"a": (0.2, 1.0), "b": "RuntimeError: x"}]) == {"a": (0.2, 1.0),
                                                                                                      "b": "RuntimeError: x"}
    assert merged([{"b": "said"}, {"b": (0.0, 1.0)}]) == {"b": "said"}


def test_refusals_are_those_of_the_flags_alone():
    assert refusal(CPU, ["--bf16"]) is None
    assert "compute in bf16" in refusal(CPU, ["--gdn-kernel-backend", "fla"], ["--layer-types", "linear*5,full"])
    from megatron_dllm.config import PRESETS
    by_name = {row.cells[1].split()[1]: row.verdict for row in dispatcher_rows(PRESETS["toy"], CPU)}
    assert by_name == {"allgather": "taken", "alltoall": "taken", "deepep": "refused", "hybridep": "refused"}


def test_every_kernel_is_named_without_cuda():
    tried = list(trials(CPU))
    assert all(("Triton" in trial.implementation or trial.optional) == (trial.absent is not None) for trial in tried)


@pytest.mark.parametrize("factor, verdict", [(1.0, OK), (1.001, FAILED)])
def test_the_whole_model_is_held_to_float64(monkeypatch, factor, verdict):
    right = mlp.gated_gelu
    monkeypatch.setattr(mlp, "gated_gelu", lambda x: right(x) * (factor if x.dtype == torch.float32 else 1))
    assert [trial.row().verdict for trial in whole.trials(CPU)] == [verdict, verdict]


def test_gpus_are_told_with_how_they_reach_each_other(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=150 * 2**30, multi_processor_count=132)
    fakes = {"is_available": lambda: True, "device_count": lambda: 2, "get_device_properties": lambda number: properties,
             "can_device_access_peer": lambda a, b: a < b}  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch._C._distributed_c10d, "_detect_dma_connectivity", lambda *of: SimpleNamespace(matrix=[[0, 18], [18, 0]]))
    cells = dict(row.cells for row in installed.machine_section(torch.device("cuda")).rows)
    assert cells["GPU 1"] == "NVIDIA H200, sm_90, 150 GiB, 132 processors" and cells["NCCL"] == "2.28.9"
    assert cells["peer access"] == "not between 1-0" and cells["NVLink"] == "18 to 18 links a pair, as torch counts them"


def test_a_lost_device_is_tried_no_further(monkeypatch):
    def lost():
        raise RuntimeError("an illegal memory access was encountered")
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    never = Trial("b", "kernel", lambda: pytest.fail("tried all the same"))
    rows = trials_section("", [Trial("a", "kernel", lost), never, Trial("c", "", never.measure, "absent")], torch.device("cuda")).rows
    assert [row.cells[-1] for row in rows] == ["RuntimeError: an illegal memory access was encountered",
                                               "not tried: the device is lost since a, kernel", "absent"]
