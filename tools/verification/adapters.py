"""A run's adapters as PEFT loads them into transformers' model beside the run's base: the same logits as ours.

Usage: python tools/verify.py adapters --load RUN [--peft DIR]     (RUN was trained from a transformers directory; needs peft)
"""
from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
import transformers
from torch import Tensor

from megatron_dllm.data.build import build_sources
from megatron_dllm.models.diffusion_gemma.inference import Session
from megatron_dllm.models.diffusion_gemma.loading import load_for_inference, open_run, stored_run
from verification.table import Figure, print_figures

PROMPTS = 4
LIMIT = 1e-4  # of logits of size 30 at most, in fp32 over another order of sums


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", required=True, metavar="RUN", help="A run's folder, with adapters.")
    parser.add_argument("--peft", metavar="DIR", help="Its adapters in PEFT's format; without it: RUN/peft.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of missed figures."""
    import peft  # an optional package

    from verification.oracle import TransformersDenoiser

    folder = Path(arguments.load)
    found = open_run(folder)
    base = found.state.base.get("path")
    if not base:
        raise ValueError(f"{folder} holds no adapters beside a transformers directory; name a run with --lora-rank and such a base")
    ours, tokenizer = load_for_inference(folder, torch.device("cpu"), torch.float32)
    settings = stored_run(found)
    source = build_sources(settings.data, settings.model, tokenizer, seed=settings.training.seed).test
    prompts = [torch.from_numpy(source.tokens(i)[:source.lengths[i, 0]]).long() for i in range(PROMPTS)]
    kind = transformers.models.diffusion_gemma.modeling_diffusion_gemma.DiffusionGemmaForBlockDiffusion
    theirs = kind.from_pretrained(base, attn_implementation="sdpa", dtype=torch.float32).eval()
    plain = logits(TransformersDenoiser(theirs, PROMPTS), prompts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.PeftModel.from_pretrained(theirs, arguments.peft or folder / "peft").eval()
    expected, got = logits(Session(ours, PROMPTS), prompts), logits(TransformersDenoiser(adapted.base_model.model, PROMPTS), prompts)
    print(f"peft {peft.__version__}, transformers {transformers.__version__}: adapters of {folder} beside {base}, {PROMPTS} prompts of "
          f"{source.name}, in fp32")
    return print_figures("adapters", [
        Figure("logits without a signal, from ours", distance(expected[0], got[0]), LIMIT, "largest difference"),
        Figure("logits given those, from ours", distance(expected[1], got[1]), LIMIT, "largest difference"),
        # What the adapters do is far more than the limit, or the two lines above would show nothing.
        Figure("negated: what the adapters change", -distance(plain[0], got[0]), -1000 * LIMIT, "at least 1000 times the limit")])


@torch.no_grad()
def logits(denoiser, prompts: list[Tensor]) -> list[Tensor]:
    """Of random canvases after the prompts, without a signal and then with it."""
    generator = torch.Generator().manual_seed(9)
    canvas = torch.randint(3, denoiser.vocab_size, (len(prompts), denoiser.canvas_length), generator=generator)
    rows = torch.arange(len(prompts))
    denoiser.encode(prompts)
    first = denoiser.denoise(canvas, None, rows)
    return [first, denoiser.denoise(canvas, first, rows)]


def distance(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()
