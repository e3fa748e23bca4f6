import pytest

from megatron_dllm.data.report import SampleError
from megatron_dllm.data.templates import TurnRenderer, supervised_places
from megatron_dllm.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer

from .small_tokenizers import PLAIN, TAGGED, THINKING, save_tokenizer

CHAT = [
    {"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "more?"}, {"role": "assistant", "content": "no"}]
# The tag ends before the end-of-turn token, and encloses the header as well.
TAG_BEFORE_END = TAGGED.replace("<turn|>{% endgeneration %}", "{% endgeneration %}<turn|>")
TURN = "<|turn>{{ m.role }}\n{{ m.content }}<turn|>"
TAG_AROUND_HEADER = PLAIN.replace(
    TURN, "{% if m.role == 'assistant' %}{% generation %}" + TURN + "{% endgeneration %}{% else %}" + TURN + "{% endif %}{{ '' }}")
TAGGED_THINKING = TAGGED.replace("{% generation %}", "{% generation %}{% if m.reasoning %}<|channel>thought\n{{ m.reasoning }}<channel|>"
                                 "{% endif %}").replace("<|turn>assistant\n{% endif %}",
                                                        "<|turn>assistant\n<|channel>thought\n<channel|>{% endif %}")


@pytest.fixture
def load(tmp_path):
    def load(template, **options):
        return HuggingFaceTokenizer(save_tokenizer(tmp_path, template, **options))
    return load


def texts(tokenizer, turn):
    return tokenizer.decode(turn.prompt), tokenizer.decode(turn.response)


@pytest.mark.parametrize("template", [PLAIN, TAGGED, TAG_BEFORE_END, TAG_AROUND_HEADER])
def test_turn_ends_at_its_end_token_and_starts_behind_the_header(load, template):
    tokenizer = load(template)
    renderer = TurnRenderer(tokenizer)
    first = "<bos><|turn>system\nbe short<turn|>\n<|turn>user\nhi<turn|>\n<|turn>assistant\n"
    assert texts(tokenizer, renderer.turn(CHAT, 2)) == (first, "yo<turn|>")
    second = first + "yo<turn|>\n<|turn>user\nmore?<turn|>\n<|turn>assistant\n"
    assert texts(tokenizer, renderer.turn(CHAT, 4)) == (second, "no<turn|>")
    prompt = tokenizer.apply_chat_template(CHAT[:4], add_generation_prompt=True).ids
    assert renderer.turn(CHAT, 4).prompt == prompt  # what generation starts from


def test_turn_of_the_byte_tokenizer():
    tokenizer = ByteTokenizer()
    turn = TurnRenderer(tokenizer).turn(CHAT, 4)
    assert texts(tokenizer, turn) == (
        "<bos><system>be short<eos><user>hi<eos><assistant>yo<eos><user>more?<eos><assistant>", "no<eos>")


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_turn_passes_tools_to_the_template(load, template):
    tokenizer = load(template)
    prompt, response = texts(tokenizer, TurnRenderer(tokenizer).turn(CHAT, 2, [{"name": "f"}]))
    assert prompt.startswith('<bos><|turn>tools\n[{"name": "f"}]<turn|>') and response == "yo<turn|>"


def test_turn_that_was_cut_short_has_no_end_token(load):
    tokenizer = load(PLAIN)
    assert texts(tokenizer, TurnRenderer(tokenizer).turn(CHAT, 4, truncated=True))[1] == "no"


@pytest.mark.parametrize("template", [THINKING, TAGGED_THINKING])
def test_turn_keeps_what_the_generation_prompt_adds(load, template):
    tokenizer = load(template)
    renderer = TurnRenderer(tokenizer)
    assert "'<|channel>thought\\n<channel|>'" in renderer.notes[0]
    first = "<bos><|turn>system\nbe short<turn|>\n<|turn>user\nhi<turn|>\n<|turn>assistant\n"
    assert texts(tokenizer, renderer.turn(CHAT, 2)) == (first + "<|channel>thought\n<channel|>", "yo<turn|>")
    thoughtful = [*CHAT[:2], {"role": "assistant", "content": "yo", "reasoning": "greet"}]
    assert texts(tokenizer, renderer.turn(thoughtful, 2)) == (first, "<|channel>thought\ngreet<channel|>yo<turn|>")


def test_turn_after_a_tool_result_without_header_of_its_own(load):
    # As the template of Gemma 4: results stand inside the assistant's turn, which goes on behind them.
    template = ("{{ bos_token }}{% set ns = namespace(open=false) %}{% for m in messages %}"
                "{% if m.role == 'tool' %}[{{ m.content }}]{% else %}{% if not ns.open %}<|turn>{{ m.role }}\n{% endif %}"
                "{% if m.tool_calls %}call<channel|>{% set ns.open = true %}{% else %}{{ m.content }}<turn|>\n{% set ns.open = false %}"
                "{% endif %}{% endif %}{% endfor %}"
                "{% if add_generation_prompt and not ns.open %}<|turn>assistant\n<|channel>thought\n<channel|>{% endif %}")
    chat = [CHAT[1], {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}, {"role": "tool", "content": "7"},
            CHAT[2]]
    tokenizer = load(template, eos="<turn|>")
    tokenizer.eos_ids += (6,)  # <channel|> ends a turn that waits for a result
    renderer = TurnRenderer(tokenizer)
    head = "<bos><|turn>user\nhi<turn|>\n<|turn>assistant\n"
    assert texts(tokenizer, renderer.turn(chat, 1)) == (head + "<|channel>thought\n<channel|>", "call<channel|>")
    assert texts(tokenizer, renderer.turn(chat, 3)) == (head + "call<channel|>[7]", "yo<turn|>")


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_two_assistant_turns_in_a_row_stay_apart(load, template):
    tokenizer = load(template)
    chat = [CHAT[1], CHAT[2], {"role": "assistant", "content": "and"}]
    assert texts(tokenizer, TurnRenderer(tokenizer).turn(chat, 2))[1] == "and<turn|>"
    tight = TAGGED.replace("<|turn>{{ m.role }}\n", "{% if m.role != 'assistant' %}<|turn>{{ m.role }}\n{% endif %}").replace(
        "{{ '\n' }}{% endfor %}", "{% endfor %}").replace("{% if add_generation_prompt %}<|turn>assistant\n{% endif %}", "")
    tokenizer = load(tight)
    assert texts(tokenizer, TurnRenderer(tokenizer).turn(chat, 2)) == ("<bos><|turn>user\nhi<turn|>yo<turn|>", "and<turn|>")


@pytest.mark.parametrize(("chat", "place", "reason"), [
    ([CHAT[1], {"role": "assistant", "content": " \n"}], 1, "empty response"),
    ([CHAT[2]], 0, "begins with the assistant"),
    ([CHAT[1], {"role": "assistant", "content": "\nyo"}], 1, "not a prefix"),
    ([CHAT[1], {"role": "assistant", "content": "yo", "hidden": True}], 1, "empty response"),
], ids=["blank", "first", "merged newline", "not rendered"])
def test_turn_that_cannot_be_learned_from_says_why(load, chat, place, reason):
    tokenizer = load(PLAIN.replace("{{ m.content }}", "{{ '' if m.hidden else m.content }}"), merges=(("Ċ", "Ċ"),))
    with pytest.raises(SampleError, match=reason):
        TurnRenderer(tokenizer).turn(chat, place)


def test_turn_without_marked_tokens_is_an_error_not_an_empty_mask(load):
    tokenizer = load(TAGGED.replace("m.role == 'assistant'", "m.role == 'assistant' and not m.hidden"))
    with pytest.raises(SampleError, match="marks nothing"):
        TurnRenderer(tokenizer).turn([CHAT[1], {**CHAT[2], "hidden": True}], 1)


BROKEN = {
    "everything marked": ("{% generation %}" + PLAIN + "{% endgeneration %}", "marks the user's words"),
    "question marked": (TAGGED.replace("m.role == 'assistant'", "m.role == 'user'"), "marks the user's words"),
    "no end of turn": (PLAIN.replace("{{ m.content }}<turn|>", "{{ m.content }}"), "no end-of-turn token"),
    "prompt of another kind": ("{% if add_generation_prompt %}PROMPT {{ messages[-1].content }}{% else %}" + PLAIN + "{% endif %}",
                               "put {% generation %}|does not part"),
    "answer left out": (PLAIN.replace("{{ m.content }}", "{{ m.content if m.role == 'user' else 'x' }}"), "does not part"),
    "question repeated": (PLAIN.replace("{{ m.content }}", "{{ messages[0].content if m.role == 'assistant' }}{{ m.content }}"),
                          "does not part"),
    "question refused": (PLAIN + "{{ raise_exception('needs a system message') }}", "needs a system message"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_template_that_cannot_be_cut_is_refused_at_once(load, case):
    template, problem = BROKEN[case]
    with pytest.raises(ValueError, match=problem):
        TurnRenderer(load(template))


def test_template_that_marks_nothing_at_all_is_refused(load):
    with pytest.raises(ValueError, match="marks nothing"):
        TurnRenderer(load(PLAIN + "{% generation %}{% endgeneration %}"))


@pytest.mark.parametrize(("supervise", "expected"), [("all", [(2, 0), (4, 1)]), ("last", [(4, 1)])])
def test_supervised_places(supervise, expected):
    assert supervised_places(CHAT, supervise) == expected


def test_supervised_places_leaves_out_weight_0_and_finds_none():
    assert supervised_places([*CHAT[:4], {**CHAT[4], "weight": 0}], "all") == [(2, 0)]
    assert supervised_places(CHAT[:2], "all") == []
