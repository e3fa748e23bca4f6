"""Tables that extensions add to: names, and the flags that know them."""

import pytest

from megatron_dllm import extending
from megatron_dllm.config import parse
from megatron_dllm.config.extensions import DATA_SOURCES, LAYER_TYPES, NOISE_SCHEDULES, OBJECTIVES, import_extensions


@pytest.fixture(autouse=True)
def empty_tables():
    for table in (DATA_SOURCES, LAYER_TYPES, NOISE_SCHEDULES, OBJECTIVES):
        table.rows.clear()
    yield
    for table in (DATA_SOURCES, LAYER_TYPES, NOISE_SCHEDULES, OBJECTIVES):
        table.rows.clear()


def test_a_flag_knows_what_was_added_before():
    words = ["--preset", "toy", "--train-iters", "1", "--data-source", "sudoku", "--noise-schedule", "steep"]
    with pytest.raises(ValueError, match="steep"):
        parse(words)
    extending.add_noise_schedule("steep", lambda u: u * u)
    assert parse(words).objective.noise_schedule == "steep"


def test_layers_count_as_what_they_are_like():
    with pytest.raises(ValueError, match="'other' is none of sliding, full, linear"):
        parse(["--preset", "toy", "--layer-types", "sliding,other"])
    extending.add_layer_type("other", object, like="full")
    model = parse(["--preset", "toy", "--num-layers", "2", "--layer-types", "sliding,other"]).model
    assert model.layer_types == ("sliding", "other") and model.layer_kinds == ("sliding", "full") and model.is_full(1)


@pytest.mark.parametrize(("name", "text"), [("ar", "taken"), ("Ours", "lower-case"), ("a b", "lower-case"), ("", "lower-case")])
def test_a_name_must_be_free_and_spellable(name, text):
    with pytest.raises(ValueError, match=text):
        extending.add_objective(name, lambda example, canvas, objective: None)


def test_a_name_is_added_once():
    extending.add_objective("mine", lambda example, canvas, objective: None)
    with pytest.raises(ValueError, match="mine is taken; --objective has block-diffusion, ar, mine"):
        extending.add_objective("mine", lambda example, canvas, objective: None)


def test_import_names_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "one_of_two.py").write_text("import not_there_either\n")
    for words, text in ((["--extension", "not_there"], "--extension not_there: No module named 'not_there'.*PYTHONPATH"),
                        (["--extension=one_of_two"], "No module named 'not_there_either'"),
                        (["--extension", "json", "a/b.py", "--lr", "1"], "a/b.py: this is no module's name")):
        with pytest.raises(ValueError, match=text):
            import_extensions(words)
    import_extensions(["--extension", "json", "math", "--lr", "1", "--extension"])
