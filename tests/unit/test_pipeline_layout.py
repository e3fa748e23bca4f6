"""Stage layouts: reading, writing, deriving, and where they are refused."""

import re

import pytest

from megatron_dllm.pipeline.layout import LayoutError, derive_layout, letters_in, parse_layout

LAYOUTS = {  # text: (ranks, layers, MTP depth, letters of each stage, canonical text)
    "EttL": (1, "tt", 0, ["EttL"], "EttL"),
    "Ett|tttL": (2, "ttttt", 0, ["Ett", "tttL"], "Ett|tttL"),
    "Ett|tttL|": (2, "ttttt", 0, ["Ett", "tttL"], "Ett|tttL"),
    "E | (tt|)*3, L": (5, "t" * 6, 0, ["E", "tt", "tt", "tt", "L"], "E|(tt|)*3L"),
    "Ettt|tt||tL": (2, "t" * 6, 0, ["Ettt", "tt", "", "tL"], "Ettt|tt||tL"),
    "Et*6|(|)*4L": (2, "t" * 6, 0, ["Etttttt", "", "", "", "", "L"], "Et*6|||||L"),
    "Egggt|gggtmmL": (2, "gggtgggt", 2, ["Egggt", "gggtmmL"], "Egggt|gggtmmL"),
    "E(t|(g|)*2)*2tL": (7, "tggtggt", 0, ["Et", "g", "g", "t", "g", "g", "tL"], "Et|g|g|t|g|g|tL"),
}

WRONG = {  # text: (column of the caret, words of the message); the model is tttt on 2 ranks, with 1 MTP block where the text has an m
    "Etg|ttL": (2, "layer 1 is an attention block in the model's configuration, not a gated-delta block; write t"),
    "Etx|ttL": (2, "'x' has no meaning here"),
    "|Ett|ttL": (0, "the first stage has no embedding"),
    "tttt|L": (0, "t stands where the embedding (E) is due"),
    "EEtttt|L": (1, "E stands where layer 0 (t) is due"),
    "Ettt|t": (6, "the layout ends before the loss (L)"),
    "Ettt": (4, "the layout ends before layer 3 (t)"),
    "Ettt|tL|L": (7, "the loss is not on the last stage"),
    "Ettt|tL||": (7, "the loss is not on the last stage"),
    "Etttt|LL": (7, "L comes after the loss"),
    "Ettt|ttL": (6, "the model has 4 layers, and this is one more"),
    "E(t*2|)*3L": (2, "the model has 4 layers, and this is one more"),  # the letter that is repeated
    "E(tt|tt": (1, "this ( is not closed"),
    "Ett)|ttL": (3, "this ) closes no ("),
    "E*0tttt|L": (2, "0 repetitions"),
    "E(*2)tttt|L": (2, "this * has nothing to repeat"),
    "Ett*2*2|L": (5, "this * has nothing to repeat"),
    "Et*99999999|L": (3, "more than 100000 letters"),
    "Et|t|ttL": (8, "3 virtual stages do not divide over 2 pipeline ranks"),
    "": (0, "the layout ends before the embedding (E)"),
    "Ettm|ttL": (3, "m stands where layer 2 (t) is due"),
    "Ettttm|L": (5, "multi-token prediction reads the last layer and needs the head; put m on the last stage"),
    "Ett|ttmmL": (7, "the model has 1 MTP blocks, and this is one more"),
}


@pytest.mark.parametrize("text", LAYOUTS)
def test_parse_layout(text):
    ranks, layers, depth, stages, _ = LAYOUTS[text]
    layout = parse_layout(text, ranks=ranks, layers=layers, mtp_depth=depth)
    assert [stage.letters for stage in layout.stages] == stages
    assert [number for stage in layout.stages for number in stage.layers] == list(range(len(layers)))
    assert [len(stage.layers) for stage in layout.stages] == [len(re.findall("[tg]", letters)) for letters in stages]
    assert letters_in(text) == "".join(stages)


