import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from megatron_dllm.data.tokenizers import ByteTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import show_data  # noqa: E402
from data_view.samples import Piece, pieces, spell, visible  # noqa: E402
from data_view.summary import histogram  # noqa: E402

TOKENIZER = ByteTokenizer()
QUESTION, ANSWER = "Is <b>1</b> & 1 = 2?\x1b[31m", "Yes, one and one make two."
ROWS = [{"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]},
        {"messages": [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y"}]}]


@pytest.fixture
def shown(tmp_path, capsys, monkeypatch):
    """Runs the tool on the rows above and a broken line; returns (what it printed, the page)."""
    (tmp_path / "chat.jsonl").write_text("broken\n" + "\n".join(map(json.dumps, ROWS)))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*flags):
        page = tmp_path / "page.html"
        status = show_data.main(["--preset", "toy", "--data-path", str(tmp_path / "chat.jsonl"), "--seq-length", "128", "--samples", "1",
                                 "--html", str(page), *flags])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return captured.out, page.read_text()

    return run


def test_show_prints_prompt_canvases_fill_and_counts(shown):
    out, _ = shown()
    assert "chat.jsonl:2 turn 1" in out and "<user>Is <b>1</b> & 1 = 2?\\x1b[31m<eos><assistant>" in out
    assert "┌ canvas 1" in out and "┌ canvas 2" in out and "Yes, one and one" in out  # 16 tokens a canvas
    assert " make two.<eos><eos>×5" in out  # 27 tokens of response, 32 in two canvases
    assert out.count(", chosen ") == 1 and re.search(r"noise level t = 0\.\d+", out)
    counts = dict(re.findall(r"^ *([a-z ]+?) {2,}(\d+) *$", out, re.M))
    assert {name: counts[name] for name in ("examples", "examples that fit", "response tokens", "fill tokens", "canvases")} == {
        "examples": "2", "examples that fit": "1", "response tokens": "27", "fill tokens": "5", "canvases": "2"}
    assert "1 skipped, corrupt line" in out and "1 skipped, prompt without room for one canvas" in out


def test_show_gives_every_canvas_to_the_decoder_when_all_are_scored(shown):
    out, _ = shown("--canvases-scored", "all")
    assert out.count("what the decoder gets") == 2


def test_show_has_no_canvases_for_the_plain_objective(shown):
    out, _ = shown("--objective", "ar")
    assert "what the decoder gets" not in out and ANSWER in out


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], set(), []

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        assert not {"src", "href", "onclick"} & {name for name, _ in attributes}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_whole_escaped_and_needs_nothing_else(shown):
    _, page = shown()
    tags = Tags()
    tags.feed(page)
    assert not tags.open and not {"script", "b", "link", "img"} & tags.seen
    text = "".join(tags.text)
    assert "Is <b>1</b> & 1 = 2?\\x1b[31m" in text and "\x1b" not in page
    assert "1 skipped, corrupt line" in text and "response tokens" in text


def test_show_reports_errors_in_a_line(capsys):
    assert show_data.main(["--preset", "toy", "--data-path", "missing.jsonl"]) == 2
    assert "error: missing.jsonl: no such file" in capsys.readouterr().err


def test_pieces_join_neighbours_and_spell_random_tokens_alone():
    tokens = np.array([*TOKENIZER.encode("abé"), 300, 8 + ord("x"), 1, 1])
    kinds = ["kept"] * 4 + ["replaced", "replaced", "fill", "fill"]
    assert pieces(tokens, kinds, [True] * 4 + [False] * 4, TOKENIZER) == (
        Piece("abé", "kept", True, 4), Piece("<300>", "replaced", False, 1), Piece("x", "replaced", False, 1),
        Piece("<eos>×2", "fill", False, 2))


def test_spell_and_visible():
    assert spell([2, 8 + ord("a"), 264, 511], TOKENIZER) == "<bos>a<264><511>"
    assert visible("a\nb\tc\x1b[0m\u202e") == "a↵\nb→c\\x1b[0m\\u202e"


def test_histogram_bars_of_one_then_of_doubling_width():
    small = histogram("h", np.array([2, 2, 5]))
    assert small.labels() == ["2", "3", "4", "5"] and small.counts == (2, 0, 0, 1)
    large = histogram("h", np.array([3, 16, 31, 32]))
    assert large.labels() == ["2–3", "4–7", "8–15", "16–31", "32–63"] and large.counts == (1, 0, 0, 2, 1)
    assert histogram("h", np.array([], int)).counts == (0,)
