"""What the embedding, the loss and the soft embedding share: a vocabulary cut over `tp`, and logits a chunk at a time.

T tokens, n tokens of a chunk, v rows of the vocabulary on this rank, H hidden, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dllm.kernels.precision import accumulation_dtype
from megatron_dllm.parallel.context import Group

CHUNK_BYTES, CHUNK_BYTES_ON_GPU = 1 << 29, 1 << 31
# Each chunk adds to the weight's gradient, if there is one, which at 262144 rows reads and writes 6 GB: a GPU takes 4096 tokens there.
CHUNK_BYTES_OF_TRAINED = 1 << 32


@dataclass(frozen=True)
class VocabularyRange:
    """Tokens [start, start + size) live on this rank, in the first rows of its weight; the others are fill."""

    start: int
    size: int

    @staticmethod
    def of(weight: Tensor, vocab_size: int, tp: Group) -> VocabularyRange:
        """The range of our shard [ceil(V / R), H] of a vocabulary."""
        rows = -(-vocab_size // tp.size)
        assert weight.shape[0] == rows, f"vocabulary {vocab_size} over {tp.size} ranks takes {rows} rows a rank, not {weight.shape[0]}"
        start = min(tp.rank * rows, vocab_size)
        return VocabularyRange(start, min(rows, vocab_size - start))

    def locate(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(row of each token, clamped into our range; whether the token is ours)."""
        local = tokens - self.start
        return local.clamp(0, max(self.size - 1, 0)), (local >= 0) & (local < self.size)


def check_tokens(tokens: Tensor, vocab_size: int, name: str) -> None:
    """Stop where a token is outside the vocabulary (on a GPU without waiting for the answer)."""
    torch._assert_async(((tokens >= 0) & (tokens < vocab_size)).all(), f"{name} outside the vocabulary of {vocab_size}")


def token_chunks(num_tokens: int, weight: Tensor, chunk_bytes: int | None, *, is_trained: bool = False) -> Iterator[slice]:
    """Slices of the tokens whose logits take `chunk_bytes` at most (None: as suits the device, and whether each adds to a gradient of the
    weight), one token at least; as many on every rank of tp."""
    if chunk_bytes is None:
        on_gpu = CHUNK_BYTES_OF_TRAINED if is_trained else CHUNK_BYTES_ON_GPU
        chunk_bytes = on_gpu if weight.is_cuda else CHUNK_BYTES
    step = max(1, chunk_bytes // (weight.shape[0] * accumulation_dtype(weight.dtype).itemsize))
    return (slice(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step))


def capped_logits(hidden: Tensor, rows: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(hidden @ rows.T / softcap) [n, v] in fp32 at least; without a cap the product alone."""
    logits = product(hidden, rows.t())
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32 at least, not rounded to the inputs' dtype on the way."""
    dtype = accumulation_dtype(a.dtype)
    if a.dtype == dtype:
        return a @ b
    # A GPU's tensor cores take bf16 and give fp32; on a CPU bf16 matrices are cast (the same products, exactly).
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the dtype of `total`, fp32 at least."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