@pytest.mark.parametrize("text", LAYOUTS)
def test_layout_prints_as_a_text_that_reads_back(text):
    ranks, layers, depth, _, canonical = LAYOUTS[text]
    layout = parse_layout(text, ranks=ranks, layers=layers, mtp_depth=depth)
    assert str(layout) == canonical
    assert parse_layout(canonical, ranks=ranks, layers=layers, mtp_depth=depth) == layout


@pytest.mark.parametrize("text", WRONG)
def test_parse_layout_marks_the_position_of_a_mistake(text):
    column, words = WRONG[text]
    with pytest.raises(LayoutError) as refusal:
        parse_layout(text, ranks=2, layers="tttt", mtp_depth=int("m" in text))
    message, shown, caret = str(refusal.value).rsplit("\n", 2)
    assert words in message
    assert message.startswith("--pipeline-model-parallel-layout: ")
    assert shown == "    " + text
    assert caret == "    " + " " * column + "^"


def test_stage_layout_places_stage_i_on_rank_i_mod_ranks():
    layout = parse_layout("Et|t|tt||t|tL", ranks=2, layers="t" * 6)
    assert layout.chunks == 3
    assert [stage.letters for stage in layout.on_rank(0)] == ["Et", "tt", "t"]
    assert [stage.letters for stage in layout.on_rank(1)] == ["t", "", "tL"]
    assert layout.stage(1, 1).layers == ()
    assert layout.stage(0, 2).layers == (4,)
    assert layout.stage(1, 2).has_loss and not layout.stage(0, 2).has_loss
    assert layout.stage(0, 0).has_embedding and not layout.stage(0, 1).has_embedding


@pytest.mark.parametrize(
    "arguments, text",
    [
        (dict(layers="t" * 6, ranks=1), "Et*6L"),
        (dict(layers="t" * 6, ranks=2), "Ettt|tttL"),
        (dict(layers="tggtgt", ranks=3), "Etg|gt|gtL"),
        (dict(layers="t" * 8, ranks=2, layers_per_virtual_stage=2), "Ett|tt|tt|ttL"),
        (dict(layers="t" * 30, ranks=4, layers_per_virtual_stage=2, account_for_embedding=True, account_for_loss=True), "Et|(tt|)*14tL"),
        (dict(layers="t" * 7, ranks=2, account_for_loss=True), "Et*4|tttL"),
        (dict(layers="t" * 7, ranks=2, account_for_embedding=True), "Ettt|t*4L"),
        (dict(layers="tt", ranks=4, account_for_embedding=True, account_for_loss=True, mtp_depth=2), "E|t|t|mmL"),
    ],
)
def test_derive_layout(arguments, text):
    layout = derive_layout(**arguments)
    assert str(layout) == text
    assert parse_layout(text, ranks=arguments["ranks"], layers=arguments["layers"], mtp_depth=arguments.get("mtp_depth", 0)) == layout


@pytest.mark.parametrize("size", [None, 4, 0, -1, 99])
def test_derive_layout_refuses_with_sizes_that_work(size):
    with pytest.raises(ValueError, match="30 layers do not divide over 4 pipeline ranks") as refusal:
        derive_layout(layers="t" * 30, ranks=4, layers_per_virtual_stage=size)
    message = str(refusal.value)
    assert "neither" not in message  # that is what was tried
    remedy = re.search(r"use (.*) with stages of one of \[([\d, ]+)\]", message)
    counted = dict(account_for_embedding="for-embedding" in remedy[1], account_for_loss="for-loss" in remedy[1])
    for fitting in map(int, remedy[2].split(",")):
        layout = derive_layout(layers="t" * 30, ranks=4, layers_per_virtual_stage=fitting, **counted)
        assert sum(len(stage.layers) for stage in layout.stages) == 30


def test_derive_layout_says_which_stage_sizes_divide():
    with pytest.raises(ValueError, match=re.escape("set --num-layers-per-virtual-pipeline-stage to one of [1, 3, 5, 15], or")):
        derive_layout(layers="t" * 30, ranks=2, layers_per_virtual_stage=4)
