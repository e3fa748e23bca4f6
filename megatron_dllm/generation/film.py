"""A canvas settling, as frames: what stands where after each denoising step, ready to be drawn in a terminal or as pixels."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..data.tokenizers import Tokenizer
from ..diffusion.sampler import DenoisingStep
from .text import decode_tokens

Kind = Literal["prompt", "committed", "accepted", "guess"]
RGB = tuple[int, int, int]

# Entropies (nats) at the ends of the colour scale, which is logarithmic: sure positions have very little of it.
SURE, UNSURE = 1e-4, 3.0
# Bluish green, yellow, vermilion: apart for the colour-blind too (Okabe and Ito 2008), and bright enough for black text.
SCALE: tuple[RGB, ...] = ((0, 158, 115), (240, 228, 66), (213, 94, 0))
NUM_SHADES = 9


def entropy_colour(entropy: float) -> RGB:
    """Green where the model is sure, yellow, then red where it is not; one of NUM_SHADES shades."""
    place = (math.log(max(entropy, SURE)) - math.log(SURE)) / (math.log(UNSURE) - math.log(SURE))
    return shade(round(min(place, 1.0) * (NUM_SHADES - 1)))


def shade(number: int) -> RGB:
    """Shade `number` of the scale, 0 the surest."""
    place = number / (NUM_SHADES - 1) * (len(SCALE) - 1)
    low = min(int(place), len(SCALE) - 2)
    return tuple(round(a + (b - a) * (place - low)) for a, b in zip(SCALE[low], SCALE[low + 1], strict=True))


@dataclass(frozen=True)
class Cell:
    """Text that is drawn in one manner: a token of the canvas, or all of the prompt; `colour` of accepted tokens only."""

    text: str
    kind: Kind
    colour: RGB | None = None


@dataclass(frozen=True)
class Frame:
    """The text so far with the canvas at its end. `settled`: the canvas is committed with this frame."""

    cells: tuple[Cell, ...]
    canvas_index: int
    step: int
    num_accepted: int
    num_positions: int
    mean_entropy: float
    settled: bool

    @property
    def caption(self) -> str:
        state = "committed" if self.settled else f"{self.num_accepted} of {self.num_positions} accepted"
        return f"canvas {self.canvas_index + 1}   step {self.step + 1}   {state}   entropy {self.mean_entropy:.3f}"


class Film:
    """Observer of one row of a batch: turns its denoising steps into frames, kept in `frames` and handed to `on_frame` as they come."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], eos_ids: Sequence[int], *, row: int = 0,
                 on_frame: Callable[[Frame], None] | None = None):
        self.tokenizer, self.row, self.on_frame = tokenizer, row, on_frame
        self.ends = {*eos_ids, *tokenizer.eos_ids}
        self.frames: list[Frame] = []
        self.text = [Cell(visible(decode_tokens(tokenizer, prompt)), "prompt")]

    def __call__(self, step: DenoisingStep) -> None:
        if self.row not in step.rows:
            return
        place = step.rows.index(self.row)
        settled = bool(step.settled[place])
        accepted, entropy = step.accepted[place].tolist(), step.entropy[place].tolist()
        canvas, argmax = step.canvas[place].tolist(), step.argmax[place].tolist()
        cells = [
            Cell(self.piece(canvas[i]), "accepted", entropy_colour(entropy[i])) if accepted[i] else Cell(self.piece(argmax[i]), "guess")
            for i in range(len(canvas))]
        if settled:
            cells = [self.committed(argmax)]
        frame = Frame((*self.text, *cells), step.canvas_index, step.step, sum(accepted), len(canvas), sum(entropy) / len(entropy), settled)
        self.frames.append(frame)
        if settled:
            self.text += cells
        if self.on_frame is not None:
            self.on_frame(frame)

    def piece(self, token: int) -> str:
        """One token of a canvas, made visible: an arrow before each line end; a dot for ends, padding, and a part of a character."""
        if token in self.ends or token == self.tokenizer.pad_id:
            return "·"
        return visible(decode_tokens(self.tokenizer, [token])).replace("\n", "↵\n").replace("\ufffd", "·")

    def committed(self, canvas: Sequence[int]) -> Cell:
        """The text of a finished canvas, through its end."""
        end = next((i for i, token in enumerate(canvas) if token in self.ends), len(canvas))
        return Cell(visible(decode_tokens(self.tokenizer, canvas[:end], skip_special_tokens=True)), "committed")


def visible(text: str) -> str:
    """Text without what moves a cursor: one kind of line end, tabs as blanks, a dot for other control characters."""
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


def lines_of(cells: Sequence[Cell], columns: int, width: Callable[[str], int] = len) -> list[list[Cell]]:
    """Cells flowed into lines of at most `columns`, broken where they do not fit, neighbours that look alike joined.

    `width` tells the columns of a character.
    """
    lines, room = [[]], columns
    for cell in cells:
        for character in cell.text:
            if character == "\n" or width(character) > room:
                lines.append([])
                room = columns
            if character == "\n":
                continue
            room -= width(character)
            last = lines[-1][-1] if lines[-1] else None
            if last is not None and (last.kind, last.colour) == (cell.kind, cell.colour):
                lines[-1][-1] = Cell(last.text + character, cell.kind, cell.colour)
            else:
                lines[-1].append(Cell(character, cell.kind, cell.colour))
    return lines


def thinned(frames: Sequence[Frame], most: int) -> list[Frame]:
    """At most about `most` frames, evenly spaced; those that commit a canvas, and the first, always stay."""
    stride = max(1, math.ceil(len(frames) / most))
    return [frame for i, frame in enumerate(frames) if i % stride == 0 or frame.settled]
