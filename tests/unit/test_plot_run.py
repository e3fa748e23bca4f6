"""Pictures of runs: what is drawn, how runs are told apart, and runs that are empty, torn or without arguments."""
from __future__ import annotations

import math
import re

import numpy as np
import pytest
from matplotlib.image import imread

from megatron_dllm.config import parse, to_arguments_text
from megatron_dllm.training.logging import noise_level_name
from megatron_dllm.training.metrics_file import encode_record
from tools.plot_run import (
    Reference,
    Run,
    Style,
    draw,
    draw_experts,
    layer_maps,
    main,
    noise_terms,
    panel_names,
    read_flags,
    read_reference,
    run_labels,
    smoothed,
    title_of,
)

RECORDS = [
    {"iteration": 10, "consumed_samples": 80, "loss": 6.0, "encoder_loss": 2.5, "diffusion_loss": 3.5, "learning_rate": 0.1,
     "grad_norm": 1.0},
    {"iteration": 20, "consumed_samples": 160, "loss": math.nan, "encoder_loss": 2.0, "diffusion_loss": math.nan, "learning_rate": 0.2,
     "grad_norm": 2.0},
    {"iteration": 20, "eval/encoder_loss": 2.25, "eval/exact_match": 0.5, "eval/" + noise_level_name("diffusion_loss", 0.5, 1): 4.0,
     "eval/" + noise_level_name("diffusion_loss", 0, 0.5): 1.0},
    {"iteration": 30, "consumed_samples": 240, "loss": 5.0, "encoder_loss": 1.5, "diffusion_loss": 3.5, "learning_rate": 0.3,
     "grad_norm": 3.0},
]


def run(name: str = "a", records=RECORDS, flags: dict[str, str] | None = None) -> Run:
    return Run(name, tuple(records), flags)


def write_run(folder, records=RECORDS, *, arguments: list[str] | None = None, tail: str = ""):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(encode_record(record) + "\n" for record in records) + tail)
    if arguments is not None:
        (folder / "args.txt").write_text(to_arguments_text(parse(["--preset", "toy", *arguments])))
    return folder


