"""A microbatch as the model reads it: device tensors, the one or two passes through the stack, and what is scored after each."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..transformer.rows import Rows
from ..transformer.token_pass import TokenPass
from .nested import map_tensors

NOISE_BINS = 10  # metrics show the diffusion loss by tenths of the noise level
MTP_GROUP = 1 + NOISE_BINS
PassOrder = Literal["shared", "apart", "joint"]  # see training/draft_pass.py


@dataclass(frozen=True)
class StreamInputs:
    """The ids of one stream on the device, int64 [T]."""

    tokens: Tensor


@dataclass(frozen=True)
class Scored:
    """The N tokens of a pass that are scored.

    rows      int64 [N]    where they stand in the pass
    targets   int64 [N]
    weights   [N], at least fp32: each token's share of the loss, global denominators included
    group     int64 [N]    0: autoregressive; 1 + b: diffusion, noise level in tenth b; MTP_GROUP: multi-token prediction
    observed, bonus        int64 [N] and [N], or None: what is added to the logit of the noisy token that is seen
    """

    rows: Tensor
    targets: Tensor
    weights: Tensor
    group: Tensor
    observed: Tensor | None
    bonus: Tensor | None


@dataclass(frozen=True)
class FurtherInputs:
    """What multi-token prediction needs: a pass of the clean tokens alone and, by depth, the tokens that are read and what is scored."""

    token_pass: TokenPass
    tokens: tuple[Tensor, ...]
    scored: tuple[Scored, ...]


@dataclass(frozen=True)
class DraftInputs:
    """Drafts that are made beforehand, without gradient.

    tokens      int64, of a pass of their own: the clean tokens that drafts see, then the canvases that have a draft
    rows        int64: where the latter stand in the canvas stream; None: they are all of it
    """

    tokens: Tensor
    token_pass: TokenPass
    rows: Tensor | None


@dataclass(frozen=True)
class JointInputs:
    """Two passes that have one backward (see transformer/joint_backward.py).

    rows        int64: where the canvases that have a draft stand in the canvas stream; None: they are all of it
    places      the same in the first pass
    """

    rows: Tensor | None
    places: Rows


@dataclass(frozen=True)
class MicrobatchInputs:
    """A microbatch: see DiffusionGemma.forward.

        order of passes           first_pass holds    second_pass    draft    joint    scored
        no canvas decoded twice   clean, canvas       -              -        -        first_scored
        "shared"                  clean, draft        canvas         -        -        first_scored, and after the second second_scored
        "apart"                   clean, canvas       -              set      -        first_scored
        "joint"                   clean, draft        canvas         -        set      first_scored, after both passes

    draft_rows      int64: where in the first pass drafts stand
    second_tokens   int64: the ids of the second pass
    left_out        bool [T]: of the tokens that are decoded twice, all canvases then, those without their draft's signal (None: none)
    """

    clean: StreamInputs
    canvas: StreamInputs
    uniform_null: bool
    first_pass: TokenPass
    first_scored: Scored
    draft_rows: Tensor
    second_tokens: Tensor
    second_pass: TokenPass | None = None
    second_scored: Scored | None = None
    further: FurtherInputs | None = None
    draft: DraftInputs | None = None
    joint: JointInputs | None = None
    left_out: Tensor | None = None


def to_device(value, device: torch.device):
    """`value` with every tensor in it on `device`."""
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))
