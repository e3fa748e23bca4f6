"""Training steps of low-rank adapters (attention and dense MLP, rank 16) beside transformers with PEFT: one frozen base in one memory.

Before the times: frozen, both sides have one loss; adapters whose B is zero change no bit of ours; updates lower the loss; the base stays
as it is, bit for bit. Rows in the order of what they are worth; one that fails, or has no time left, does not cost the others.
"""
from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megatron_dllm.config import LoRAConfig, ModelConfig, OptimizerConfig
from megatron_dllm.models.diffusion_gemma.lora import add_adapters, is_adapter
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.training.graphs import GraphedMicrobatches, graphed
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import train_step
from megatron_dllm.transformer.precision import freeze

from .exposed import kernel_table
from .peers import TransformersStep, share_weights, untied_model
from .workload import DeviceNormal, Timing, Workload, calm_model, measure, real_width, release_memory, synthetic, toy_width, utilization

RANK, LR = 16, 1e-4
AGREE = 2e-3  # both sides' losses, relative
PEFT_MODULES = r"model\.(encoder\.language_model|decoder)\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"


@dataclass(frozen=True)
class Row:
    """`aim`: times faster than the peer; None: measured for itself. `peak_gib`: the most that it may hold."""

    batch: int
    graphs: bool
    aim: float | None = None
    peak_gib: float | None = None


