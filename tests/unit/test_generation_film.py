"""Frames of a canvas settling, their layout, the terminal view and the GIF."""
import io

import pytest
import torch
from PIL import Image
from rich.cells import cell_len
from rich.console import Console

from megatron_dllm.data.tokenizers import ByteTokenizer
from megatron_dllm.diffusion.sampler import DenoisingStep
from megatron_dllm.generation.drawing import TerminalView, write_gif
from megatron_dllm.generation.film import SCALE, Cell, Film, entropy_colour, lines_of, thinned

TOKENIZER = ByteTokenizer()


def step(canvas: str, accepted, argmax: str, *, number=0, canvas_index=0, settled=False, rows=(0,), entropy=0.5) -> DenoisingStep:
    """One step of rows that all look alike; "$" is the end token."""
    ids = [torch.tensor([[1 if c == "$" else TOKENIZER.encode(c)[0] for c in text]] * len(rows)) for text in (canvas, argmax)]
    return DenoisingStep(canvas_index, number, rows, ids[0], torch.tensor([accepted] * len(rows)).bool(), ids[1],
                         torch.full(ids[0].shape, entropy), torch.tensor([settled] * len(rows)))


def film_of(*steps, row=0) -> Film:
    film = Film(TOKENIZER, TOKENIZER.encode("P:"), (1,), row=row)
    for one in steps:
        film(one)
    return film


def test_film_shows_samples_where_accepted_and_best_guesses_elsewhere():
    frame = film_of(step("axb", [1, 0, 1], "ayc")).frames[0]
    assert [(cell.text, cell.kind) for cell in frame.cells] == [("P:", "prompt"), ("a", "accepted"), ("y", "guess"), ("b", "accepted")]
    assert frame.cells[1].colour == entropy_colour(0.5) and frame.cells[2].colour is None
    assert (frame.num_accepted, frame.num_positions, frame.settled) == (2, 3, False) and "2 of 3 accepted" in frame.caption


def test_film_commits_the_best_guess_up_to_its_end_and_goes_on_behind_it():
    film = film_of(step("abc", [1, 1, 1], "xy$", number=7, settled=True), step("d\ne", [1, 1, 0], "d\n$", canvas_index=1))
    assert [cell.text for cell in film.frames[0].cells] == ["P:", "xy"] and film.frames[0].settled
    assert [cell.text for cell in film.frames[1].cells] == ["P:", "xy", "d", "↵\n", "·"]
    assert film.frames[0].caption.startswith("canvas 1   step 8   committed") and film.frames[1].caption.startswith("canvas 2   step 1 ")


def test_film_follows_its_row():
    film = film_of(step("a", [1], "a", rows=(0, 2)), step("b", [1], "b", rows=(0,)), row=2)
    assert len(film.frames) == 1


def test_entropy_colour_runs_over_the_scale():
    assert entropy_colour(0.0) == SCALE[0] and entropy_colour(50.0) == SCALE[-1]
    assert len({entropy_colour(10.0 ** exponent) for exponent in range(-4, 1)}) == 5


@pytest.mark.parametrize("texts, columns, expected", [
    (["abcde"], 3, ["abc", "de"]),
    (["ab", "\ncd"], 3, ["ab", "cd"]),
    (["a\n\nb"], 3, ["a", "", "b"]),
    (["日本語"], 4, ["日本", "語"]),
    ([], 4, [""]),
])
def test_lines_of(texts, columns, expected):
    lines = lines_of([Cell(text, "guess") for text in texts], columns, cell_len)
    assert ["".join(cell.text for cell in line) for line in lines] == expected


def test_lines_of_joins_what_looks_alike_only():
    (line,) = lines_of([Cell("a", "guess"), Cell("b", "guess"), Cell("c", "accepted", (1, 2, 3)), Cell("d", "accepted", (3, 2, 1))], 9)
    assert [cell.text for cell in line] == ["ab", "c", "d"]


def test_thinned_keeps_the_first_and_every_committed_frame():
    steps = [step("ab", [1, 0], "ab", number=i, settled=i == 17) for i in range(18)]
    kept = [frame.step for frame in thinned(film_of(*steps).frames, 5)]
    assert kept == [0, 4, 8, 12, 16, 17]


def test_terminal_view_prints_the_last_frame():
    console = Console(file=io.StringIO(), width=60, force_terminal=False)
    film = Film(TOKENIZER, TOKENIZER.encode("P:"), (1,))
    with TerminalView(console, "a prompt") as view:
        film.on_frame = view.show
        film(step("axb", [1, 0, 1], "ayc"))
        film(step("axb", [1, 0, 1], "hey", number=1, settled=True))
    text = console.file.getvalue()
    assert "P:hey" in text and "committed" in text and "a prompt" in text


def test_write_gif_has_the_colours_of_its_frames(tmp_path):
    steps = [step("axb", [1, 0, 1], "ayc"), step("axb", [1, 1, 1], "hey\n", number=1, settled=True, entropy=3.0)]
    write_gif(tmp_path / "canvas.gif", film_of(*steps).frames, columns=60)
    with Image.open(tmp_path / "canvas.gif") as image:
        assert image.n_frames == 2
        colours = []
        for number in range(2):
            image.seek(number)
            colours.append({colour for _, colour in image.convert("RGB").getcolors(10_000)})
        assert image.info["duration"] > 1000 and image.info["loop"] == 0
    assert entropy_colour(0.5) in colours[0] and colours[0] != colours[1]


def test_write_gif_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no frames"):
        write_gif(tmp_path / "canvas.gif", [])
