import json
import logging
import os
import pickle

import numpy as np
import pytest

from megatron_dllm.data.chat import ChatOptions, open_chat_source
from megatron_dllm.data.encoding import Job, RowEncoder
from megatron_dllm.data.formats import FORMATS
from megatron_dllm.data.report import Origin, SampleError, SkipReport
from megatron_dllm.data.source import ExampleSource
from megatron_dllm.data.token_file import TokenFileWriter
from megatron_dllm.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer

from .small_tokenizers import THINKING, save_tokenizer

TOKENIZER = ByteTokenizer()
TWO_TURNS = {"messages": [
    {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "more?"}, {"role": "assistant", "content": "no"}], "truncated": True, "id": 7}
BLANK = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]}
NO_ANSWER = {"messages": [{"role": "user", "content": "hi"}]}


def write(file, rows):
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(file)


def split(source, index):
    tokens, prompt = source.tokens(index), source.lengths[index, 0]
    return TOKENIZER.decode(tokens[:prompt]), TOKENIZER.decode(tokens[prompt:])


def test_open_chat_source_makes_an_example_of_each_turn(tmp_path):
    path = write(tmp_path / "chat.jsonl", [BLANK, TWO_TURNS])
    source = open_chat_source(path, TOKENIZER, ChatOptions())
    assert isinstance(source, ExampleSource)
    assert [split(source, i) for i in range(len(source))] == [
        ("<bos><user>hi<eos><assistant>", "yo<eos>"),
        ("<bos><user>hi<eos><assistant>yo<eos><user>more?<eos><assistant>", "no")]
    assert source.lengths.tolist() == [[6, 3], [17, 2]] and source.lengths.dtype == np.int32
    assert source.truncated.tolist() == [False, True]
    assert source.keys.tolist() == [[1, 0], [1, 1]] and source.keys.dtype == np.int64
    assert source.tokens(1).dtype == np.int32
    assert source.describe(1) == f"{path}:2 turn 2"
    assert source.notes == [f"{path}: read as OpenAI messages; columns not used: id"]
    with pytest.raises(IndexError):
        source.tokens(-1)


def test_open_chat_source_supervises_the_last_turn_only(tmp_path):
    path = write(tmp_path / "chat.jsonl", [TWO_TURNS])
    source = open_chat_source(path, TOKENIZER, ChatOptions(supervise_turns="last"))
    assert len(source) == 1 and source.describe(0).endswith("turn 2")


def test_open_chat_source_counts_and_names_what_it_skips(tmp_path, caplog):
    path = write(tmp_path / "chat.jsonl", ["{broken\n", TWO_TURNS, BLANK, NO_ANSWER, {"other": 1}, BLANK])
    source = open_chat_source(path, TOKENIZER, ChatOptions())
    assert source.skipped.counts == {"corrupt line": 1, "empty response": 2, "no assistant turn": 1, "missing column": 1}
    for reason, lines in {"corrupt line": [1], "empty response": [3, 6], "no assistant turn": [4], "missing column": [5]}.items():
        assert all(name.startswith(f"{path}:{line}") for name, line in zip(source.skipped.named[reason], lines, strict=True))
    caplog.clear()
    with caplog.at_level(logging.INFO):
        open_chat_source(path, TOKENIZER, ChatOptions())  # from the cache, and it says the same
    assert f"2 skipped, empty response: {path}:3 turn 1; {path}:6 turn 1" in caplog.text
    assert "read as OpenAI messages" in caplog.text


@pytest.mark.parametrize("cached", [False, True])
def test_open_chat_source_refuses_bad_samples_where_told_to(tmp_path, cached):
    path = write(tmp_path / "chat.jsonl", [TWO_TURNS, BLANK])
    if cached:
        open_chat_source(path, TOKENIZER, ChatOptions())
    with pytest.raises(ValueError, match="chat.jsonl:2.*--on-bad-sample skip"):
        open_chat_source(path, TOKENIZER, ChatOptions(refuse_bad_samples=True))
    write(tmp_path / "chat.jsonl", [TWO_TURNS])
    assert len(open_chat_source(path, TOKENIZER, ChatOptions(refuse_bad_samples=True))) == 2


def test_open_chat_source_reads_plain_text(tmp_path):
    path = write(tmp_path / "text.jsonl", [{"text": "abc"}, {"text": "cut", "truncated": True}, {"text": " "}])
    source = open_chat_source(path, TOKENIZER, ChatOptions())
    assert [split(source, i) for i in range(2)] == [("<bos>", "abc<eos>"), ("<bos>", "cut")]
    assert source.truncated.tolist() == [False, True] and source.skipped.counts == {"empty response": 1}


def test_open_chat_source_recognises_each_file_for_itself(tmp_path):
    write(tmp_path / "a.jsonl", [{"text": "abc"}])
    write(tmp_path / "b.jsonl", [{"note": "first row of no format"}, TWO_TURNS])
    write(tmp_path / "c.jsonl", [{"dialogue": TWO_TURNS["messages"]}])
    with pytest.raises(ValueError, match="c.jsonl: its columns dialogue are of no known format.*messages=dialogue"):
        open_chat_source(str(tmp_path), TOKENIZER, ChatOptions())
    for name in "ab":
        (tmp_path / f"{name}.jsonl").unlink()
    assert len(open_chat_source(str(tmp_path), TOKENIZER, ChatOptions(columns={"messages": "dialogue"}))) == 2


