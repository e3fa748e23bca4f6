"""A denoising step of generation, sampling included, beside transformers' generate: real widths, random weights shared by both.

The time of a step is the difference of a run of many steps and one of few, so that encoding the prompt drops out; of each the median of
some runs, after one that is not counted. No canvas is let settle before its last step; both sides' steps are counted (theirs where
nothing is compiled), and another number is an error. Every run is a new session; what is recorded or compiled for the first
one serves the others, on both sides.
"""
from __future__ import annotations

import argparse
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType

import torch
import torch._dynamo.callback
from torch._dynamo.exc import TorchDynamoException
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaForBlockDiffusion

from megatron_dllm.config import GenerationConfig
from megatron_dllm.diffusion.sampler import CounterDraws, Denoiser, generate
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.models.diffusion_gemma.static_session import session_maker
from megatron_dllm.parallel import ParallelContext

from .peers import share_weights, untied_model
from .workload import FIRST_TOKEN, DeviceNormal, real_width, release_memory, toy_width

FEW, MANY, RUNS = 4, 24, 3
NEVER_SURE = 1e-30  # mean entropy under which a canvas may settle, on both sides: none does
AIMS = {1: 5.0, 8: 3.5}  # batch size -> times faster than the peer
STATIC_AIM = 1.2  # than its static cache
EVERY = 10  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=30, help="Layers, every sixth a full one.")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8], help="Prompts at once.")
    parser.add_argument("--prompt", type=int, default=1024, help="Tokens of each prompt.")
    parser.add_argument("--static-cache-limit", type=int, default=240, metavar="SECONDS",
                        help="For transformers' static cache, which it compiles first, for minutes, all of it; 0: without it.")
    parser.add_argument("--static-cache-layers", type=int, nargs="+", metavar="LAYERS",
                        help="Layers of both sides there, one model after the other, if not --layers: more layers compile for longer.")
    parser.add_argument("--toy", action="store_true", help="Toy width, on any device.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of lines that miss their aim. What could not be measured is said, and counts for nothing."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    pair, missed = _pair(arguments.layers, arguments, device), 0
    prompts = [_prompts(batch, pair[0].config.vocab_size, arguments.prompt) for batch in arguments.batch_sizes]
    print(f"{device.type}, {pair[0].dtype}; milliseconds a denoising step, sampling included; 'rest': what a canvas takes beside its steps "
          "(encoding the prompt), no more than theirs being the aim")
    print(f"{'layers':>6} {'batch':>5} {'prompt':>6} {'cache':>8} {'ours':>9} {'transformers':>12} {'ratio':>6} {'aim':>5} {'our rest':>9} "
          f"{'their rest':>12}", flush=True)
    for prompt in prompts:
        ours, peer = _our_step(pair[0], prompt), _their_step(pair, prompt, {})
        missed += _print_line(_name(arguments.layers, prompt, "dynamic"), ours, peer, AIMS.get(len(prompt), 1.0))
    if not arguments.static_cache_limit:
        return missed
    del pair
    end = time.monotonic() + arguments.static_cache_limit
    return missed + sum(_static_lines(layers, arguments, prompts, end, device)
                        for layers in arguments.static_cache_layers or [arguments.layers])


def _static_lines(layers: int, arguments: argparse.Namespace, prompts: list[torch.Tensor], end: float, device: torch.device) -> int:
    """Beside their static cache, as long as there is time; lines that miss the aim."""
    release_memory(device)
    missed, pair = 0, None
    for prompt in prompts:
        name = _name(layers, prompt, "static")
        try:
            # A limit may not stop what it is not needed for: a model half built.
            if time.monotonic() >= end:
                raise TimeoutError
            pair = pair or _pair(layers, arguments, device)
            ours = _our_step(pair[0], prompt)
            # Nothing compiled for other shapes before: it would be compiled for shapes that vary.
            torch.compiler.reset()
            with _at_most(end - time.monotonic()), _said(name):
                peer = _their_step(pair, prompt, {"cache_implementation": "static"})
        except (TimeoutError, TorchDynamoException) as error:
            print(f"{name} not measured: {_why(error, arguments.static_cache_limit)}", flush=True)
            continue
        missed += _print_line(name, ours, peer, STATIC_AIM)
    return missed


def _prompts(batch: int, vocab_size: int, length: int) -> torch.Tensor:
    return torch.randint(FIRST_TOKEN, vocab_size, (batch, length), generator=torch.Generator().manual_seed(batch))


def _pair(num_layers: int, arguments: argparse.Namespace, device: torch.device) -> tuple[DiffusionGemma, DiffusionGemmaForBlockDiffusion]:
    """Our model and theirs, on one set of weights."""
    layers = ["full" if number % 6 == 5 or number == num_layers - 1 else "sliding" for number in range(num_layers)]
    config = (toy_width if arguments.toy else real_width)(layers)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # Theirs first: while it is built it holds the stack twice.
    theirs = untied_model(config, dtype, device).requires_grad_(False).eval()
    release_memory(device)
    model = DiffusionGemma(config, context=ParallelContext.single(device), init=DeviceNormal(device), dtype=dtype)
    model.requires_grad_(False).eval()
    share_weights(model, theirs)
    release_memory(device)
    return model, theirs


def _our_step(model: DiffusionGemma, prompt: torch.Tensor) -> tuple[float, float]:
    return _step_ms(partial(_ours, model, session_maker(model), prompt), model.context.device)


def _their_step(pair: tuple[DiffusionGemma, DiffusionGemmaForBlockDiffusion], prompt: torch.Tensor,
                asked: dict[str, str]) -> tuple[float, float]:
    model, theirs = pair
    device = model.context.device
    return _step_ms(partial(_theirs, theirs, prompt.to(device), model.config.canvas_length, asked), device)


def _name(layers: int, prompt: torch.Tensor, cache: str) -> str:
    return f"{layers:>6} {len(prompt):>5} {prompt.shape[1]:>6} {cache:>8}"


def _print_line(name: str, ours: tuple[float, float], peer: tuple[float, float], aim: float) -> bool:
    """Whether the aim is missed."""
    holds = peer[0] >= aim * ours[0] and peer[1] >= ours[1]
    print(f"{name} {ours[0]:>9.2f} {peer[0]:>12.2f} {peer[0] / ours[0]:>6.2f} {aim:>5.1f} {ours[1]:>9.1f} {peer[1]:>12.1f} "
          f"{'' if holds else 'missed'}", flush=True)
    return not holds


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """TimeoutError in what still runs after so many seconds."""
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _said(name: str) -> Iterator[None]:
    """Prints when a compilation begins and ends, and every EVERY seconds that it is not over: compiled are the decoder twice, without a
    signal of the step before and with one, and parts of the sampler."""
    start, over, handler = time.monotonic(), threading.Event(), torch._dynamo.callback.callback_handler

    def say(what: str) -> None:
        print(f"{name} {what} after {time.monotonic() - start:.0f} s", flush=True)

    def begun(*_: object) -> None:
        say("a compilation begins")

    def ended(*_: object) -> None:
        say("a compilation is done")

    def wait() -> None:
        while not over.wait(EVERY):
            say("still at it")

    handler.register_start_callback(begun)
    handler.register_end_callback(ended)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        handler.remove_start_callback(begun)
        handler.remove_end_callback(ended)


def _why(error: BaseException, limit: int) -> str:
    """In one line; a compiler's error may hide that time ran out."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError):
            return f"not done in the {limit} s of --static-cache-limit, which are for all models and batch sizes, compilation included"
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


def _step_ms(generate_with: Callable[[int], None], device: torch.device) -> tuple[float, float]:
    """Milliseconds a step, and of a run of FEW steps less these."""

    def seconds(steps: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        generate_with(steps)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    seconds(FEW)
    # In turns, so that a device that warms up does so for both.
    taken = [(seconds(FEW), seconds(MANY)) for _ in range(RUNS)]
    few, many = (statistics.median(times) for times in zip(*taken, strict=True))
    step = (many - few) / (MANY - FEW)
    return step * 1e3, (few - FEW * step) * 1e3


def _ours(model: DiffusionGemma, session: Callable[[int, int], Denoiser], prompt: torch.Tensor, steps: int) -> None:
    length = model.config.canvas_length
    config = GenerationConfig(max_new_tokens=length, max_denoising_steps=steps, confidence_threshold=NEVER_SURE)
    draws = CounterDraws(1, canvas_length=length, vocab_size=model.config.vocab_size)
    result = generate(session(len(prompt), length), prompt.tolist(), config, eos_ids=(1,), pad_id=0, draws=draws)
    assert (result.steps == steps).all(), f"a canvas settled after {result.steps.min()} of {steps} steps"


@torch.no_grad()
def _theirs(model, prompt: torch.Tensor, canvas_length: int, asked: dict[str, str], steps: int) -> None:
    # A hook would be compiled too.
    with nullcontext() if asked else _expect_calls(model.model.decoder, steps):
        model.generate(prompt, max_new_tokens=canvas_length, max_denoising_steps=steps, confidence_threshold=NEVER_SURE, eos_token_id=1,
                       pad_token_id=0, **asked)


@contextmanager
def _expect_calls(module: torch.nn.Module, number: int) -> Iterator[None]:
    """Of its forward."""
    calls: list[None] = []
    hook = module.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield
    finally:
        hook.remove()
    assert len(calls) == number, f"a canvas of theirs settled after {len(calls)} of {number} steps"
