"""Our model, losses and gradients against transformers' own classes, on a toy in fp32.

The toy's norms, router scales, layer scalars and window all differ from 1 and from each other. transformers runs each example alone, at its
real positions; we run them all in one flat batch, with and without self-conditioning as the draws say. Then: decoding only
the chosen canvas against decoding all; the exported directory loaded by transformers. Usage: python tools/verify.py parity [--seed N]
"""
from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from megatron_dllm.checkpoint.model_state import load_whole_tensors, named_tensors, whole_tensors_reader
from megatron_dllm.config import ObjectiveConfig
from megatron_dllm.diffusion.batch_plan import BatchPlan, RowRequest, fit_example, plan_batch
from megatron_dllm.diffusion.inputs import MicrobatchInputs
from megatron_dllm.diffusion.passes import PassOptions, microbatch_inputs
from megatron_dllm.diffusion.random import DrawKey, Stream
from megatron_dllm.diffusion.streams import Streams, build_streams
from megatron_dllm.models.diffusion_gemma.build import UNSET
from megatron_dllm.models.diffusion_gemma.huggingface import links
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.models.diffusion_gemma.transformers_directory import TransformersDirectory
from megatron_dllm.models.diffusion_gemma.transformers_export import Export
from megatron_dllm.parallel import ParallelContext
from verification.sampler import tiny_oracle
from verification.table import Figure, print_figures

LENGTHS = ((11, 37), (5, 2), (60, 64), (3, 100), (0, 41), (29, 16))  # (prompt, response); windows are shorter than the longest
SEQ_LENGTH = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="Seed of the weights, the tokens and the draws.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of missed figures."""
    torch.set_num_threads(1)
    oracle = tiny_oracle(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        oracle.save_pretrained(Path(folder) / "theirs")
        source = TransformersDirectory.open(Path(folder) / "theirs")
        model = DiffusionGemma(source.config, context=ParallelContext.single(), init=UNSET)
        load_whole_tensors(model, source.tensors(), "the oracle")
        case = make_case(model, arguments.seed)
        figures = [*compare(oracle, model, case), *decode_all(model, case), export_round_trip(oracle, model, case, Path(folder))]
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {len(LENGTHS)} examples, "
          f"{sum(e.self_conditioned for e in case.examples)} self-conditioned; smallest top-{model.config.moe_router_topk} gap "
          f"{case.routing_gap:.1e}")
    return print_figures("parity", figures)


@dataclass(frozen=True)
class Case:
    """One batch: its plan, its tokens (whole, fill included), its streams and inputs."""

    plan: BatchPlan
    objective: ObjectiveConfig
    raw: Sequence[np.ndarray]
    streams: Streams
    inputs: MicrobatchInputs
    routing_gap: float

    @property
    def examples(self):
        return self.plan.microbatches[0][0].examples


def make_case(model: DiffusionGemma, seed: int) -> Case:
    """Draw a batch. A seed whose routing has a near-tie (gap under 1e-6, where rounding decides) is passed over, by rule, for the next."""
    config, objective = model.config, ObjectiveConfig()
    for attempt in range(seed, seed + 100):
        rows = [RowRequest([i], [DrawKey(attempt, Stream.TRAIN, 0, i, 0)],
                           [fit_example(*lengths, seq_length=SEQ_LENGTH, canvas_length=config.canvas_length)], [False])
                for i, lengths in enumerate(LENGTHS)]
        plan = plan_batch(rows, objective, micro_batch_size=len(rows))
        coins = [example.self_conditioned for example in plan.microbatches[0][0].examples]
        generator = np.random.default_rng(attempt)
        raw = [generator.integers(3, config.vocab_size, e.fit.prompt + e.fit.response) for e in plan.microbatches[0][0].examples]
        streams = build_streams(plan.microbatches[0][0], raw, objective, plan.denominators, vocab_size=config.vocab_size,
                                fill_token=config.fill_token_id)
        inputs = microbatch_inputs(streams, config, PassOptions(torch.float32))
        gap = smallest_gap(model, inputs)
        if any(coins) and not all(coins) and gap > 1e-6:
            return Case(plan, objective, raw, streams, inputs, gap)
    raise AssertionError("no seed without a routing near-tie in 100")


@torch.no_grad()
def smallest_gap(model: DiffusionGemma, inputs: MicrobatchInputs) -> float:
    """The smallest difference between the k-th and the next probability of any routing decision."""
    gaps = []

    def record(module, _, routing):
        top = routing.probabilities.topk(module.topk + 1).values
        gaps.append((top[:, -2] - top[:, -1]).min().item())

    hooks = [block.moe.router.register_forward_hook(record) for block in model.layers.values()]
    model(inputs)
    for hook in hooks:
        hook.remove()
    return min(gaps)


