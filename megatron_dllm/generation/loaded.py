"""A model ready to generate: weights, tokenizer and end tokens together."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..config import GenerationConfig
from ..data.tokenizers import Tokenizer
from ..diffusion.sampler import Denoiser, Observer, Reader, read_product
from ..models.diffusion_gemma.loading import StoredModel
from ..models.diffusion_gemma.model import DiffusionGemma
from ..models.diffusion_gemma.static_session import session_maker
from .completions import Completion, EndTokens, complete


@dataclass(frozen=True)
class LoadedModel:
    """What the tools generate with. `reader`: what reads a step's logits."""

    model: DiffusionGemma
    tokenizer: Tokenizer
    reader: Reader = read_product

    @classmethod
    def load(cls, stored: StoredModel, device: torch.device, *, bf16: bool | None) -> LoadedModel:
        """`bf16` None: as trained, but fp32 on a CPU. ValueError for whatever cannot be used."""
        dtype = {True: torch.bfloat16, False: torch.float32, None: torch.float32 if device.type == "cpu" else None}[bf16]
        return cls(*stored.load(device, dtype))

    @property
    def ends(self) -> EndTokens:
        """Every id that ends a text, the model's own and those its tokenizer adds."""
        config = self.model.config
        return EndTokens(tuple(dict.fromkeys((*config.eos_token_id, *self.tokenizer.eos_ids))), config.pad_token_id)

    def complete(self, prompts: Sequence[Sequence[int]], config: GenerationConfig, *, seed: int, batch_size: int,
                 observe: Callable[[int], Observer | None] | None = None) -> Iterator[Completion]:
        """See completions.complete."""
        return complete(lambda rows: self._session(rows, config.max_new_tokens), prompts, config, self.ends, seed=seed,
                        batch_size=batch_size, observe=observe)

    @cached_property
    def _session(self) -> Callable[[int, int], Denoiser]:
        """What makes sessions; what one has recorded serves later ones."""
        return session_maker(self.model, self.reader)
