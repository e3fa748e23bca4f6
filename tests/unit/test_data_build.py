import dataclasses
import json
import logging

import numpy as np
import pytest

from megatron_dllm.config import DataConfig, ModelConfig
from megatron_dllm.config.presets import PRESETS
from megatron_dllm.data.build import build_order, build_sources, build_tokenizer
from megatron_dllm.data.fitting import fit_report, fitted_lengths, num_cut
from megatron_dllm.data.indexed import IndexedWriter
from megatron_dllm.data.source import ExampleSource
from megatron_dllm.data.tokenizers import ByteTokenizer
from megatron_dllm.data.views import BlendedSource, SourceRange, split_source
from megatron_dllm.diffusion.batch_plan import fit_example

from .small_tokenizers import save_tokenizer

TOKENIZER = ByteTokenizer()


def model(**changes) -> ModelConfig:
    return dataclasses.replace(PRESETS["toy"], **{"eos_token_id": (1,), **changes})


class Numbers:
    """A source of `samples` conversations with the given numbers of turns; example i holds the token i."""

    def __init__(self, name, turns, lengths=None):
        self.name = name
        self.keys = np.array([(sample, turn) for sample, count in enumerate(turns) for turn in range(count)])
        self.lengths = np.tile(np.array([[0, 1]], np.int32), (len(self.keys), 1)) if lengths is None else np.array(lengths, np.int32)
        self.truncated = self.keys[:, 1] == 1

    def __len__(self):
        return len(self.keys)

    def tokens(self, index):
        return np.array([index], np.int32)

    def describe(self, index):
        return f"{self.name}:{index}"


def write_chats(file, count, turns=1):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * turns
    file.write_text("".join(json.dumps({"messages": chat, "id": i}) + "\n" for i in range(count)))
    return str(file)


def test_fitted_lengths_is_the_rule_of_the_batch_plan():
    lengths = np.array([(p, r) for p in range(0, 26, 1) for r in range(0, 30)])
    for seq_length, canvas in ((24, 4), (23, 5), (16, 16)):
        fits = [fit_example(int(p), int(r), seq_length=seq_length, canvas_length=canvas) for p, r in lengths]
        assert fitted_lengths(lengths, seq_length=seq_length, canvas_length=canvas).tolist() == [fit.total if fit else 0 for fit in fits]
        source = Numbers("n", [1] * len(lengths), lengths)
        cut = sum(fit is not None and fit.response < r for fit, (_, r) in zip(fits, lengths, strict=True))
        assert num_cut(source, seq_length=seq_length, canvas_length=canvas) == cut


def test_fit_report_names_prompts_without_room():
    source = Numbers("n", [1, 1, 1], [(2, 3), (14, 3), (13, 9)])
    report = fit_report(source, seq_length=16, canvas_length=4)
    assert report.counts == {"prompt without room for one canvas": 2}
    assert report.named["prompt without room for one canvas"][0].startswith("n:1: 14 tokens")
    with pytest.raises(ValueError, match="n:1"):
        fit_report(source, seq_length=16, canvas_length=4, refuse=True)


def test_split_source_keeps_conversations_whole():
    source = Numbers("n", [3, 1, 4, 2, 5])
    parts = split_source(source, (0.5, 0.25, 0.25))
    assert [(part.start, part.stop) for part in parts] == [(0, 8), (8, 15), (15, 15)]
    assert [split_source(source, (1.0, 0, 0))[i].stop for i in range(3)] == [15, 15, 15]
    samples = [set(part.keys[:, 0].tolist()) for part in split_source(source, (0.34, 0.33, 0.33))]
    assert not samples[0] & samples[1] and not samples[1] & samples[2] and set.union(*samples) == set(range(5))


def test_source_range_and_blended_source_are_sources():
    first, second = SourceRange(Numbers("a", [2, 2, 2]), 2, 6, "a"), Numbers("b", [1, 2])
    blend = BlendedSource([first, second], [1, 2.5])
    assert isinstance(first, ExampleSource) and isinstance(blend, ExampleSource)
    assert blend.name == "1 a + 2.5 b" and len(blend) == 7
    assert [int(blend.tokens(i)[0]) for i in range(7)] == [2, 3, 4, 5, 0, 1, 2]
    assert [blend.describe(i) for i in (0, 3, 4)] == ["a:2", "a:5", "b:0"]
    assert blend.truncated.tolist() == [False, True, False, True, False, False, True]
    assert len(set(map(tuple, blend.keys.tolist()))) == 7  # draws of two sources differ
    for index in (-1, 7):
        with pytest.raises(IndexError):
            blend.tokens(index)
    with pytest.raises(IndexError):
        first.tokens(4)


def test_build_sources_splits_a_chat_file(tmp_path):
    data = DataConfig(data_path=(write_chats(tmp_path / "c.jsonl", 100, turns=2),), split="90,8,2")
    sources = build_sources(data, model(), TOKENIZER, seed=0)
    assert [len(source) for source in sources] == [180, 16, 4]


