"""The sampler's reading of logits by FlashInfer's softmax and draws (`--sampling-backend flashinfer`).

A sample is as likely as with ours, but another one: that package draws by a generator of its own. It is given a seed for each position,
made of the number in [0, 1) that is the quantile of ours, so that a row's text still does not depend on the batch around it.
Probabilities are in memory in fp32, some positions at once; our kernel has none.
"""
from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from megatron_dllm.kernels.flashinfer import load_flashinfer

FLAG = "--sampling-backend flashinfer"
SEED_BITS = 53  # of a float64
CHUNK_BYTES = 256 * 2**20  # of probabilities in fp32; at V = 262144 these are 256 positions


class FlashInferReader:
    """A Reader (see sampler). `package`: FlashInfer, of which the two functions of `sampling` are taken."""

    def __init__(self, package: ModuleType):
        self.softmax, self.draw = package.sampling.softmax, package.sampling.sampling_from_probs

    def __call__(self, product: Tensor, softcap: float | None, temperature: Tensor, uniforms: Tensor, *,
                 kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(sample int64, argmax int64, entropy fp32) [N]; see sampler.read_product."""
        chunk = max(1, CHUNK_BYTES // (4 * product.shape[1]))
        parts = [self._read(*part, softcap, temperature) for part in zip(
            product.split(chunk), uniforms.split(chunk), kept.split(chunk), strict=True)]
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

    def _read(self, product: Tensor, uniforms: Tensor, kept: Tensor, softcap: float | None,
              temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = product.float()
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        logits = logits / temperature.float()
        kept.copy_(logits)
        probabilities = self.softmax(logits)
        seeds = (uniforms * 2.0**SEED_BITS).long()
        sample = self.draw(probabilities, seed=seeds, offset=torch.zeros_like(seeds))
        entropy = -torch.special.xlogy(probabilities, probabilities).sum(dim=-1)
        return sample.long(), logits.argmax(dim=-1), entropy


def flashinfer_reader(device: torch.device) -> FlashInferReader:
    """ValueError or ImportError, with the remedy, if that package cannot run on `device`."""
    return FlashInferReader(load_flashinfer(FLAG, device))
