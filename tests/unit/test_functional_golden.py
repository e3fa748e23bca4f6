"""Golden values: exact writing, and a comparator that finds every planted fault."""

import copy
import json
import math
import re
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import functional  # noqa: E402
from functional_tests.cases import FOLDER, Case, read_case, read_cases  # noqa: E402
from functional_tests.fingerprint import changed, code_digest, fingerprint, golden_name  # noqa: E402
from functional_tests.golden import Golden, compare, explain, take_steps  # noqa: E402
from functional_tests.launching import Launcher, RunFailed
from functional_tests.running import Outcome, run_several  # noqa: E402

METRICS = ("loss", "grad_norm", "num_zeros")
STEPS = {step: {"loss": 10 / 3 / step, "grad_norm": 0.1 * step, "num_zeros": step, "loss/t_0.00-0.25": 0.3} for step in range(1, 21)}
LOOSE = {"default": 1e-2, "num_zeros": 0.5}


def held(ours, *, golden=STEPS, num_steps=20, tolerances=None):
    return compare(ours, golden, metrics=METRICS, num_steps=num_steps, tolerances=tolerances)


def planted(step, metric, value):
    """The steps with one value changed; None: taken away."""
    steps = copy.deepcopy(STEPS)
    if value is None:
        del steps[step][metric]
    else:
        steps[step][metric] = value
    return steps


def test_golden_file_is_exact(tmp_path):
    steps = {1: {"loss": math.nextafter(1.0, 2.0), "tiny": 5e-324, "negative": -0.0, "num_zeros": 2**53 + 1}}
    Golden({"torch": "2"}, "by hand", steps).write(tmp_path / "golden.json")
    read = Golden.read(tmp_path / "golden.json")
    assert repr(read.steps) == repr(steps) and read.fingerprint == {"torch": "2"}
    assert "0x1.0000000000001p+0" in (tmp_path / "golden.json").read_text()


def test_equal_steps_match_exactly():
    assert held(copy.deepcopy(STEPS)) == []


@pytest.mark.parametrize("tolerances", [None, LOOSE], ids=["exact", "to a tolerance"])
@pytest.mark.parametrize(
    ("ours", "text"),
    [
        (planted(7, "loss", math.nan), "not finite"),
        (planted(7, "grad_norm", math.inf), "not finite"),
        (planted(7, "loss", None), "loss is missing in ours"),
        (planted(7, "loss/t_0.00-0.25", None), "loss/t_0.00-0.25 is missing in ours"),
        (planted(7, "extra", 1.0), "extra is missing in the golden file"),
        ({step: STEPS[step] for step in STEPS if step != 7}, "step 7 is missing in ours"),
        ({**STEPS, 21: STEPS[20]}, "ours has a step 21, beyond 20"),
        ({}, "step 1 is missing in ours"),
        (planted(20, "loss", STEPS[20]["loss"] * 1.02), "bit-equal|further apart"),
        (planted(1, "num_zeros", 2), "bit-equal|further apart"),
    ],
    ids=["nan", "inf", "metric", "optional metric", "extra metric", "step", "extra step", "no steps", "2 percent", "count"],
)
def test_planted_fault_is_found(ours, text, tolerances):
    wrong = held(ours, tolerances=tolerances)
    assert wrong and any(part in wrong[0].what for part in text.split("|")), wrong


def test_one_ulp_is_found_exactly_and_passes_a_tolerance():
    ours = planted(13, "loss", math.nextafter(STEPS[13]["loss"], 10))
    assert [difference.what for difference in held(ours)] == ["not bit-equal"]
    assert held(ours, tolerances=LOOSE) == []
    assert held(planted(13, "num_zeros", 13.0)), "an integer that became a float is another metric"


def test_what_is_compared_exactly_only_must_still_be_there_and_finite():
    loose = LOOSE | {"num_zeros": None}
    assert held(planted(1, "num_zeros", 1000), tolerances=loose) == [] and held(planted(1, "num_zeros", 1000), tolerances=LOOSE)
    assert held(planted(1, "num_zeros", None), tolerances=loose) and held(planted(1, "num_zeros", math.nan), tolerances=loose)


def unlearned(steps):
    """A run whose loss stays where it begins."""
    return {step: {**values, "loss": steps[1]["loss"]} for step, values in steps.items()}


