"""Which layer sits on which pipeline stage: the layout string, read, written, derived and checked.

A layout places, in order, E (embedding, and its expansion into residual streams), t (attention block), g (gated-delta block), m
(multi-token prediction) and L (contraction, final norm, head and loss). | ends a virtual stage, (...)*k repeats, t*k repeats one letter;
blanks and commas only help the eye, and a | after L may be written or left out. Virtual stage i sits on rank i mod P, chunk i div P:

    Ett|tttL          2 stages of 2 and 3 layers
    E|(tt|)*3L        embedding and loss on stages of their own
    Ettt|tt||tL       the third stage is empty

What each layer is, the model's configuration says; a layout that contradicts it is refused with the position marked.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

FLAG = "--pipeline-model-parallel-layout"
LAYER_LETTERS = "tg"
_LONGEST = 100_000  # letters that a repetition may spell: a slip of the finger must not fill the memory
_LETTER_NAMES = {
    "E": "the embedding",
    "t": "an attention block",
    "g": "a gated-delta block",
    "m": "a multi-token prediction block",
    "L": "the loss",
}


class LayoutError(ValueError):
    """A layout that cannot be used: the text with a caret under the position, the rule, and what to do."""

    def __init__(self, text: str, position: int, why: str, remedy: str):
        super().__init__(f"{FLAG}: {why}; {remedy}.\n    {text}\n    {' ' * position}^")
        self.text, self.position = text, position


@dataclass(frozen=True)
class Stage:
    """What one virtual stage holds. `layers` are global layer numbers, in order."""

    letters: str
    layers: tuple[int, ...]

    @classmethod
    def whole(cls, num_layers: int) -> "Stage":
        """Everything, for a model that is not cut."""
        return cls(f"E{'t' * num_layers}L", tuple(range(num_layers)))

    @property
    def has_embedding(self) -> bool:
        return "E" in self.letters

    @property
    def has_loss(self) -> bool:
        return "L" in self.letters

    @property
    def mtp_depth(self) -> int:
        """Multi-token prediction blocks."""
        return self.letters.count("m")


@dataclass(frozen=True)
class StageLayout:
    """All virtual stages in the order in which a token passes them, dealt out over `ranks` ranks."""

    stages: tuple[Stage, ...]
    ranks: int

    @property
    def chunks(self) -> int:
        """Virtual stages of each rank."""
        return len(self.stages) // self.ranks

    def stage(self, rank: int, chunk: int) -> Stage:
        return self.stages[chunk * self.ranks + rank]

    def on_rank(self, rank: int) -> tuple[Stage, ...]:
        """The stages of `rank`, by chunk."""
        return self.stages[rank :: self.ranks]

    def part(self, rank: int) -> Stage:
        """All that `rank` holds, in one."""
        stages = self.on_rank(rank)
        return Stage("".join(s.letters for s in stages), tuple(layer for s in stages for layer in s.layers))

    def __str__(self) -> str:
        """The shortest of the usual spellings; parse_layout gives the same layout back."""
        return _shorten([stage.letters for stage in self.stages])


class _Letter(NamedTuple):
    letter: str
    position: int


def parse_layout(text: str, *, ranks: int, layers: str, mtp_depth: int = 0) -> StageLayout:
    """The layout that `text` spells, for a model whose layers are `layers`: a string of t and g, one letter a layer.

    LayoutError marks the first position where the text is malformed or contradicts the model or the number of ranks.
    """
    letters = list(_expand(text))
    _check_order(text, letters, layers, mtp_depth)
    stages = [""]
    for letter, _ in letters:
        if letter == "|":
            stages.append("")
        else:
            stages[-1] += letter
    if stages[-1] == "":
        stages.pop()  # the | after L
    if len(stages) % ranks:
        why = f"{len(stages)} virtual stages do not divide over {ranks} pipeline ranks"
        raise LayoutError(text, len(text), why, f"end {_next_multiple(len(stages), ranks)} stages with |, empty ones (||) included")
    return _number(stages, ranks)


def layer_letters(layer_types: Sequence[str]) -> str:
    """One letter a layer, as a layout writes it."""
    return "".join("g" if kind == "linear" else "t" for kind in layer_types)


def choose_layout(
    text: str | None,
    *,
    layers: str,
    ranks: int,
    layers_per_virtual_stage: int | None,
    account_for_embedding: bool,
    account_for_loss: bool,
    mtp_depth: int,
) -> StageLayout:
    """The layout that `text` spells, or without one stages of equal size; ValueError where the layers do not fit."""
    if text is not None:
        return parse_layout(text, ranks=ranks, layers=layers, mtp_depth=mtp_depth)
    return derive_layout(
        layers=layers,
        ranks=ranks,
        layers_per_virtual_stage=layers_per_virtual_stage,
        account_for_embedding=account_for_embedding,
        account_for_loss=account_for_loss,
        mtp_depth=mtp_depth,
    )


def letters_in(text: str) -> str:
    """The letters of a layout with its repetitions written out and without its stages: for planning a layout without a model."""
    return "".join(letter for letter, _ in _expand(text) if letter != "|")


def derive_layout(
    *,
    layers: str,
    ranks: int,
    layers_per_virtual_stage: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    mtp_depth: int = 0,
) -> StageLayout:
    """Stages of equal size; ValueError if the layers do not divide.

    `layers_per_virtual_stage`: None for one stage a rank. The account_for flags count the embedding or the loss as one layer, so that the
    first or last stage has one layer less. MTP blocks stand on the last stage and are not counted.
    """
    units = ["E"] * account_for_embedding + list(layers) + ["L"] * account_for_loss
    stages = ranks if layers_per_virtual_stage is None else len(units) // max(layers_per_virtual_stage, 1)
    size = len(units) // ranks if layers_per_virtual_stage is None else layers_per_virtual_stage
    if size < 1 or size * stages != len(units) or stages % ranks:
        raise ValueError(_does_not_divide(len(layers), ranks, layers_per_virtual_stage, (account_for_embedding, account_for_loss)))
    cut = ["".join(units[size * i : size * (i + 1)]) for i in range(stages)]
    if not account_for_embedding:
        cut[0] = "E" + cut[0]
    cut[-1] = cut[-1].removesuffix("L") + "m" * mtp_depth + "L"
    return _number(cut, ranks)


def _does_not_divide(layers: int, ranks: int, size: int | None, counted: tuple[bool, bool]) -> str:
    """Why `layers` cannot be cut like that, and settings that can; `counted` are the two account_for flags."""

    def sizes(extra: int) -> list[int]:
        return [n for n in range(1, (layers + extra) // ranks + 1) if (layers + extra) % (ranks * n) == 0]

    units = " and ".join([f"{layers} layers", *["the embedding"] * counted[0], *["the loss"] * counted[1]])
    where = f"{ranks} pipeline ranks" + ("" if size is None else f" in virtual stages of {size}")
    remedies = []
    if fits := sizes(sum(counted)):
        remedies.append(f"set --num-layers-per-virtual-pipeline-stage to one of {fits}")
    for embedding, loss in ((False, False), (False, True), (True, True)):
        if sum(counted) != embedding + loss and (fits := sizes(embedding + loss)):
            flags = ["--account-for-embedding-in-pipeline-split"] * embedding + ["--account-for-loss-in-pipeline-split"] * loss
            remedies.append(f"use {' and '.join(flags) or 'neither account-for flag'} with stages of one of {fits}")
    return f"{units} do not divide over {where}; {', or '.join([*remedies, f'place the layers yourself with {FLAG}'])}"


def _number(stages: Sequence[str], ranks: int) -> StageLayout:
    """Stages with their global layer numbers."""
    numbered, next_layer = [], 0
    for letters in stages:
        count = sum(letter in LAYER_LETTERS for letter in letters)
        numbered.append(Stage(letters, tuple(range(next_layer, next_layer + count))))
        next_layer += count
    return StageLayout(tuple(numbered), ranks)


def _next_multiple(number: int, factor: int) -> int:
    return -(-number // factor) * factor


_TOKEN = re.compile(r"(?P<letter>[EtgmL|])|(?P<open>\()|(?P<close>\))|(?P<times>\*\s*(?P<count>\d+))|(?P<space>[\s,]+)")


def _expand(text: str) -> Iterator[_Letter]:
    """The letters and bars of `text` with its repetitions written out, each with its position in `text`."""
    groups: list[tuple[int, list[_Letter]]] = [(0, [])]
    repeatable: list[_Letter] | None = None  # what a * would repeat
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if not match:
            raise LayoutError(text, position, f"{text[position]!r} has no meaning here", "use E, t, g, m, L, |, (...)*k, t*k")
        if match["letter"]:
            repeatable = [_Letter(match["letter"], position)]
            groups[-1][1].extend(repeatable)
        elif match["open"]:
            groups.append((position, []))
            repeatable = None
        elif match["close"]:
            if len(groups) == 1:
                raise LayoutError(text, position, "this ) closes no (", "take it out or open it")
            repeatable = groups.pop()[1]
            groups[-1][1].extend(repeatable)
        elif match["times"]:
            if repeatable is None:
                raise LayoutError(text, position, "this * has nothing to repeat", "put a letter or a (...) before it")
            count = int(match["count"])
            if count < 1:
                raise LayoutError(text, match.start("count"), f"{count} repetitions", "repeat at least once, or take the group out")
            if len(groups[-1][1]) + len(repeatable) * count > _LONGEST:
                raise LayoutError(text, match.start("count"), f"more than {_LONGEST} letters", "repeat less often")
            groups[-1][1].extend(repeatable * (count - 1))
            repeatable = None
        position = match.end()
    if len(groups) > 1:
        raise LayoutError(text, groups[-1][0], "this ( is not closed", "close it with )*k")
    yield from groups[0][1]


def _check_order(text: str, letters: Sequence[_Letter], layers: str, mtp_depth: int) -> None:
    """LayoutError unless the letters are E, the model's layers, its MTP blocks on the last stage, and L."""
    expected = ["E", *layers, *"m" * mtp_depth, "L"]
    last_bar = max((i for i, letter in enumerate(letters) if letter.letter == "|" and i + 1 < len(letters)), default=-1)
    seen = 0
    for index, (letter, position) in enumerate(letters):
        if letter == "|":
            if seen == 0:
                raise LayoutError(text, position, "the first stage has no embedding", "begin the first stage with E")
            if seen == len(expected) and index + 1 < len(letters):
                raise LayoutError(text, position, "the loss is not on the last stage", "move L behind the last |")
            continue
        if seen == len(expected):
            raise LayoutError(text, position, f"{letter} comes after the loss", "L is the last letter")
        if letter != expected[seen]:
            raise LayoutError(text, position, *_contradiction(letter, expected[seen], seen, len(layers), mtp_depth))
        if letter == "m" and index < last_bar:
            raise LayoutError(text, position, "multi-token prediction reads the last layer and needs the head", "put m on the last stage")
        seen += 1
    if seen < len(expected):
        why = f"the layout ends before {_described(expected[seen], seen, len(layers))}"
        raise LayoutError(text, len(text), why, f"the model has {len(layers)} layers and {mtp_depth} MTP blocks; place them all, then L")


