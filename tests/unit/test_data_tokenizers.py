import json

import pytest

from megatron_dllm.data.report import SampleError
from megatron_dllm.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, check_tokenizer, open_tokenizer, tokenizer_problems

from .small_tokenizers import PLAIN, TAGGED, TURN_END, save_tokenizer

CHAT = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "yo"}]


@pytest.mark.parametrize("text", ["", "abc", "naïve — 日本 🙂", "<eos><bos>", "a\n\tb\x00"])
def test_byte_tokenizer_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not any(tokenizer.is_special(token) for token in ids)
    assert all(token < tokenizer.vocab_size for token in ids)


def test_byte_tokenizer_decode_shows_or_skips_specials_and_broken_bytes():
    tokenizer = ByteTokenizer()
    ids = [2, *tokenizer.encode("é")[:1], 1, 8 + ord("x")]
    assert tokenizer.decode(ids) == "<bos>\ufffd<eos>x"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\ufffdx"
    with pytest.raises(ValueError, match="264"):
        tokenizer.decode([264])


def test_byte_tokenizer_template_marks_the_answer_and_its_end():
    tokenizer = ByteTokenizer()
    chat = tokenizer.apply_chat_template([{"role": "system", "content": "s"}, *CHAT], add_generation_prompt=True)
    assert tokenizer.decode(chat.ids) == "<bos><system>s<eos><user>hé<eos><assistant>yo<eos><assistant>"
    assert tokenizer.decode([t for t, inside in zip(chat.ids, chat.assistant_mask, strict=True) if inside]) == "yo<eos>"


def test_byte_tokenizer_template_takes_tools_and_calls_and_refuses_other_roles():
    tokenizer = ByteTokenizer()
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    ids = tokenizer.apply_chat_template([CHAT[0], call], [{"name": "f"}]).ids
    assert tokenizer.decode(ids).startswith('<bos><system>[{"name": "f"}]<eos><user>')
    assert tokenizer.decode(ids).endswith('<assistant>[{"function": {"arguments": {}, "name": "f"}}]<eos>')
    with pytest.raises(SampleError, match="narrator"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "x"}])


def test_hugging_face_tokenizer_reads_a_folder(tmp_path):
    folder = save_tokenizer(tmp_path / "t", TAGGED, eos="<eos>")
    (tmp_path / "t" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, TURN_END]}))
    tokenizer = HuggingFaceTokenizer(folder, extra_eos_ids=(1, 6))
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_ids) == (2, 0, (1, TURN_END, 6))
    assert tokenizer.vocab_size == 7 + 256
    assert tokenizer.decode(tokenizer.encode("naïve — 日本")) == "naïve — 日本"
    assert tokenizer.is_special(TURN_END) and not tokenizer.is_special(7)
    chat = tokenizer.apply_chat_template(CHAT)
    assert tokenizer.decode([t for t, inside in zip(chat.ids, chat.assistant_mask, strict=True) if inside]) == "yo<turn|>"
    assert tokenizer.decode(chat.ids, skip_special_tokens=True) == "user\nhé\nassistant\nyo\n"


def test_hugging_face_tokenizer_without_tags_has_no_mask_and_prompts_on_request(tmp_path):
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, PLAIN))
    chat = tokenizer.apply_chat_template(CHAT[:1], [{"name": "f"}], add_generation_prompt=True)
    assert chat.assistant_mask is None
    assert tokenizer.decode(chat.ids) == '<bos><|turn>tools\n[{"name": "f"}]<turn|>\n<|turn>user\nhé<turn|>\n<|turn>assistant\n'


def test_hugging_face_tokenizer_refuses_by_name(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        HuggingFaceTokenizer(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="no tokenizer that transformers can read"):
        HuggingFaceTokenizer(str(tmp_path))
    bare = HuggingFaceTokenizer(save_tokenizer(tmp_path / "bare", None))
    with pytest.raises(ValueError, match="--chat-template FILE"):
        bare.apply_chat_template(CHAT)
    strict = HuggingFaceTokenizer(str(tmp_path / "bare"), chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(SampleError, match="roles must alternate"):
        strict.apply_chat_template(CHAT)


def test_hugging_face_tokenizer_never_runs_the_code_of_a_folder(tmp_path):
    folder = save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(ValueError, match="without running"):
        HuggingFaceTokenizer(folder)
    assert not (tmp_path / "ran").exists()


def test_fingerprint_follows_files_template_and_ends(tmp_path):
    folder = save_tokenizer(tmp_path)
    first = HuggingFaceTokenizer(folder).fingerprint
    assert HuggingFaceTokenizer(folder).fingerprint == first
    others = [HuggingFaceTokenizer(folder, chat_template=TAGGED).fingerprint, HuggingFaceTokenizer(folder, extra_eos_ids=(1,)).fingerprint]
    save_tokenizer(tmp_path, merges=(("a", "b"),))
    others.append(HuggingFaceTokenizer(folder).fingerprint)
    assert len({first, *others}) == 4


def test_open_tokenizer_checks_flags_together(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(TAGGED)
    assert open_tokenizer("ByteTokenizer", None).name == "byte"
    tokenizer = open_tokenizer("HuggingFaceTokenizer", save_tokenizer(tmp_path / "t"), chat_template=str(template))
    assert tokenizer.apply_chat_template(CHAT).assistant_mask is not None
    for arguments, problem in ((("ByteTokenizer", str(tmp_path)), "drop --tokenizer-model"),
                               (("HuggingFaceTokenizer", None), "give --tokenizer-model"), (("Other", None), "Other")):
        with pytest.raises(ValueError, match=problem):
            open_tokenizer(*arguments)


def test_tokenizer_problems_lists_all_and_each_remedy_helps(tmp_path):
    bytes_only = ByteTokenizer()
    assert tokenizer_problems(bytes_only, vocab_size=264, eos_ids=(1,)) == []
    problems = tokenizer_problems(bytes_only, vocab_size=263, eos_ids=(1, 106, 700))
    assert len(problems) == 3
    assert "--vocab-size to at least 264" in problems[0]
    assert "106 is ordinary text to the tokenizer ('b')" in problems[1] and "--eos-token-id to 1" in problems[1]
    assert "700 is not in the tokenizer's vocabulary" in problems[2]
    unmarked = HuggingFaceTokenizer(save_tokenizer(tmp_path, eos=None, pad=None))
    with pytest.raises(ValueError, match="no end-of-sequence token.*no padding token.*names no end token"):
        check_tokenizer(unmarked, vocab_size=300, eos_ids=())
    check_tokenizer(HuggingFaceTokenizer(save_tokenizer(tmp_path, eos="<eos>")), vocab_size=300, eos_ids=(1, TURN_END))