def titles(figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


def panel(figure, title: str):
    (axes,) = [axes for axes in figure.axes if axes.get_title() == title]
    return axes


def test_read_flags_of_a_real_args_file(tmp_path):
    folder = write_run(tmp_path / "a", arguments=["--lr", "0.001", "--bf16", "--data-path", "my data.txt", "other.txt"])
    flags = read_flags(folder / "args.txt")
    assert (flags["--lr"], flags["--bf16"], flags["--data-path"]) == ("0.001", "on", "my data.txt other.txt")
    assert flags["--deterministic-mode"] == "off"
    assert flags["--hidden-size"] == "64"


def test_read_flags_of_odd_text(tmp_path):
    path = tmp_path / "args.txt"
    path.write_text("# a comment\nstray --x=-1 --y 1 2 --no-z --z2\n--x 3")
    assert read_flags(path) == {"--x": "3", "--y": "1 2", "--z": "off", "--z2": "on"}


BASE = {"--lr": "0.1", "--seed": "1", "--save": "somewhere"}
LABELS = {
    "one run": ([BASE], ["a"]),
    "one flag": ([BASE, BASE | {"--lr": "0.2", "--save": "elsewhere"}], ["lr 0.1", "lr 0.2"]),
    "two flags, one of them absent": ([BASE, {"--lr": "0.2"}], ["lr 0.1, seed 1", "lr 0.2, seed none"]),
    "no flag but places": ([BASE, BASE | {"--save": "elsewhere"}], ["a", "b"]),
    "two of three alike": ([BASE, BASE, BASE | {"--seed": "2"}], ["seed 1 (a)", "seed 1 (b)", "seed 2"]),
    "without args.txt": ([BASE, None], ["a", "b"]),
    "more flags than a label holds": (
        [{f"--f{i}": "x" for i in range(9)}, {f"--f{i}": "y" for i in range(9)}], ["f0 x, f1 x, f2 x, f3 x", "f0 y, f1 y, f2 y, f3 y"]),
}


@pytest.mark.parametrize("case", LABELS)
def test_run_labels(case):
    flags, labels = LABELS[case]
    assert run_labels([run(name, flags=of) for name, of in zip("abc", flags, strict=False)]) == labels


def test_run_labels_of_equal_names_are_distinct():
    assert run_labels([run("a"), run("a"), run("b")]) == ["a #1", "a #2", "b"]


def test_smoothed_by_hand():
    """Weights 1/2: 4, then (2*1 + 4*0.5) / 1.5, then past a gap (8*1 + 2*0.5 + 4*0.25) / 1.75."""
    values = np.array([4.0, 2.0, math.nan, 8.0])
    assert smoothed(values, 0.5).tolist()[:2] == [4.0, pytest.approx(8 / 3)]
    assert math.isnan(smoothed(values, 0.5)[2])
    assert smoothed(values, 0.5)[3] == pytest.approx(10 / 1.75)
    assert smoothed(values[:2], 0.0).tolist() == [4.0, 2.0]
    assert smoothed(np.full(50, 3.0), 0.9) == pytest.approx(np.full(50, 3.0))
    assert len(smoothed(np.array([]), 0.9)) == 0


def test_panel_names():
    assert panel_names([run()]) == ["loss", "encoder_loss", "diffusion_loss", "exact_match", "learning_rate", "grad_norm"]
    assert panel_names([run(records=[{"iteration": 1, "eval/encoder_loss": 1.0}])]) == ["encoder_loss"]


def test_noise_terms_prefer_evaluation():
    trained, evaluated = noise_level_name("diffusion_loss", 0, 1), "eval/" + noise_level_name("diffusion_loss", 0, 1)
    records = [{"iteration": 1, trained: 1.0}, {"iteration": 1, evaluated: 1.0}]
    assert noise_terms([run(records=records[:1])]) == {"diffusion_loss": [(0.0, 1.0, trained)]}
    assert noise_terms([run(records=records)]) == {"eval/diffusion_loss": [(0.0, 1.0, evaluated)]}


def test_title_of():
    assert [title_of(name) for name in ("encoder_loss", "learning_rate", "eval/diffusion_loss")] == [
        "Encoder loss", "Learning rate", "Diffusion loss, evaluation"]


def test_draw_one_run():
    figure = draw([run()], ["loss", "encoder_loss", "exact_match"], Style())
    assert titles(figure) == ["Loss (weighted sum)", "Encoder loss", "Exact match", "Diffusion loss, evaluation by noise level t"]
    trained, evaluated, *_ = panel(figure, "Encoder loss").lines
    assert np.column_stack(trained.get_data()).tolist() == [[10, 2.5], [20, 2.0], [30, 1.5]]
    assert np.column_stack(evaluated.get_data()).tolist() == [[20, 2.25]]
    assert np.column_stack(panel(figure, "Exact match").lines[1].get_data()).tolist() == [[20, 0.5]]
    # The lower noise level comes first, whatever the order in the file.
    levels = panel(figure, "Diffusion loss, evaluation by noise level t").lines
    assert [(line.get_label(), line.get_ydata().tolist()) for line in levels] == [("t 0 to 0.5", [1.0]), ("t 0.5 to 1", [4.0])]


def test_draw_marks_values_that_are_not_finite():
    figure = draw([run()], ["loss", "encoder_loss"], Style())
    crosses = [line for line in panel(figure, "Loss (weighted sum)").lines if line.get_marker() == "x"]
    assert [(line.get_xdata().tolist(), line.get_label()) for line in crosses] == [([20.0], "1 not finite")]
    assert not [line for line in panel(figure, "Encoder loss").lines if line.get_marker() == "x"]


def test_draw_several_runs():
    other = run("b", [dict(record, iteration=record["iteration"] * 2) for record in RECORDS], {"--lr": "2"})
    earlier = {"iteration": 5, "eval/" + noise_level_name("diffusion_loss", 0, 0.5): 9.0}
    figure = draw([run(records=[earlier, *RECORDS], flags={"--lr": "1"}), other], ["encoder_loss", "learning_rate"], Style())
    lines = [line for line in panel(figure, "Encoder loss").lines if line.get_linestyle() == "-" and len(line.get_xdata())]
    assert [line.get_xdata().tolist() for line in lines] == [[10, 20, 30], [20, 40, 60]]
    assert lines[0].get_color() != lines[1].get_color()
    levels = panel(figure, "Diffusion loss, evaluation by noise level t, newest").lines
    assert [np.column_stack(line.get_data()).tolist() for line in levels] == [[[0.25, 1.0], [0.75, 4.0]]] * 2
    texts = [text.get_text() for axes in figure.axes if axes.get_legend() for text in axes.get_legend().get_texts()]
    texts += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert texts[-2:] == ["lr 1", "lr 2"]


def test_draw_more_runs_than_named_colours():
    figure = draw([run(str(i)) for i in range(9)], ["learning_rate"], Style())
    assert len({tuple(np.ravel(line.get_color())) for line in panel(figure, "Learning rate").lines if len(line.get_xdata()) == 3}) == 9


@pytest.mark.parametrize("smooth", [0.0, 0.5])
def test_draw_smooths_all_but_the_schedule(smooth):
    figure = draw([run()], ["encoder_loss", "learning_rate"], Style(smooth=smooth))
    full = [line.get_ydata().tolist() for line in panel(figure, "Encoder loss").lines if len(line.get_xdata()) == 3]
    assert full[0] == [2.5, 2.0, 1.5]
    assert [len(full), full[-1][0]] == [2 if smooth else 1, 2.5]
    assert [line.get_ydata().tolist() for line in panel(figure, "Learning rate").lines if len(line.get_xdata())] == [[0.1, 0.2, 0.3]]


# References -> the panels that show a line.
REFERENCES = {
    "every term": ([Reference(None, "entropy", 3.0)], ["Encoder loss", "Diffusion loss"]),
    "one metric": ([Reference("grad_norm", "clip", 1.0)], ["Gradient norm"]),
    "the sum by name": ([Reference("loss", "entropy", 3.0)], ["Loss (weighted sum)"]),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_draw_references(case):
    references, shown = REFERENCES[case]
    figure = draw([run()], panel_names([run()]), Style(references=tuple(references)))
    with_line = {
        axes.get_title() for axes in figure.axes for line in axes.lines
        if list(line.get_ydata()) == [references[0].value] * 2 and references[0].label in line.get_label()}
    assert with_line == set(shown)


def test_draw_reference_of_a_run_with_a_single_loss():
    figure = draw([run(records=[{"iteration": 1, "loss": 2.0}])], ["loss"], Style(references=(Reference(None, "entropy", 3.0),)))
    assert [line.get_label() for line in figure.axes[0].lines][-1] == "entropy (3)"


def test_read_reference():
    assert read_reference("byte unigram entropy=3.12", ["loss"]) == Reference(None, "byte unigram entropy", 3.12)
    assert read_reference("loss:a=b=-1e3", ["loss"]) == Reference("loss", "a=b", -1000.0)
    assert read_reference("paper: table 2=1", ["loss"]) == Reference(None, "paper: table 2", 1.0)
    for wrong in ("3.12", "=3", "label=x"):
        with pytest.raises(ValueError, match='give it as "label=value"'):
            read_reference(wrong, ["loss"])


def test_draw_log_axes():
    figure = draw([run()], ["encoder_loss"], Style(log_x=True, log_y=True))
    axes = panel(figure, "Encoder loss")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    # A curve without one positive value stays linear.
    flat = run(records=[{"iteration": 1, "grad_norm": 0.0}, {"iteration": 2, "grad_norm": math.nan}])
    assert panel(draw([flat], ["grad_norm"], Style(log_y=True)), "Gradient norm").get_yscale() == "linear"


def test_main_writes_a_picture_into_the_run(tmp_path, capsys):
    folder = write_run(tmp_path / "a b", arguments=[])
    assert main([str(folder), "--smooth", "0.9", "--log-x", "--reference", "entropy=3", "--title", "A title"]) == 0
    assert capsys.readouterr().out == f"wrote {folder}/curves.png\n"
    picture = imread(folder / "curves.png")
    assert min(picture.shape[:2]) > 300 and picture.std() > 0.05


@pytest.mark.slow
def test_main_of_several_runs_writes_here(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_run(tmp_path / name, arguments=["--lr", "0.1" if name == "a" else "0.2"])
    assert main(["a", "b/metrics.jsonl", "--metrics", "grad_norm"]) == 0
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert main(["a", "b", "--output", "new/c.png", "--metrics", "learning_rate"]) == 0
    assert (tmp_path / "new/c.png").exists()
    assert capsys.readouterr().err == ""


def test_main_leaves_out_what_is_missing_and_says_so(tmp_path, capsys, monkeypatch):
    """One whole run, one whose last line a crash cut short and that has no args.txt, one with an empty metrics file."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "whole", arguments=[])
    write_run(tmp_path / "torn", tail='{"iteration": 40, "lo')
    write_run(tmp_path / "empty", [], arguments=[])
    assert main(["whole", "torn", "empty", "--metrics", "learning_rate"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "torn/metrics.jsonl: the last line is cut short and left out",
        "empty: no records yet, left out",
        "torn: no args.txt, so the runs are labelled by their names"]


# Arguments that are wrong -> words of the message.
WRONG = {
    "no such run": (["nowhere"], "nowhere: no metrics.jsonl there; give the directory of a run"),
    "empty": (["empty"], "none of the runs has a record yet"),
    "corrupt": (["corrupt"], "metrics.jsonl:2: no metrics record"),
    "no curve": (["bare"], "choose with --metrics from memory_resident_bytes"),
    "unknown metric": (
        ["whole", "--metrics", "learning_rate", "loss2"], "--metrics loss2: no run has it; the metrics are consumed_samples, loss,"),
    "smooth": (["whole", "--smooth", "1"], "--smooth 1.0: .* try 0.9"),
    "reference": (["whole", "--reference", "3"], "--reference '3'"),
    "no folder to write to": (["whole", "--output", "whole/args.txt/c.png"], "args.txt"),
}


@pytest.mark.parametrize("case", WRONG)
def test_main_refuses(tmp_path, capsys, monkeypatch, case):
    arguments, message = WRONG[case]
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "whole", arguments=[])
    write_run(tmp_path / "empty", [])
    write_run(tmp_path / "bare", [{"iteration": 1, "memory_resident_bytes": 5}])
    write_run(tmp_path / "corrupt", tail="{\n" + encode_record({"iteration": 50}) + "\n")
    (tmp_path / "corrupt/metrics.jsonl").write_text('{"iteration": 1}\n{\n{"iteration": 50}\n')
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(message, printed.err)
    assert not list(tmp_path.rglob("*.png"))


ROUTED = [
    {"iteration": 10, "loss": 6.0, "routing/layers.0/clean/entropy": 2.0, "routing/layers.0/clean/max_over_mean_load": 1.5,
     "routing/layers.1/clean/entropy": 1.0, "routing/layers.1/draft/entropy": 0.5},
    {"iteration": 15, "eval/encoder_loss": 2.0},
    {"iteration": 20, "loss": 5.0, "routing/layers.0/clean/entropy": 1.5, "routing/layers.0/clean/max_over_mean_load": 3.0,
     "routing/layers.1/clean/entropy": 0.75},
]


def test_layer_maps():
    """Layers downwards, the iterations at which routers were logged to the right."""
    maps = layer_maps(run(records=ROUTED))
    assert maps.keys() == {("entropy", "clean"), ("max_over_mean_load", "clean"), ("entropy", "draft")}
    entropy, draft = maps["entropy", "clean"], maps["entropy", "draft"]
    assert (entropy.layers, entropy.iterations) == (("layers.0", "layers.1"), (10, 20))
    assert entropy.values.tolist() == [[2.0, 1.5], [1.0, 0.75]]
    assert draft.values[1, 0] == 0.5 and np.isnan(draft.values).sum() == 3


def test_draw_experts():
    figure = draw_experts(run(records=ROUTED))
    shown = [title.removeprefix("Router ") for title in titles(figure)]
    assert shown == ["entropy (nats), clean", "entropy (nats), draft", "Busiest expert's load over the mean, clean"]
    clean, draft = (panel(figure, f"Router entropy (nats), {stream}").collections[0] for stream in ("clean", "draft"))
    assert clean.get_array().tolist() == [[2.0, 1.5], [1.0, 0.75]]
    # One scale of colours for both.
    assert clean.get_clim() == draft.get_clim() == (0.0, 2.0)
    assert panel(figure, shown[2]).collections[0].get_clim() == (1.0, 3.0)
    assert [text.get_text() for text in panel(figure, shown[2]).get_yticklabels()] == ["0", "1"]


@pytest.mark.slow
def test_main_draws_experts_of_one_run(tmp_path, capsys):
    routed, plain = write_run(tmp_path / "routed", ROUTED), write_run(tmp_path / "plain")
    assert main([str(routed), "--experts"]) == 0
    assert imread(routed / "experts.png").std() > 0.05
    for arguments, message in (
        ([plain], "plain: no metric of a router"), ([routed, plain], "one run, and there are 2"),
        ([routed, "--log-y"], "leave out --smooth, --log-x, --log-y"),
    ):  # fmt: skip
        assert main([*map(str, arguments), "--experts"]) == 2
        assert message in capsys.readouterr().err