@dataclass
class Outputs:
    """What both sides compute: hidden states of clean tokens, canvas logits without and with a signal, both losses (global means)."""

    encoder: Tensor
    first: Tensor
    second: Tensor
    encoder_loss: Tensor
    decoder_loss: Tensor


def ours(model: DiffusionGemma, case: Case) -> Outputs:
    """Our side; gradients are left on the parameters."""
    inputs, config = case.inputs, model.config
    terms = model(inputs)
    terms.total.backward()
    with torch.no_grad():
        clean, canvas = model.embed(inputs.clean.tokens), model.self_conditioning(model.embed(inputs.canvas.tokens), None)
        hidden, contexts = model.run_layers(torch.cat([clean, canvas]), inputs.first_pass)
        signal = model.soft_signal(hidden[inputs.draft_rows])
        again, _ = model.run_layers(
            model.self_conditioning(model.embed(inputs.second_tokens), signal), inputs.second_pass, contexts)
        num_clean = inputs.first_pass.num_clean
        return Outputs(hidden[:num_clean], model.logits(hidden[num_clean:]).unflatten(0, (-1, config.canvas_length)),
                       model.logits(again).unflatten(0, (-1, config.canvas_length)), terms.weighted[0], terms.weighted[1:].sum())


def theirs(oracle, model: DiffusionGemma, case: Case) -> Outputs:
    """transformers, one example at a time; gradients are left on its parameters."""
    config, counts = model.config, case.plan.denominators
    canvases = case.streams.canvas.tokens.reshape(-1, config.canvas_length)
    hidden, first, second, encoder_loss, decoder_loss = [], [], [], [], []
    for number, (example, raw) in enumerate(zip(case.examples, case.raw, strict=True)):
        fill = np.full(example.fit.total - len(raw), config.fill_token_id)
        tokens = torch.from_numpy(np.concatenate([raw, fill]))[None]
        encoded = oracle.model.encoder(input_ids=tokens, cache=transformers.DynamicCache())
        states = encoded.last_hidden_state[0]
        encoder_loss.append(F.cross_entropy(soft_capped(oracle, states[:-1]), tokens[0, 1:]))
        start = example.canvas_start(example.canvases[0])
        arguments = dict(
            decoder_input_ids=torch.from_numpy(canvases[number])[None], cache=encoded.cache,
            decoder_position_ids=torch.arange(start, start + config.canvas_length)[None],
            decoder_attention_mask=masks(config, tokens.shape[1], start))
        logits = soft_capped(oracle, oracle.model.decoder(**arguments).last_hidden_state[0])
        first.append(logits.detach())
        if example.self_conditioned:
            conditioned = oracle.model.decoder(self_conditioning_logits=logits.detach()[None], **arguments)
            logits = soft_capped(oracle, conditioned.last_hidden_state[0])
            second.append(logits.detach())
        decoder_loss.append(F.cross_entropy(logits, tokens[0, start:start + config.canvas_length], reduction="sum"))
        hidden.append(states.detach())
    mean_encoder = torch.stack(encoder_loss).mean()
    mean_decoder = torch.stack(decoder_loss).sum() / (len(decoder_loss) * config.canvas_length)
    assert counts.encoder == len(encoder_loss) and counts.decoder == len(decoder_loss) * config.canvas_length
    (mean_encoder + mean_decoder).backward()
    return Outputs(torch.cat(hidden), torch.stack(first), torch.stack(second), mean_encoder.detach(), mean_decoder.detach())


def soft_capped(oracle, hidden: Tensor) -> Tensor:
    """Their output layer."""
    return torch.tanh(oracle.lm_head(hidden).float() / 30.0) * 30.0


def masks(config, length: int, start: int) -> dict[str, Tensor]:
    """Additive masks [1, 1, C, length + C] of a canvas that starts at `start`, written out from the rule of docs/model.md, section 2."""
    key, canvas = torch.arange(length), torch.ones(config.canvas_length, dtype=torch.bool)
    seen = {"full_attention": key < start, "sliding_attention": (key < start) & (key >= start - (config.window_size - 1))}
    return {kind: torch.zeros(1, 1, config.canvas_length, length + config.canvas_length).masked_fill(
        ~torch.cat([keep, canvas]), torch.finfo(torch.float32).min) for kind, keep in seen.items()}