def test_open_chat_source_refuses_a_source_without_examples(tmp_path):
    with pytest.raises(ValueError, match="no example in it; 1 skipped, empty response"):
        open_chat_source(write(tmp_path / "chat.jsonl", [BLANK]), TOKENIZER, ChatOptions())
    with pytest.raises(ValueError, match="the files are empty"):
        open_chat_source(write(tmp_path / "empty.jsonl", []), TOKENIZER, ChatOptions())


def test_cache_is_used_again_and_made_anew_when_anything_changes(tmp_path):
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    path = write(data / "chat.jsonl", [TWO_TURNS])

    def folders(tokenizer=TOKENIZER, **options):
        open_chat_source(path, tokenizer, ChatOptions(cache=cache, **options))
        return sorted(folder.name for folder in cache.iterdir())

    first = folders()
    (cache / first[0] / "marker").touch()
    assert folders() == first and (cache / first[0] / "marker").exists()
    assert len(folders(supervise_turns="last")) == 2
    assert len(folders(columns={"system": "sys"})) == 3
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    assert len(folders(HuggingFaceTokenizer(tokenizer))) == 4
    assert len(folders(HuggingFaceTokenizer(tokenizer, chat_template=THINKING))) == 5
    write(data / "chat.jsonl", [TWO_TURNS, BLANK])
    assert len(folders()) == 6
    assert not (data / ".token_cache").exists()


def test_cache_lies_beside_the_data_and_is_not_read_as_data(tmp_path):
    write(tmp_path / "chat.jsonl", [TWO_TURNS])
    first = open_chat_source(str(tmp_path), TOKENIZER, ChatOptions())
    assert len(list((tmp_path / ".token_cache").iterdir())) == 1
    assert len(open_chat_source(str(tmp_path), TOKENIZER, ChatOptions())) == len(first)


def test_writer_leaves_nothing_behind_when_cut_short(tmp_path):
    with pytest.raises(KeyboardInterrupt), TokenFileWriter(tmp_path / "cache" / "file") as writer:
        writer.add([1], [2], key=(0, 0), origin=Origin("a", 1), truncated=False)
        raise KeyboardInterrupt
    assert list((tmp_path / "cache").iterdir()) == []


def test_writer_keeps_the_file_of_a_faster_process(tmp_path):
    with TokenFileWriter(tmp_path / "file") as slow, TokenFileWriter(tmp_path / "file") as fast:
        for writer in (slow, fast):
            writer.add([1], [2], key=(0, 0), origin=Origin("a", 1), truncated=False)
        fast.finish(SkipReport(), [])
        made = (tmp_path / "file" / "tokens.bin").stat().st_ino
        slow.finish(SkipReport(), [])
    assert (tmp_path / "file" / "tokens.bin").stat().st_ino == made
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_token_file_that_was_shortened_is_refused(tmp_path):
    path = write(tmp_path / "chat.jsonl", [TWO_TURNS])
    open_chat_source(path, TOKENIZER, ChatOptions())
    tokens = next((tmp_path / ".token_cache").glob("*/tokens.bin"))
    os.truncate(tokens, 12)
    with pytest.raises(ValueError, match="12 bytes where .* are needed; delete the folder"):
        open_chat_source(path, TOKENIZER, ChatOptions())


def test_cache_that_cannot_be_written_names_the_flag(tmp_path):
    path = write(tmp_path / "chat.jsonl", [TWO_TURNS])
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--data-cache-path"):
        open_chat_source(path, TOKENIZER, ChatOptions(cache=tmp_path / "file" / "cache"))


def test_several_processes_give_what_one_gives(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a" * (i % 7)}]} for i in range(150)]
    path = write(tmp_path / "chat.jsonl", [*rows, "{broken\n", TWO_TURNS])
    one, two = (open_chat_source(path, TOKENIZER, ChatOptions(cache=tmp_path / str(n), num_workers=n)) for n in (0, 2))
    assert one.skipped == two.skipped and one.skipped.counts == {"empty response": 22, "corrupt line": 1}
    assert one.notes == two.notes and len(one.notes) == 1
    assert np.array_equal(one.keys, two.keys) and np.array_equal(one.lengths, two.lengths) and len(one) == 130
    assert all(np.array_equal(one.tokens(i), two.tokens(i)) and one.describe(i) == two.describe(i) for i in range(len(one)))


def test_what_processes_send_each_other_survives_it(tmp_path):
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, THINKING))
    job = Job(0, Origin("a", 1), FORMATS[0], TWO_TURNS)
    here, there = (encoder.encode(pickle.loads(pickle.dumps(job))) for encoder in (
        RowEncoder(tokenizer, "all"), pickle.loads(pickle.dumps(RowEncoder(tokenizer, "all")))))
    assert len(here.examples) == 2 and here.notes == there.notes
    assert [e.response.tolist() for e in here.examples] == [e.response.tolist() for e in there.examples]
    error = pickle.loads(pickle.dumps(SampleError("reason", "detail")))
    assert (str(error), error.reason, error.detail) == ("reason (detail)", "reason", "detail")


def test_template_that_cannot_be_cut_stops_the_making(tmp_path):
    path = write(tmp_path / "chat.jsonl", [TWO_TURNS])
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path / "t", "{{ messages[-1].content }}"))
    with pytest.raises(ValueError, match="chat template"):
        open_chat_source(path, tokenizer, ChatOptions())
    assert list((tmp_path / ".token_cache").iterdir()) == []


def test_open_chat_source_needs_an_end_token(tmp_path):
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path / "t", eos=None))
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        open_chat_source(write(tmp_path / "chat.jsonl", [TWO_TURNS]), tokenizer, ChatOptions())