def _contradiction(found: str, expected: str, seen: int, num_layers: int, mtp_depth: int) -> tuple[str, str]:
    """Why `found` may not stand here, and what to do."""
    due = _described(expected, seen, num_layers)
    if found in LAYER_LETTERS and expected in LAYER_LETTERS:
        why = f"layer {seen - 1} is {_LETTER_NAMES[expected]} in the model's configuration, not {_LETTER_NAMES[found]}"
        return why, f"write {expected}"
    if found in LAYER_LETTERS and seen > num_layers:
        return f"the model has {num_layers} layers, and this is one more", f"take it out, or raise --num-layers; {due} is next"
    if found == "m" and expected == "L":
        return f"the model has {mtp_depth} MTP blocks, and this is one more", "take it out, or raise --mtp-num-layers"
    return f"{found} stands where {due} is due", f"write {expected} here"


def _described(letter: str, seen: int, num_layers: int) -> str:
    return f"layer {seen - 1} ({letter})" if 1 <= seen <= num_layers else f"{_LETTER_NAMES[letter]} ({letter})"


def _shorten(stages: Sequence[str]) -> str:
    """Runs of equal stages as (...|)*k, runs of a letter as t*k where that is shorter."""
    parts = []
    *ended, last = stages
    for letters, run in groupby(ended):
        count = len(list(run))
        stage = _shorten_letters(letters) + "|"
        repeated = f"({stage})*{count}"
        parts.append(repeated if len(repeated) < len(stage) * count else stage * count)
    return "".join([*parts, _shorten_letters(last)])


def _shorten_letters(letters: str) -> str:
    runs = ((letter, len(list(run))) for letter, run in groupby(letters))
    return "".join(f"{letter}*{count}" if count > 3 else letter * count for letter, count in runs)