ROWS = (Row(4, True, 5.0, 75.0), Row(1, True, 8.0), Row(4, False), Row(1, False))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=30, help="Layers, every sixth and the last a full one.")
    parser.add_argument("--seq-length", type=int, default=1024, help="Tokens of a row, half of them a prompt.")
    parser.add_argument("--draft-pass", choices=("joint", "apart", "shared"), default="joint", help="As in training, on a GPU.")
    parser.add_argument("--repeats", type=int, default=4, help="Timed steps of each row and side.")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="Print the N kernels that take longest in each of our steps.")
    parser.add_argument("--limit", type=float, default=115.0, help="Seconds after which no further row is begun.")
    parser.add_argument("--no-peer", action="store_true", help="Without transformers and PEFT beside it.")
    parser.add_argument("--toy", action="store_true", help="Toy width, on any device.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of checks and aims that are missed, and of rows that failed."""
    return Suite(arguments).run()


class Suite:
    """Both models on one memory, and what has been found so far."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.start, self.missed, self.lines = arguments, time.monotonic(), 0, []
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        layers = ["full" if number % 6 == 5 or number == arguments.layers - 1 else "sliding" for number in range(arguments.layers)]
        self.config: ModelConfig = (toy_width if arguments.toy else real_width)(layers)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.has_peer = not arguments.no_peer and importlib.util.find_spec("peft") is not None
        passes = arguments.draft_pass if self.device.type == "cuda" else "shared"
        self.works: dict[int, Workload] = {
            batch: synthetic(self.config, batch, arguments.seq_length, self.device, passes=passes, seed=1) for batch in (4, 1)}

    def run(self) -> int:
        self.say(f"torch {torch.__version__}, {torch.cuda.get_device_name() if self.device.type == 'cuda' else 'CPU'}, {self.dtype}"
                 + ("" if self.has_peer else "; no peer" if self.arguments.no_peer else "; PEFT is not installed: no peer"))
        # Theirs first: while it is built it holds the stack twice.
        theirs = untied_model(self.config, self.dtype, self.device).requires_grad_(False) if self.has_peer else None
        release_memory(self.device)
        model = calm_model(self.config, self.device, self.dtype)
        freeze(model, model.dtype)
        if theirs is not None:
            share_weights(model, theirs)
        release_memory(self.device)
        self.say(f"{len(self.config.layer_types)} layers, {sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters built")
        self._check_frozen(model, theirs)
        self._measure(model, theirs)
        self.print_table()
        return self.missed

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:5.1f} s] {text}", flush=True)

    def check(self, name: str, holds: bool) -> None:
        """Print and count a check."""
        self.missed += not holds
        self.say(f"{'ok    ' if holds else 'MISSED'} {name}")

    def _check_frozen(self, model: DiffusionGemma, theirs: nn.Module | None) -> None:
        """One loss on both sides, and from here on the model with adapters that do nothing yet."""
        work = self.works[1]
        with torch.no_grad():
            frozen = model(work.inputs).total.item()
            if theirs is not None:
                peer = TransformersStep(theirs.train(), self.config, work).losses().item()
                off = abs(frozen - peer) / abs(peer)
                self.check(f"frozen: loss {frozen:.5f}, transformers {peer:.5f}, relative {off:.1e} (at most {AGREE:g})", off <= AGREE)
            add_adapters(model, LoRAConfig(lora_rank=RANK, lora_alpha=RANK, lora_targets=("attention", "mlp")), DeviceNormal(self.device))
            beside = model(work.inputs).total.item()
        self.check(f"with B = 0 the loss is {beside:.7f}, without adapters {frozen:.7f}", beside == frozen)

    def _check_training(self, model: DiffusionGemma, optimizer: MasterOptimizer) -> None:
        before = _bits(model)
        losses = []
        for _ in range(5):
            losses.append(train_step(model, optimizer, [self.works[1].inputs], 1e-3).loss)
            model.routing.drain()
        self.check(f"5 updates on one batch: losses {', '.join(f'{loss:.4f}' for loss in losses)}", losses[-1] < losses[0])
        self.check("the base is as it was, bit for bit", _bits(model) == before)

    def _measure(self, model: DiffusionGemma, theirs: nn.Module | None) -> None:
        optimizer = MasterOptimizer(model, OptimizerConfig(lr=LR, weight_decay=0.0), model.context)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        dtypes = {piece.gradient.dtype for piece in optimizer.buckets.pieces()}
        self.say(f"{trained:,} trained parameters; our gradients {dtypes}, theirs {self.dtype}")
        self._guarded("training", lambda: self._check_training(model, optimizer))
        peer_step = None if theirs is None else _PeftStep(theirs, self.config)
        peers: dict[int, Timing | None] = {}
        for row in ROWS:
            if row.graphs and self.device.type != "cuda":
                continue
            name = f"{row.batch} x {self.arguments.seq_length}, {'CUDA graphs' if row.graphs else 'eager'}"
            ours = self._guarded(name, lambda row=row: self._ours(row, model, optimizer))
            optimizer.drop_gradients()
            release_memory(self.device)
            if peer_step is not None and row.batch not in peers:
                peers[row.batch] = self._guarded(f"{row.batch} x {self.arguments.seq_length}, PEFT", lambda row=row: measure(
                    lambda: peer_step(self.works[row.batch]), self.device, warmup=2, repeats=self.arguments.repeats))
                release_memory(self.device)
            if ours is not None:
                self._note(row, name, ours, peers.get(row.batch))

    def _guarded(self, name: str, function: Callable[[], Timing | None]) -> Timing | None:
        if time.monotonic() - self.start > self.arguments.limit:
            self.say(f"no time left for {name}")
            return None
        try:
            return function()
        except (RuntimeError, ValueError) as error:  # too little memory, a kernel's failure: the other rows are still wanted
            self.missed += 1
            self.say(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}")
            return None

    def _ours(self, row: Row, model: DiffusionGemma, optimizer: MasterOptimizer) -> Timing:
        graphs: GraphedMicrobatches | None = graphed(model, limit=1, message=self.say) if row.graphs else None

        def step() -> float:
            loss = train_step(model, optimizer, [self.works[row.batch].inputs], LR, graphs=graphs).loss
            model.routing.drain()
            return loss

        timing = measure(step, self.device, warmup=3 if row.graphs else 2, repeats=self.arguments.repeats)
        if self.arguments.kernels and self.device.type == "cuda":
            print(kernel_table(step, self.arguments.kernels), flush=True)
        return timing

    def _note(self, row: Row, name: str, ours: Timing, peer: Timing | None) -> None:
        tokens = self.works[row.batch].num_tokens
        mfu = utilization(self.config, self.works[row.batch], ours.median, self.device, frozen=True)
        line = f"{name:26} {ours.median:9.1f} {ours.least:9.1f} {tokens / ours.median * 1e3:9.0f} {mfu:5.0%} {ours.peak_gib:7.1f}"
        missed = []
        if peer is not None:
            ratio, aim = peer.median / ours.median, "-" if row.aim is None else f"{row.aim:.1f}"
            line += f" {peer.median:9.1f} {tokens / peer.median * 1e3:9.0f} {peer.peak_gib:7.1f} {ratio:6.2f} {aim:>5}"
            missed += ["ratio missed"] if row.aim is not None and ratio < row.aim else []
        if row.peak_gib is not None and not self.arguments.toy:
            missed += [f"memory missed ({row.peak_gib:g} GiB)"] if ours.peak_gib > row.peak_gib else []
        self.missed += len(missed)
        self.lines.append(f"{line} {', '.join(missed)}")
        self.say(self.lines[-1])

    def print_table(self) -> None:
        print(f"LoRA of rank {RANK} on attention and dense MLP, {len(self.config.layer_types)} layers, AdamW in the step; GiB: the most "
              "that was held, graphs' pools included")
        print(f"{'row':26} {'ours ms':>9} {'least':>9} {'tokens/s':>9} {'MFU':>5} {'GiB':>7} {'PEFT ms':>9} {'tokens/s':>9} {'GiB':>7} "
              f"{'ratio':>6} {'aim':>5}")
        print("\n".join(self.lines))


class _PeftStep:
    """Forward, backward and AdamW of transformers' model with PEFT's adapters, which it is given here."""

    def __init__(self, model: nn.Module, config: ModelConfig):
        from peft import LoraConfig, inject_adapter_in_model  # an optional package, looked for before

        adapters = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=PEFT_MODULES)
        self.model, self.config = inject_adapter_in_model(adapters, model).train(), config
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0,
                                           fused=model.device.type == "cuda")

    def __call__(self, work: Workload) -> float:
        loss = TransformersStep(self.model, self.config, work).losses()
        loss.backward()
        value = loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value


def _bits(model: nn.Module) -> list[int]:
    """What the bits of every frozen tensor sum up to."""

    def frozen() -> Iterator[torch.Tensor]:
        for name, parameter in model.named_parameters():
            if not is_adapter(name):
                yield parameter.detach()

    return [p.view(torch.int16 if p.itemsize == 2 else torch.int32).sum(dtype=torch.int64).item() for p in frozen()]
