"""Command line -> configuration -> command line."""

import random
import re
import typing
from dataclasses import dataclass

import pytest

from megatron_dllm.config import PRESETS, RunConfig, differences, parse, parse_or_exit, to_arguments_text, to_flags
from megatron_dllm.config.arguments_file import split_arguments
from megatron_dllm.config.flags import build_parser, flag, flags_of
from megatron_dllm.config.run import FLAGS, GROUPS
from megatron_dllm.config.unknown_flags import NOT_HERE, RENAMED, suggest

AWKWARD = ["", "a b", "it's", 'say "x"', "#x", "a#b", "-x", "--lr", "@x", "a=b", "\\", "ü", "x\ny", "$HOME", "*.json", "-1", "none"]


def random_value(name: str, annotation: typing.Any, rng: random.Random) -> typing.Any:
    """Some value that the field's annotation allows, the awkward ones often."""
    parts = typing.get_args(annotation)
    if type(None) in parts:
        return rng.choice([None, random_value(name, parts[0], rng)])
    if name == "layer_types":
        return tuple(rng.choice(["sliding", "full", "linear"]) for _ in range(rng.randint(1, 12)))
    if name == "extension":  # they are imported
        return tuple(rng.sample(["json", "math", "importlib.util"], rng.randint(0, 3)))
    if typing.get_origin(annotation) is tuple:
        values = [random_value(name, parts[0], rng) for _ in range(rng.randint(0, 3))]
        return tuple("./" + v if isinstance(v, str) and v.startswith(("-", "@")) else v for v in values)
    if typing.get_origin(annotation) is typing.Literal:
        return rng.choice(parts)
    return {
        bool: lambda: rng.random() < 0.5,
        int: lambda: rng.choice([0, 1, -1, rng.randint(-(10**12), 10**12)]),
        float: lambda: rng.choice([0.0, -2.5, 1e-300, 0.1 + 0.2, rng.uniform(-1e6, 1e6), rng.random() * 1e-9]),
        str: lambda: rng.choice(AWKWARD),
    }[annotation]()


def random_run(rng: random.Random) -> RunConfig:
    groups = {}
    for group, config_class in GROUPS.items():
        if group != "source":
            annotations = typing.get_type_hints(config_class)
            values = {item.field: random_value(item.field, annotations[item.field], rng) for item in flags_of(config_class)}
            groups[group] = config_class(**(values | {"num_layers": len(values["layer_types"])} if group == "model" else values))
    return RunConfig(**groups)


@pytest.mark.parametrize("seed", range(60))
def test_parse_inverts_to_flags(seed, tmp_path):
    run = random_run(random.Random(seed))
    assert parse(to_flags(run)) == run
    text = to_arguments_text(run)
    assert split_arguments(text, "args.txt") == to_flags(run)
    (tmp_path / "args.txt").write_text(text, encoding="utf-8")
    assert parse([f"@{tmp_path}/args.txt"]) == run


def test_to_flags_gives_every_flag_that_has_a_value():
    words = to_flags(parse(["--preset", "toy"]))
    given = {word for word in words if word.startswith("--")}
    for group, item in FLAGS.values():
        has_none = item.default is None
        assert has_none or group == "source" or item.name in given or f"--no-{item.name[2:]}" in given, item.name


@pytest.mark.parametrize("word", ["-x", "@x"])
def test_to_flags_refuses_a_word_in_a_list_that_would_be_read_otherwise(word):
    with pytest.raises(ValueError, match=f"write it as ./{word}"):
        to_flags(parse(["--preset", "toy"]).with_values(data_path=("a", word)))


def test_to_arguments_text_has_one_flag_a_line_and_says_where_the_model_came_from():
    lines = to_arguments_text(parse(["--preset", "toy", "--hidden-size", "128"])).splitlines()
    assert "--hidden-size 128" in lines
    assert "# from --preset toy" in lines
    assert "# --hidden-size 128 replaces 64 of --preset toy" in lines
    assert all(line.startswith(("--", "# ")) or not line for line in lines)