def compare(oracle, model: DiffusionGemma, case: Case) -> list[Figure]:
    """Outputs, losses and every gradient of both sides."""
    left, right = ours(model, case), theirs(oracle, model, case)
    figures = []
    for field in dataclasses.fields(Outputs):
        a, b = getattr(left, field.name), getattr(right, field.name)
        scale, largest = b.abs().max().item(), (a - b).abs().max().item()
        limit = 1e-6 if field.name.endswith("loss") else 1e-5
        figures.append(Figure(
            f"{field.name}: largest difference, relative to the largest value", largest / scale, limit, f"largest value {scale:.3g}"))
    grads = dict(model.named_parameters())
    their_grads = {f"model.decoder.{name}": p.grad for name, p in oracle.model.decoder.named_parameters()}
    read = whole_tensors_reader(their_grads)
    pairs = {link.ours: link.to_ours((0,) * len(link.shape), link.shape, read) for link in links(model.config) if link.ours in grads}
    norm = torch.cat([g.flatten() for g in pairs.values()]).norm().item()
    worst, floor_only = (0.0, "-"), []
    for name, reference in pairs.items():
        difference = (grads[name].grad - reference).abs()
        excess = (difference / (1e-5 * reference.abs() + 1e-7 * norm)).max().item()
        worst = max(worst, (excess, name))
        if (difference > 1e-5 * reference.abs()).any():
            floor_only.append(name)
    figures.append(Figure(
        f"every gradient ({len(pairs)} tensors): |d| / (1e-5 |ref| + 1e-7 |g|)", worst[0], 1.0, f"worst {worst[1]}, |g| {norm:.4g}"))
    figures.append(Figure(
        "embedding: its soft-embedding part is there (share of |g|)", -soft_part(model, case) / norm, -1e-4,
        "at least 1e-4, a thousand times the floor"))
    print(f"{len(floor_only)} of {len(pairs)} gradients have an element that passes by the floor 1e-7 |g| alone")
    return figures


def soft_part(model: DiffusionGemma, case: Case) -> float:
    """Norm of what the embedding's gradient would lack if the soft embedding were detached."""
    whole = model.embedding.weight.grad.clone()
    model.zero_grad()
    signal = DiffusionGemma.soft_signal
    try:
        DiffusionGemma.soft_signal = lambda self, draft, shared: signal(self, draft, shared).detach()
        model(case.inputs).total.backward()
    finally:
        DiffusionGemma.soft_signal = signal
    return (whole - model.embedding.weight.grad).norm().item()


def decode_all(model: DiffusionGemma, case: Case) -> list[Figure]:
    """Every canvas of every response decoded, the chosen one scored, against decoding the chosen one alone: loss and gradients."""
    model.zero_grad()
    one = model(case.inputs)
    one.total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    every = dataclasses.replace(case.plan.microbatches[0][0], rows=tuple(
        tuple(dataclasses.replace(e, canvases=tuple(range(e.fit.num_canvases))) for e in row) for row in case.plan.microbatches[0][0].rows))
    streams = build_streams(every, case.raw, case.objective, case.plan.denominators, vocab_size=model.config.vocab_size,
                            fill_token=model.config.fill_token_id)
    chosen = np.concatenate([np.repeat([canvas in e.canvases for canvas in range(e.fit.num_canvases)], e.fit.canvas_length)
                             for e in case.examples])
    streams = dataclasses.replace(streams, canvas=dataclasses.replace(streams.canvas, weights=streams.canvas.weights * chosen))
    model.zero_grad()
    all_ = model(microbatch_inputs(streams, model.config, PassOptions(torch.float32)))
    all_.total.backward()
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
    worst = max((p.grad - gradients[name]).abs().max().item() / norm for name, p in model.named_parameters())
    # Relative, as the losses against transformers are: at a loss of 34 fp32's unit is 4e-6.
    loss = ((one.total - all_.total).abs() / one.total.abs()).item()
    return [Figure("decode one canvas against all: loss, relative", loss, 1e-6, ""),
            Figure("decode one canvas against all: gradients, largest |d| / |g|", worst, 1e-6, "")]


def export_round_trip(oracle, model: DiffusionGemma, case: Case, folder: Path) -> Figure:
    """transformers loads what we export, and gives the same canvas logits as when it loads what we imported."""
    tensors = dict(named_tensors(model))
    Export(model.config, whole_tensors_reader(tensors), lambda name: torch.float32).write(folder / "ours")
    sides = []
    for name in ("theirs", "ours"):
        loaded, report = type(oracle).from_pretrained(folder / name, output_loading_info=True)
        assert not any(report.values()), report
        sides.append(loaded.eval())
    tokens = torch.from_numpy(case.raw[2])[None]
    canvas = torch.from_numpy(case.streams.canvas.tokens[:model.config.canvas_length])[None]
    with torch.no_grad():
        results = [side(input_ids=tokens, cache=transformers.DynamicCache(), decoder_input_ids=canvas).logits for side in sides]
    return Figure("exported and loaded by transformers: canvas logits", (results[0] - results[1]).abs().max().item(), 0.0, "equal")