def half_as_fast(steps):
    """A run whose loss falls half as fast."""
    at = [steps[min(20, max(1, step))]["loss"] for step in range(21)]
    return {step: {**values, "loss": (at[(step + 1) // 2] + at[step // 2 + 1]) / 2} for step, values in steps.items()}


@pytest.mark.parametrize(("fault", "least"), [(unlearned, 15), (half_as_fast, 4)])
def test_a_recipe_that_learns_otherwise_breaks_the_loose_comparison(fault, least):
    """Of 20 steps; each golden file with the limits that hold another environment to it."""
    for case in read_cases():
        for path in case.folder.glob("golden_*.json"):
            golden = Golden.read(path).steps
            wrong = compare(fault(golden), golden, metrics=case.metrics, num_steps=case.steps, tolerances=case.limits)
            assert len(wrong) >= least and {difference.metric for difference in wrong} == {"loss"}, f"{path}: {len(wrong)} of 20 steps"


def test_nan_in_the_golden_file_is_found_too():
    bad = planted(3, "loss", math.nan)
    assert held(bad, golden=bad)


def test_explain_prints_first_largest_and_both_series():
    ours = planted(5, "loss", 1.0)
    ours[9]["loss"] = 2.0
    text = explain(held(ours), ours, STEPS)
    assert "2 differences" in text and "The first: step 5: loss 1.0" in text and "The largest: step 9: loss 2.0" in text
    assert (1.0).hex() in text and STEPS[5]["loss"].hex() in text and text.count("<") == 2


def test_take_steps_keeps_what_is_named_and_its_noise_levels():
    records = [{"iteration": 1, "loss": 1.0, "loss/t_0.25-0.50": 2.0, "iteration_ms": 3.0}, {"iteration": 1, "eval/loss": 4.0}]
    assert take_steps(records, ("loss",)) == {1: {"loss": 1.0, "loss/t_0.25-0.50": 2.0}}


def test_fingerprint_names_what_differs():
    here = fingerprint("cpu", {"OMP_NUM_THREADS": "1"})
    assert here["threads"] == "1" and changed(here, here) == [] and golden_name(here, 2) == "golden_cpu_x2.json"
    assert golden_name({"device": "NVIDIA H200", "gpus": "one for all ranks"}, 4) == "golden_nvidia-h200_x4_shared.json"
    assert changed(here, {**here, "torch": "0.4"})[0].endswith("here, 0.4 there")
    assert changed(here, fingerprint("cpu", {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2"}))


def test_every_case_reads_and_has_a_whole_golden_file():
    for case in read_cases():
        goldens = [Golden.read(path) for path in case.folder.glob("golden_*.json")]
        # Those of GPUs are recorded where there are some.
        assert goldens or case.device == "cuda", f"{case.name}: python tools/functional.py record --only {case.name}"
        for golden in goldens:
            wrong = compare(golden.steps, golden.steps, metrics=case.metrics, num_steps=case.steps, tolerances=None)
            assert not wrong, f"{case.name}: {wrong[0]}"


@pytest.mark.parametrize(
    ("change", "text"),
    [("kind: often\n", "regular, resume"), ("speed: 3\n", "speed"), ("repeats: 1\n", "repeats nothing"),
     ("exact_only: [speed]\n", "exact_only speed: no such metric; write some of loss"), ("recipe: no.sh\n", "no recipe")],
)
def test_read_case_names_what_is_wrong(tmp_path, change, text):
    plain = "metrics: [loss]\ntolerances: {default: 1}\nverify: []\n"
    lines = plain + change + ("" if change.startswith("recipe") else "recipe: examples/diffusion_gemma/sft_26b.sh\n")
    (tmp_path / "config.yaml").write_text(lines)
    with pytest.raises(ValueError, match=text):
        read_case(tmp_path / "config.yaml")


def make_case(tmp_path, monkeypatch, *outcomes, **values):
    """A case whose runs log `outcomes`, one after the other, and whose layout holds."""
    monkeypatch.setattr(Case, "folder", tmp_path)
    runs = list(outcomes)

    def run_once(*_, **__):
        if not runs:
            raise RunFailed("no outcome")
        return Outcome(runs.pop(0), 1.0)

    monkeypatch.setattr(functional, "run_once", run_once)
    monkeypatch.setattr(functional, "verify", lambda case: "by a test")
    return Case(name="case", recipe="", metrics=METRICS, tolerances=LOOSE, verify=(), **values)


def record(case, goes_on=False):
    return functional.record_case(case, Launcher(), verified=True, goes_on=goes_on)


def test_record_refuses_repeats_that_differ(tmp_path, monkeypatch, capsys):
    ours = planted(2, "loss", math.nextafter(STEPS[2]["loss"], 0))
    assert not record(make_case(tmp_path, monkeypatch, STEPS, ours))
    assert "not recorded" in capsys.readouterr().out
    # What was run is kept, under a name and in a form that nothing takes for a golden file.
    (kept,) = tmp_path.iterdir()
    assert kept.name == "partial_cpu_x1.json" and sorted(json.loads(kept.read_text())["runs"]) == ["repeat 1", "repeat 2"]
    with pytest.raises(ValueError, match="no golden file"):
        Golden.read(kept)


def test_record_goes_on_where_it_was_cut_short(tmp_path, monkeypatch, capsys):
    # The third run fails, as at a time limit; two are kept.
    assert not functional.attempt(make_case(tmp_path, monkeypatch, STEPS, STEPS, kind="resume", repeats=3), record)
    assert record(make_case(tmp_path, monkeypatch, STEPS, STEPS, kind="resume", repeats=3), goes_on=True)
    assert capsys.readouterr().out.count("was done before") == 2 and [path.name for path in tmp_path.iterdir()] == ["golden_cpu_x1.json"]


@pytest.mark.parametrize(("change", "why"), [(("code", "other"), "code .* here, other there"), (("threads", "64"), "threads 1 here, 64")])
def test_record_goes_on_from_nothing_else(tmp_path, monkeypatch, capsys, change, why):
    ours = planted(12, "loss", math.nextafter(STEPS[12]["loss"], 0))
    assert not record(make_case(tmp_path, monkeypatch, STEPS, ours))
    (partial,) = tmp_path.iterdir()
    text = json.loads(partial.read_text())
    text["fingerprint"][change[0]] = change[1]
    partial.write_text(json.dumps(text))
    assert record(make_case(tmp_path, monkeypatch, STEPS, STEPS), goes_on=True)
    assert re.search(f"recorded from the start: partial_cpu_x1.json is of another environment: {why}", capsys.readouterr().out)


def test_runs_that_differ_do_so_when_gone_on_from(tmp_path, monkeypatch):
    ours = planted(12, "loss", math.nextafter(STEPS[12]["loss"], 0))
    assert not record(make_case(tmp_path, monkeypatch, STEPS, ours))
    assert not record(make_case(tmp_path, monkeypatch), goes_on=True)


def test_code_digest_is_of_names_and_texts(tmp_path):
    (tmp_path / "megatron_dllm" / "deep").mkdir(parents=True)
    file = tmp_path / "megatron_dllm" / "deep" / "a.py"
    file.write_text("1")
    first = code_digest(tmp_path)
    assert code_digest(tmp_path) == first
    file.write_text("2")
    second = code_digest(tmp_path)
    file.rename(file.with_name("b.py"))
    assert len({first, second, code_digest(tmp_path)}) == 3


def test_record_refuses_a_resumed_run_that_is_not_the_whole_one(tmp_path, monkeypatch):
    ours = planted(12, "loss", math.nextafter(STEPS[12]["loss"], 0))
    assert not record(make_case(tmp_path, monkeypatch, ours, STEPS, kind="resume"))
    assert record(make_case(tmp_path, monkeypatch, ours, STEPS, ours, kind="reshard"))
    assert [path.name for path in tmp_path.iterdir()] == ["golden_cpu_x1.json"]


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_runs_beside_each_other_record_the_same(tmp_path, monkeypatch, at_once):
    case = make_case(tmp_path, monkeypatch, STEPS, STEPS, STEPS, STEPS, kind="resume", repeats=3)
    running, most, run_once = [], [], functional.run_once

    def slow(*_, **__):
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()
        return run_once()

    monkeypatch.setattr(functional, "run_once", slow)
    assert functional.record_case(case, Launcher(), verified=True, at_once=at_once)
    assert max(most) == min(at_once, 4) and Golden.read(tmp_path / "golden_cpu_x1.json").steps == STEPS


def test_a_run_that_fails_ends_those_beside_it():
    ended = threading.Event()

    def fails():
        raise RunFailed("at once")

    def waits():
        assert ended.wait(10)
        return Outcome(STEPS, 1.0)

    def never():
        raise AssertionError("begun after the failure")

    with pytest.raises(RunFailed, match="at once"):
        list(run_several({"waits": waits, "fails": fails, "never": never}, 2, ended.set))
    assert ended.is_set()


def test_record_refuses_a_layout_that_does_not_hold(tmp_path, monkeypatch):
    case = make_case(tmp_path, monkeypatch, STEPS, STEPS)

    def fails(case):
        raise RunFailed("layout")

    monkeypatch.setattr(functional, "verify", fails)
    assert not functional.attempt(case, record)
    assert not list(tmp_path.glob("golden_*"))


def test_run_matches_exactly_here_and_to_a_tolerance_elsewhere(tmp_path, monkeypatch, capsys):
    near = planted(4, "loss", STEPS[4]["loss"] * 1.001)
    assert record(make_case(tmp_path, monkeypatch, STEPS, STEPS))
    assert functional.run_case(make_case(tmp_path, monkeypatch, STEPS, STEPS), 2, Launcher())
    assert "2 repeats equal" in capsys.readouterr().out
    assert not functional.run_case(make_case(tmp_path, monkeypatch, near), 1, Launcher())
    (golden,) = tmp_path.iterdir()
    golden.write_text(golden.read_text().replace('"threads": "1"', '"threads": "64"'))
    assert functional.run_case(make_case(tmp_path, monkeypatch, near), 1, Launcher())
    assert "threads 1 here, 64 there" in capsys.readouterr().out
    assert not functional.run_case(make_case(tmp_path, monkeypatch, planted(4, "loss", 7.0)), 1, Launcher())


def test_run_without_a_golden_file_fails(tmp_path, monkeypatch, capsys):
    assert not functional.run_case(make_case(tmp_path, monkeypatch), 1, Launcher())
    assert "record --only case" in capsys.readouterr().out


def test_diff(tmp_path, capsys):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, steps in zip(files, (STEPS, planted(3, "loss", 1.0)), strict=True):
        Golden({}, "", steps).write(file)
    assert functional.main(["diff", str(files[0]), str(files[0])]) == 0
    assert functional.main(["diff", *map(str, files)]) == 1
    assert "step 3" in capsys.readouterr().out


def test_folder_of_cases_is_that_of_the_tests():
    assert FOLDER == Path(__file__).parents[1] / "functional"
