"""Scores of answers, and the figures over many completions."""
import math
import sys

import pytest

from megatron_dllm.data.sudoku import SudokuTokenizer
from megatron_dllm.data.tokenizers import ByteTokenizer
from megatron_dllm.generation.completions import Completion, Speed
from megatron_dllm.generation.quality import Answer, open_score
from megatron_dllm.generation.text import chat_prompt, decode_tokens, has_chat_template, raw_prompt

BYTES, SUDOKU = ByteTokenizer(), SudokuTokenizer(4)
PUZZLE, SOLUTION = "1.34 3412 2143 432. =", "1234 3412 2143 4321"


def answer(generated: str, reference: str = "so it is #### 42", tokenizer=BYTES, prompt: str = "?") -> Answer:
    generated_ids, reference_ids = (tuple(tokenizer.encode(text)) for text in (generated, reference))
    return Answer(tuple(raw_prompt(tokenizer, prompt)), generated_ids, reference_ids, tokenizer)


@pytest.mark.parametrize("score, generated, right", [
    ("exact", " so it is #### 42\n", True),
    ("exact", "so it is #### 43", False),
    ("regex:#### (-?\\d+)", "we get #### 42", True),
    ("regex:#### (-?\\d+)", "#### 42, no, #### 41", False),  # the last one counts
    ("regex:#### (-?\\d+)", "42", False),
    ("regex:^\\d+$", "first\n17\nlast", True),
    ("regex:^\\d+$", "number 17", False),
])
def test_scores(score, generated, right):
    assert open_score(score)(answer(generated)) is right


def test_exact_looks_at_the_text_without_its_end():
    one = answer("yes", "yes")
    assert open_score("exact")(Answer(one.prompt, (*one.generated, 1), one.reference, BYTES))


@pytest.mark.parametrize("generated, right", [
    (SOLUTION, True), (SOLUTION.replace("1234", "1243"), False), (SOLUTION[:-1], False), (SOLUTION + "1", False)])
def test_sudoku_score(generated, right):
    assert open_score("sudoku")(answer(generated, SOLUTION, SUDOKU, PUZZLE)) is right


def test_sudoku_score_wants_puzzles():
    with pytest.raises(ValueError, match="--data-source sudoku"):
        open_score("sudoku")(answer("1"))


def test_score_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "my_scores_for_a_test.py").write_text("def short(answer):\n    return len(answer.generated_text) < 4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    score = open_score("my_scores_for_a_test:short")
    assert score(answer("abc")) and not score(answer("abcd"))
    sys.modules.pop("my_scores_for_a_test")


@pytest.mark.parametrize("name, message", [
    ("exactly", "choose exact, sudoku, regex:PATTERN and module:function"),
    ("regex:(", "no regular expression"),
    ("no_such_module_here:f", "PYTHONPATH"),
    ("math:no_such_function", "module math has no function"),
])
def test_unknown_scores_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        open_score(name)


def test_speed_counts_tokens_without_padding():
    one = Completion((5,), (7, 8, 1), (4,), True)
    two = Completion((5,), (7, 0, 8, 8, 8, 8), (10, 6), False)
    speed = Speed.of([one, two], pad_id=0)
    assert (speed.num_tokens, speed.num_forwards, speed.num_canvases) == (8, 20, 3)
    assert speed.tokens_per_forward == 8 / 20 and speed.effective_steps == 20 / 3
    assert math.isnan(Speed.of([], pad_id=0).tokens_per_forward)


def test_decode_tokens_writes_numbers_beyond_the_tokenizer():
    assert decode_tokens(BYTES, [*BYTES.encode("é"), 300, 511, *BYTES.encode("b"), 1], skip_special_tokens=True) == "é<300><511>b"


def test_prompts_and_templates():
    assert raw_prompt(BYTES, "ab") == [2, *BYTES.encode("ab")]
    assert chat_prompt(BYTES, [{"role": "user", "content": "a"}]) == [2, 4, *BYTES.encode("a"), 1, 5]
    assert has_chat_template(BYTES) and not has_chat_template(SUDOKU)