class TestParse:
    def test_takes_the_last_of_a_repeated_flag(self):
        run = parse(["--preset", "toy", "--bf16", "--lr", "1", "--data-path", "a", "b", "--no-bf16", "--lr", "2", "--data-path", "c"])
        assert (run.training.bf16, run.optimizer.lr, run.data.data_path) == (False, 2.0, ("c",))

    @pytest.mark.parametrize(
        ("words", "messages"),
        [
            (["--micro_batch_size", "4"], ["unknown flag --micro_batch_size; did you mean --micro-batch-size?"]),
            (["--trian-iters=4", "--lrr", "1"], ["--trian-iters; did you mean --train-iters?", "--lrr; did you mean --lr?"]),
            (["--learning-rate", "1"], ["did you mean --lr?"]),
            (["--recompute_activations"], ["did you mean --recompute-granularity?"]),
            (["--overlap_grad_reduce"], ["leave it out: sums of gradients always overlap with the backward"]),
            (["--xyzzy"], ["unknown flag --xyzzy; --help lists all flags"]),
            (["--micro-batch", "4"], ["did you mean --micro-batch-size?"]),
            (["--lr", "fast"], ["--lr", "'fast' is not a number"]),
            (["--train-iters", "1.5"], ["--train-iters", "'1.5' is not a whole number"]),
            (["--lr-decay-style", "cubic"], ["--lr-decay-style", "'cubic'", "'WSD'"]),
            (["--recompute-modules", "mlp", "attn"], ["--recompute-modules", "'attn'"]),
            (["--sudoku-size", "5"], ["--sudoku-size", "4, 9"]),
            (["--layer-types", "sliding*5,fall"], ["--layer-types", "'fall'", "sliding*5"]),
            (["--lr"], ["--lr", "expected one argument"]),
            (["--bf16", "true"], ["true", "--no-name"]),
        ],
        ids=lambda value: value[0] if value[0].startswith("--") else "",
    )
    def test_refuses(self, words, messages):
        with pytest.raises(ValueError) as raised:
            parse(["--preset", "toy", *words])
        for message in messages:
            assert message in str(raised.value)

    def test_or_exit_prints_the_error_and_ends_with_status_2(self, capsys):
        with pytest.raises(SystemExit) as raised:
            parse_or_exit(["--preset", "toy", "--lrr", "1"])
        assert raised.value.code == 2
        assert capsys.readouterr().err == "error: unknown flag --lrr; did you mean --lr?\n"

    def test_help_is_in_groups_with_defaults_and_choices(self, capsys):
        with pytest.raises(SystemExit) as raised:
            parse(["--help"])
        text = capsys.readouterr().out
        assert raised.value.code == 0
        assert text.index("Model source") < text.index("\nObjective:") < text.index("\nGeneration:")
        assert "--diffusion-loss {ce,reweighted,loo,reweighted-loo}" in text
        assert "--bf16, --no-bf16" in text
        assert "(default: 0.0001)" in text
        for _, item in FLAGS.values():
            assert item.name in text
        assert max(map(len, text.splitlines())) <= 120
        assert re.search(r"twice:\n +auto: .+\n +shared: .+\n +apart: .+\n +joint: .+\n +The loss is the same", text)  # a line a value


class TestArgumentFiles:
    def test_takes_comments_quotes_and_other_files_beside_the_file(self, tmp_path):
        (tmp_path / "deeper").mkdir()
        (tmp_path / "deeper" / "outer.txt").write_text(
            "# the model; don't stop at this quote\n--preset toy  # small\n\n@inner.txt\n--wandb-exp-name 'two words'\n--save run#3\n"
        )
        (tmp_path / "deeper" / "inner.txt").write_text("--lr\n0.5\n--data-path 'a b' \"c # d\"")
        run = parse([f"@{tmp_path}/deeper/outer.txt", "--lr", "0.25"])
        assert (run.logging.wandb_exp_name, run.checkpoint.save) == ("two words", "run#3")
        assert (run.optimizer.lr, run.data.data_path) == (0.25, ("a b", "c # d"))

    def test_names_the_line_of_an_open_quote(self, tmp_path):
        (tmp_path / "args.txt").write_text("--preset toy\n--save 'here\n")
        with pytest.raises(ValueError, match="args.txt, line 2: a quote that begins here is not closed"):
            parse([f"@{tmp_path}/args.txt"])

    def test_refuses_a_missing_file_and_a_circle(self, tmp_path):
        with pytest.raises(ValueError, match="no file nowhere.txt.*--flag=@value"):
            parse(["@nowhere.txt"])
        (tmp_path / "a.txt").write_text("@b.txt")
        (tmp_path / "b.txt").write_text("@a.txt")
        with pytest.raises(ValueError, match="includes itself"):
            parse([f"@{tmp_path}/a.txt"])

    def test_a_value_with_an_at_sign_is_given_with_an_equals_sign(self):
        assert parse(["--preset", "toy", "--wandb-exp-name=@me"]).logging.wandb_exp_name == "@me"


def test_suggest_knows_only_flags_that_exist():
    known = [item.name for _, item in FLAGS.values()]
    for older, newer in RENAMED.items():
        assert older not in known
        assert newer in known
        assert suggest("--" + older[2:].replace("-", "_"), known) == newer


def test_flags_that_need_no_other_are_none_of_ours_and_name_only_ours():
    known = {item.name for _, item in FLAGS.values()}
    assert not NOT_HERE.keys() & (known | RENAMED.keys())
    assert not {name for why in NOT_HERE.values() for name in re.findall(r"--[a-z0-9-]+", why)} - known


def test_differences_names_the_flags_and_all_values():
    run = parse(["--preset", "toy"])
    runs = [run, run.with_values(lr=0.5), run.with_values(packing=True)]
    assert differences(runs) == {"--lr": (1e-4, 0.5, 1e-4), "--packing": (False, False, True)}
    assert differences([run, run]) == {}


class TestFlag:
    def test_default_on_boolean_has_its_no_form(self):
        @dataclass(frozen=True)
        class Config:
            """Some"""

            swap: bool = flag("Swaps.", True)

        (item,) = flags_of(Config)
        parser = build_parser([Config], description="")
        assert vars(parser.parse_args(["--no-swap"])) == {"swap": False}
        assert vars(parser.parse_args([])) == {}
        assert item.to_command_line(False) == ["--no-swap"]

    def test_refuses_a_field_whose_none_could_not_be_said(self):
        @dataclass(frozen=True)
        class Config:
            """Some"""

            count: int | None = flag("Counts.", 3)

        with pytest.raises(AssertionError, match="must default to None"):
            list(flags_of(Config))


def test_presets_are_the_choices_of_the_flag():
    assert FLAGS["preset"][1].choices == tuple(PRESETS)
