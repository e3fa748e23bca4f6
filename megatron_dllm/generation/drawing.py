"""Frames of a film in the terminal (live) and as a GIF."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from .film import NUM_SHADES, RGB, Cell, Frame, lines_of, shade, thinned

STYLES = {"prompt": "cyan", "committed": "default", "guess": "grey50"}
# The GIF's: a dark page, so that accepted tokens shine.
PAGE, INK, DIM, PROMPT = (24, 26, 31), (235, 235, 235), (120, 124, 134), (86, 180, 233)
TRACK, BLACK = (60, 63, 70), (0, 0, 0)  # of the progress bar; the ink on coloured paper
BLENDS = 4
COLOURS: dict[str, RGB] = {"prompt": PROMPT, "committed": INK, "guess": DIM, "accepted": BLACK}
MOST_FRAMES, STEP_MS, SETTLED_MS, LAST_MS = 150, 110, 700, 3000


class TerminalView:
    """A panel that is redrawn with every frame; use as a context. Where the console is no terminal only the last frame is printed."""

    def __init__(self, console: Console, title: str, *, lines: int = 24):
        self.live = Live(console=console, refresh_per_second=15, transient=False)
        self.console, self.title, self.lines = console, title, lines

    def __enter__(self) -> TerminalView:
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()
        if not self.console.is_terminal:
            self.console.print()

    def show(self, frame: Frame) -> None:
        """Draw a frame: the last lines of the text, and under them the caption and the colour scale."""
        lines = lines_of(frame.cells, max(self.console.width - 4, 20), cell_len)[-self.lines :]
        body = Text("\n").join(Text.assemble(*(terminal_piece(cell) for cell in line)) for line in lines)
        self.live.update(Panel(Group(body, Text(), terminal_legend()), title=self.title, subtitle=frame.caption, title_align="left"))


def terminal_piece(cell: Cell) -> tuple[str, str]:
    """(text, rich style) of a cell."""
    return cell.text, STYLES[cell.kind] if cell.colour is None else "black on #{:02x}{:02x}{:02x}".format(*cell.colour)


def terminal_legend() -> Text:
    shades = [(" ", "on #{:02x}{:02x}{:02x}".format(*shade(i))) for i in range(NUM_SHADES)]
    return Text.assemble(("accepted: sure ", "grey50"), *shades, (" unsure    grey: best guess, not yet accepted", "grey50"))


def write_gif(path: Path, frames: Sequence[Frame], *, columns: int = 72, most_lines: int = 30, font_size: int = 14) -> None:
    """Write the film as a GIF that loops; ValueError without frames."""
    if not frames:
        raise ValueError("there are no frames to draw: nothing was generated")
    page = Page(columns, font_size)
    shown = thinned(frames, MOST_FRAMES)
    laid_out = [lines_of(frame.cells, columns, cell_len)[-most_lines:] for frame in shown]
    height = max(map(len, laid_out))
    images = [page.draw(frame, lines, height) for frame, lines in zip(shown, laid_out, strict=True)]
    durations = [SETTLED_MS if frame.settled else STEP_MS for frame in shown]
    durations[-1] = LAST_MS
    images[0].save(path, save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=True)


def palette_colours() -> list[RGB]:
    """Every colour of a page and the blends at the edges of letters, few enough for a small file and equal in all frames."""
    pairs = [(PAGE, ink) for ink in (INK, DIM, PROMPT, TRACK)] + [(shade(i), BLACK) for i in range(NUM_SHADES)]
    return [tuple(round(a + (b - a) * level / (BLENDS - 1)) for a, b in zip(paper, ink, strict=True))
            for paper, ink in pairs for level in range(BLENDS)]


class Page:
    """Lays frames out on a grid of characters. The font comes with matplotlib, so it is on every machine."""

    MARGIN = 12

    def __init__(self, columns: int, font_size: int):
        fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        self.font = ImageFont.truetype(str(fonts / "DejaVuSansMono.ttf"), font_size)
        self.advance = round(self.font.getlength("M"))
        self.line_height = round(font_size * 1.35)
        self.width = columns * self.advance + 2 * self.MARGIN
        self.palette = Image.new("P", (1, 1))
        self.palette.putpalette([value for colour in palette_colours() for value in colour])

    def draw(self, frame: Frame, lines: Sequence[Sequence[Cell]], num_lines: int) -> Image.Image:
        """The frame on a page of `num_lines` lines between caption and legend."""
        top = self.MARGIN + 2 * self.line_height
        legend = top + num_lines * self.line_height + self.line_height // 2
        image = Image.new("RGB", (self.width, legend + self.line_height + self.MARGIN), PAGE)
        canvas = ImageDraw.Draw(image)
        canvas.text((self.MARGIN, self.MARGIN), frame.caption, font=self.font, fill=INK)
        done = 1.0 if frame.settled else frame.num_accepted / frame.num_positions
        self._draw_progress(canvas, self.MARGIN + round(1.3 * self.line_height), done)
        for row, line in enumerate(lines):
            self._draw_line(canvas, top + row * self.line_height, line)
        self._draw_legend(canvas, legend)
        return image.quantize(palette=self.palette, dither=Image.Dither.NONE)

    def _draw_progress(self, canvas: ImageDraw.ImageDraw, y: int, part: float) -> None:
        """A thin bar: the part of the canvas that is accepted."""
        left, right = self.MARGIN, self.width - self.MARGIN
        canvas.rectangle((left, y, right, y + 3), fill=TRACK)
        canvas.rectangle((left, y, left + round((right - left) * part), y + 3), fill=shade(0))

    def _draw_line(self, canvas: ImageDraw.ImageDraw, y: int, line: Sequence[Cell]) -> None:
        x = self.MARGIN
        for cell in line:
            for character in cell.text:  # one by one: rounded advances keep the grid
                wide = cell_len(character) * self.advance
                if cell.colour is not None:
                    canvas.rectangle((x, y, x + wide - 1, y + self.line_height - 2), fill=cell.colour)
                canvas.text((x, y), character, font=self.font, fill=COLOURS[cell.kind])
                x += wide

    def _draw_legend(self, canvas: ImageDraw.ImageDraw, y: int) -> None:
        x = self.MARGIN
        for text in ("accepted: sure ", None, " unsure    grey: best guess, not yet accepted"):
            if text is None:
                for number in range(NUM_SHADES):
                    canvas.rectangle((x, y, x + self.advance - 1, y + self.line_height - 4), fill=shade(number))
                    x += self.advance
            else:
                canvas.text((x, y), text, font=self.font, fill=DIM)
                x += len(text) * self.advance