def test_build_sources_warns_of_an_empty_share(tmp_path, caplog):
    data = DataConfig(data_path=(write_chats(tmp_path / "c.jsonl", 3),))
    with caplog.at_level(logging.WARNING):
        sources = build_sources(data, model(), TOKENIZER, seed=0)
    assert len(sources.train) == 3 and sources.valid is None and sources.test is None
    assert "no example is left for valid" in caplog.text
    with pytest.raises(ValueError, match="leaves none to train on"):
        build_sources(DataConfig(data_path=data.data_path, split="1,999,0"), model(), TOKENIZER, seed=0)


def test_build_sources_blends_by_weight_and_finds_indexed_files(tmp_path):
    with IndexedWriter(tmp_path / "code", dtype=np.uint16) as writer:
        for _ in range(40):
            writer.add_document(TOKENIZER.encode("x = 1"))
    chat = write_chats(tmp_path / "c.jsonl", 60)
    data = DataConfig(data_path=("1", chat, "3", str(tmp_path / "code")), split="50,50,0", seq_length=64)
    sources = build_sources(data, model(), TOKENIZER, seed=0)
    assert len(sources.train) == 30 + 20 and sources.test is None
    order = build_order(sources.train, data, canvas_length=16, all_canvases=False, seed=0)
    first = [order.row(n).indices[0] for n in range(80)]
    assert sum(index < 30 for index in first) == 20
    assert order.rows_before(2) == 2 * 50  # an epoch of a blend has as many rows as an epoch of each part
    assert TOKENIZER.decode(sources.train.tokens(next(i for i in first if i >= 30))) == "<bos>x = 1"


def test_build_sources_makes_sudoku(tmp_path):
    data = DataConfig(data_source="sudoku", sudoku_num_puzzles=20, data_cache_path=str(tmp_path))
    tokenizer = build_tokenizer(data)
    sources = build_sources(data, model(), tokenizer, seed=0)
    assert tokenizer.name == "sudoku4" and len(sources.train) == 20 and len(sources.valid) == len(sources.test) == 500


def test_build_sources_says_what_is_missing_or_does_not_fit(tmp_path):
    chat = write_chats(tmp_path / "c.jsonl", 3)
    for data, problem in ((DataConfig(), "set --data-path"), (DataConfig(data_source="sudoku", data_path=(chat,)), "drop --data-path")):
        with pytest.raises(ValueError, match=problem):
            build_sources(data, model(), TOKENIZER, seed=0)
    with pytest.raises(ValueError, match="ids up to 263, the model's vocabulary has 200 rows"):
        build_sources(DataConfig(data_path=(chat,)), model(vocab_size=200), TOKENIZER, seed=0)


def test_build_sources_hands_on_the_flags_of_chat_rows(tmp_path):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * 2
    (tmp_path / "c.jsonl").write_text(json.dumps({"dialogue": chat}) + "\n{broken\n")
    data = DataConfig(data_path=(str(tmp_path / "c.jsonl"),), data_columns=("messages=dialogue",), supervise_turns="last",
                      data_cache_path=str(tmp_path / "cache"))
    assert len(build_sources(data, model(), TOKENIZER, seed=0).train) == 1 and (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="c.jsonl:2.*--on-bad-sample skip"):
        build_sources(dataclasses.replace(data, on_bad_sample="error"), model(), TOKENIZER, seed=0)


def test_build_tokenizer_counts_the_models_ends(tmp_path):
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=save_tokenizer(tmp_path))
    assert build_tokenizer(data, (1, 4)).eos_ids == (4, 1)


@pytest.mark.parametrize(("packing", "all_canvases", "rows"), [(False, False, 3), (True, False, 2), (True, True, 3)])
def test_build_order_packs_and_leaves_out(caplog, packing, all_canvases, rows):
    source = Numbers("n", [1] * 4, [(0, 8), (0, 7), (15, 2), (1, 40)])
    data = DataConfig(seq_length=16, packing=packing, max_canvases_per_row=3)
    with caplog.at_level(logging.WARNING):
        order = build_order(source, data, canvas_length=4, all_canvases=all_canvases, seed=0, shuffle=False)
    assert order.rows_before(1) == rows
    assert sorted(i for n in range(rows) for i in order.row(n).indices) == [0, 1, 3]
    assert "1 skipped, prompt without room for one canvas: n:2" in caplog.text and "1 of 4 responses are cut" in caplog.text


def test_build_order_refuses_under_on_bad_sample_error_and_when_nothing_fits():
    source = Numbers("n", [1, 1], [(2, 5), (15, 2)])
    with pytest.raises(ValueError, match="n:1.*--on-bad-sample skip"):
        build_order(source, DataConfig(seq_length=16, on_bad_sample="error"), canvas_length=4, all_canvases=False, seed=0)
    with pytest.raises(ValueError, match="n: no example is left.*raise --seq-length"):
        build_order(source, DataConfig(seq_length=4), canvas_length=4, all_canvases=False, seed=0)
