"""Where a run's model comes from."""

import json
from dataclasses import replace

import pytest

from megatron_dllm.config import PRESETS, check_against_checkpoint, parse, to_arguments_text, to_flags
from megatron_dllm.config.model_source import checkpoint_folder

TOY = PRESETS["toy"]


def model_words() -> list[str]:
    """Flags that say the toy whole, and nothing else."""
    words = to_flags(parse(["--preset", "toy"]))
    return words[: words.index("--objective")]


@pytest.fixture
def checkpoint(tmp_path):
    """A run's folder with a checkpoint of step 20 whose model has 3 layers."""
    folder = tmp_path / "run"
    (folder / "iter_0000020").mkdir(parents=True)
    run = parse(["--preset", "toy", "--num-layers", "3", "--load", str(folder), "--train-iters", "20"])
    (folder / "iter_0000020" / "args.txt").write_text(to_arguments_text(run))
    (folder / "iter_0000020" / "complete.json").write_text("{}")
    (folder / "iter_0000030").mkdir()  # cut short
    return folder


@pytest.fixture
def exported(tmp_path):
    """A folder in the transformers format whose model has a window of 33."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(replace(TOY, window_size=33).to_transformers()))
    return folder


class TestPreset:
    def test_is_taken_as_it_is(self):
        run = parse(["--preset", "toy"])
        assert (run.model, run.model_origin, run.overrides) == (TOY, "--preset toy", ())

    def test_flags_override_it_and_each_is_reported(self):
        run = parse(["--preset", "toy", "--window-size", "9", "--hidden-size", "64", "--eos-token-id", "1", "7"])
        assert run.model == replace(TOY, window_size=9, eos_token_id=(1, 7))
        assert run.overrides == ("--window-size 9 replaces 32 of --preset toy", "--eos-token-id 1 7 replaces 1 of --preset toy")

    @pytest.mark.parametrize("num_layers", [1, 5, 6, 9, 12])
    def test_layer_types_go_along_with_the_number_of_layers(self, num_layers):
        run = parse(["--preset", "toy", "--num-layers", str(num_layers)])
        assert len(run.model.layer_types) == num_layers
        assert run.model.layer_types[-1] == "full"
        assert [layer for layer in range(num_layers - 1) if run.model.is_full(layer)] == [n for n in (5,) if n < num_layers - 1]
        assert len(run.overrides) == (0 if num_layers == 6 else 2)

    def test_a_pattern_is_repeated_over_its_layers_and_left_as_given(self):
        assert parse(["--preset", "toy", "--layer-types", "sliding,full"]).model.layer_types == ("sliding", "full") * 3
        assert parse(["--preset", "toy", "--layer-types", "full,sliding"]).model.layer_types[-1] == "sliding"
        assert len(parse(["--preset", "toy", "--layer-types", "full*7"]).model.layer_types) == 7


class TestModelConfig:
    @pytest.mark.parametrize("name", ["", "config.json"])
    def test_is_a_folder_or_the_file(self, exported, name):
        run = parse(["--model-config", str(exported / name), "--num-experts", "5"])
        assert run.model == replace(TOY, window_size=33, num_experts=5)
        assert run.overrides == (f"--num-experts 5 replaces 8 of --model-config {exported / name}",)

    @pytest.mark.parametrize(
        ("content", "message"), [(None, "no transformers configuration at"), ("{", "is not valid JSON"), ("[]", "holds a list")]
    )
    def test_a_bad_file_is_named(self, tmp_path, content, message):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message) as raised:
            parse(["--model-config", str(tmp_path)])
        assert str(tmp_path / "config.json") in str(raised.value)

    def test_comes_from_one_source_only(self, exported):
        with pytest.raises(ValueError, match="--preset toy and --model-config .* one of them"):
            parse(["--preset", "toy", "--model-config", str(exported)])


class TestFlagsAlone:
    def test_describe_a_whole_model(self):
        run = parse(model_words())
        assert (run.model, run.model_origin, run.overrides) == (TOY, "flags", ())

    def test_default_layer_types(self):
        words = model_words()
        at = words.index("--layer-types")
        assert parse(words[:at] + words[at + 2 :] + ["--num-layers", "8"]).model.layer_types == ("sliding",) * 5 + (
            "full",
            "sliding",
            "full",
        )

    def test_missing_ones_are_listed(self):
        with pytest.raises(ValueError, match="--kv-channels, --num-experts missing.*--preset"):
            words = model_words()
            for name in ("--kv-channels", "--num-experts"):
                at = words.index(name)
                words = words[:at] + words[at + 2 :]
            parse(words)

    def test_no_model_is_an_error_that_lists_the_sources(self):
        with pytest.raises(ValueError, match="no model is given; .*--preset .diffusiongemma-26b-a4b, toy.*--model-config PATH.*--load DIR"):
            parse(["--train-iters", "3"])


class TestCheckpoint:
    def test_folder_is_the_newest_complete_one_or_one_that_is_named(self, checkpoint, tmp_path):
        (checkpoint / "iter_0000003").mkdir()
        (checkpoint / "iter_0000003" / "complete.json").touch()
        assert checkpoint_folder(str(checkpoint)) == checkpoint / "iter_0000020"
        assert checkpoint_folder(str(checkpoint / "iter_0000020")) == checkpoint / "iter_0000020"
        assert checkpoint_folder(str(tmp_path)) is None
        assert checkpoint_folder(str(tmp_path / "nowhere")) is None

    @pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint"])
    @pytest.mark.parametrize("name", ["", "iter_0000020"])
    def test_gives_the_model(self, checkpoint, flag, name):
        run = parse([flag, str(checkpoint / name)])
        assert run.model.layer_types == ("sliding", "sliding", "full")
        assert run.model_origin == f"checkpoint {checkpoint / name}"

    def test_may_be_repeated_by_flags(self, checkpoint):
        words = ["--load", str(checkpoint), "--num-layers", "3", "--layer-types", "sliding*2,full", "--vocab-size", "512"]
        assert parse(words).model.num_layers == 3
        assert parse([*words, "--preset", "toy"]).model.num_layers == 3

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--vocab-size", "511"], "--vocab-size 511: checkpoint {} has 512; leave the flag out"),
            (["--layer-types", "full"], "--layer-types full: checkpoint {} has sliding*2,full"),
            (["--preset", "toy"], "--num-layers 6: checkpoint {} has 3"),
        ],
        ids=lambda value: value[0] if isinstance(value, list) else "",
    )
    def test_may_not_be_contradicted(self, checkpoint, words, message):
        with pytest.raises(ValueError) as raised:
            parse(["--load", str(checkpoint), *words])
        assert message.format(checkpoint) in str(raised.value)

    def test_load_comes_before_pretrained_weights(self, checkpoint, exported):
        assert parse(["--load", str(checkpoint), "--pretrained-checkpoint", str(exported)]).model.num_layers == 3

    def test_pretrained_weights_in_the_transformers_format_bring_their_model(self, exported, tmp_path):
        run = parse(["--pretrained-checkpoint", str(exported), "--load", str(tmp_path), "--canvas-length", "8"])
        assert run.model == replace(TOY, window_size=33, canvas_length=8)
        assert run.overrides == (f"--canvas-length 8 replaces 16 of --pretrained-checkpoint {exported}",)

    def test_an_empty_folder_gives_no_model_and_does_not_stop_a_preset(self, tmp_path):
        assert parse(["--load", str(tmp_path), "--preset", "toy"]).model == TOY
        with pytest.raises(ValueError, match="holds no checkpoint"):
            parse(["--load", str(tmp_path)])

    def test_without_its_arguments_is_named(self, checkpoint):
        (checkpoint / "iter_0000020" / "args.txt").unlink()
        with pytest.raises(ValueError, match="has no .*iter_0000020/args.txt"):
            parse(["--load", str(checkpoint)])

    def test_arguments_of_another_kind_are_passed_over(self, checkpoint):
        file = checkpoint / "iter_0000020" / "args.txt"
        file.write_text(file.read_text() + "--a-flag-that-is-gone 3\n")
        assert parse(["--load", str(checkpoint)]).model.num_layers == 3


def test_check_against_checkpoint_lists_every_contradiction():
    run = parse(["--preset", "toy", "--load", "there"])
    stored = replace(TOY, num_experts=4, norm_epsilon=1e-5)
    problems = check_against_checkpoint(run, stored)
    assert [str(problem) for problem in problems] == [
        "--num-experts 8: checkpoint there has 4; leave the flag out, or start from another checkpoint.",
        "--norm-epsilon 1e-06: checkpoint there has 1e-05; leave the flag out, or start from another checkpoint.",
    ]
    for problem in problems:
        run = run.with_values(**problem.fix)
    assert check_against_checkpoint(run, stored) == []
