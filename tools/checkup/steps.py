"""Trials of what is around the layers: the output layer's loss, the sampler's reading of logits, the optimizer's backends, CUDA graphs."""
from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dllm.config import OptimizerConfig
from megatron_dllm.diffusion import sampler
from megatron_dllm.diffusion.sampling_flashinfer import flashinfer_reader
from megatron_dllm.kernels.graphs import CudaRecorder
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import cross_entropy
from megatron_dllm.tensor_parallel.soft_embedding import soft_embedding
from megatron_dllm.tensor_parallel.vocabulary import VocabularyRange
from megatron_dllm.training.algorithms import BACKENDS, PACKAGES, algorithm_of

from .layers import NO_CUDA, TOKENS, dtype_of, pair
from .report import outcome_of
from .trials import TOLERANCES, Function, Trial, compared, numbers, relative


def trials(device: torch.device) -> Iterator[Trial]:
    """All of them."""
    yield from head_trials(device)
    yield from sampler_trials(device)
    for backend in BACKENDS:
        package = PACKAGES.get(backend)
        absent = None
        if package is not None and importlib.util.find_spec(package.partition(".")[0]) is None:
            absent = f"{package.partition('.')[0]} is not installed"
        yield Trial("AdamW, 3 steps", backend, partial(adamw, backend, device), absent, optional=package is not None)
    yield Trial("CUDA graphs", "recorded, replayed", partial(graph, device), None if device.type == "cuda" else NO_CUDA)


def sampler_trials(device: torch.device) -> Iterator[Trial]:
    """Tempered logits, entropy, argmax, and the sample: a uniform number in the middle of a probable token's quantiles."""
    count, vocabulary, temperature = 6, 5000, 0.7
    logits = 2 * numbers(count, vocabulary, device=device, dtype=torch.float32, grad=False)
    probability = (logits.double() / temperature).softmax(-1)
    chosen = probability.topk(3).indices[:, 2:]
    uniforms = (probability.cumsum(-1).gather(1, chosen) - probability.gather(1, chosen) / 2)[:, 0].float()

    def oracle(values: Tensor) -> tuple[Tensor, ...]:
        tempered = values / temperature
        probability = tempered.softmax(-1)
        return tempered, chosen[:, 0], tempered.argmax(-1), -(probability * probability.log()).sum(-1)

    def in_torch(values: Tensor) -> tuple[Tensor, ...]:
        # On the CPU, where there are no kernels; float64 would take the same path.
        reading = sampler.read_logits(values.cpu()[None], temperature, uniforms.cpu()[None], torch.float32)
        return tuple(x[0].to(device) for x in (reading.logits, reading.sample, reading.argmax, reading.entropy))

    def by_kernel() -> tuple[float, float]:
        from megatron_dllm.kernels import sampling

        return compared(lambda values: sampling.read_logits(values, temperature, uniforms, torch.float32), oracle, [logits])

    def capped() -> tuple[float, float]:
        from megatron_dllm.kernels import sampling

        return compared(lambda values: sampling.soft_capped(values, 30.0), lambda values: 30 * torch.tanh(values / 30), [logits])

    def by_package() -> tuple[float, float]:
        # Its draws are its own: of sure positions alone they can be foretold.
        sure = torch.where(torch.arange(vocabulary, device=device) == 7, 100.0, logits)
        kept, warmth = torch.empty_like(sure), torch.tensor(temperature, dtype=torch.float64, device=device)

        def read(values: Tensor) -> tuple[Tensor, ...]:
            sample = reader(sure, None, warmth, uniforms.double(), kept=kept)[0]
            _, argmax, entropy = reader(values, None, warmth, uniforms.double(), kept=kept)
            return kept, sample, argmax, entropy

        reader = flashinfer_reader(device)
        return compared(read, lambda values: (oracle(values)[0], torch.full_like(chosen[:, 0], 7), *oracle(values)[2:]), [logits])

    absent, refused = None if device.type == "cuda" else NO_CUDA, outcome_of(partial(flashinfer_reader, device))
    reason = refused.first_line.partition("flashinfer: ")[2] if refused.error else None
    yield Trial("sampler reads logits", "torch", lambda: compared(in_torch, oracle, [logits]))
    yield Trial("sampler reads logits", "Triton kernel", by_kernel, absent)
    yield Trial("sampler reads logits", "FlashInfer", by_package, reason, optional=True)
    yield Trial("soft cap of generation", "Triton kernel", capped, absent)


def head_trials(device: torch.device) -> Iterator[Trial]:
    """Cross entropy of the output layer and its gradient at the logits; the embedding that its softmax expects."""
    vocabulary = 5000
    draw = torch.Generator().manual_seed(3)
    targets = torch.randint(0, vocabulary, (TOKENS,), generator=draw).to(device)
    weights = torch.rand(TOKENS, generator=draw).to(device)
    head = cross_entropy._Head(30.0, ParallelContext.single(device).tp, VocabularyRange(0, vocabulary), 1 << 29)

    def scored(score: Callable) -> Function:
        def loss_and_gradient(product: Tensor) -> tuple[Tensor, Tensor]:
            scores, gradient = score(cross_entropy._Chunk(product, targets, weights, None, None), head, torch.float32)
            return scores.per_token, gradient
        return loss_and_gradient

    def oracle(product: Tensor) -> tuple[Tensor, Tensor]:
        product = product.clone().requires_grad_()
        loss = F.cross_entropy(30 * torch.tanh(product / 30), targets, reduction="none")
        return loss.detach(), torch.autograd.grad((loss * weights).sum(), product)[0]

    yield from pair("cross entropy", scored(cross_entropy._score_in_torch), lambda: scored(cross_entropy._score_by_kernel), oracle,
                    lambda dtype: [10 * numbers(TOKENS, vocabulary, device=device, dtype=dtype, grad=False)], device, torch.float32)

    context = ParallelContext.single(device)

    def averaged(hidden: Tensor, weight: Tensor) -> Tensor:
        return soft_embedding(hidden, weight, softcap=30.0, scale=1.0, tp=context.tp, vocab_size=vocabulary)

    def by_softmax(hidden: Tensor, weight: Tensor) -> Tensor:
        return (30 * torch.tanh(hidden @ weight.detach().T / 30)).softmax(-1) @ weight

    def vectors() -> list[Tensor]:
        dtype = dtype_of(device)
        return [numbers(TOKENS, 64, device=device, dtype=dtype, grad=False) / 4, numbers(vocabulary, 64, device=device, dtype=dtype)]

    yield Trial("soft embedding", "Triton kernels" if device.type == "cuda" else "torch", lambda: compared(averaged, by_softmax, vectors()))


def adamw(backend: str, device: torch.device) -> tuple[float, float]:
    """Three steps from the same start, against the formulas in float64 (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2)."""
    config = OptimizerConfig(optimizer_backend=backend, lr=0.1)
    start = numbers(200, 3, device=device, dtype=torch.float32, grad=False)
    gradients = [numbers(200, 3, device=device, dtype=torch.float32, seed=1 + n, grad=False) for n in range(3)]
    master = start.clone().requires_grad_()
    optimizer = algorithm_of(backend, [master]).make([{"params": [master], "copies": [None], "weight_decay": 0.3}], config)
    want, mean, square = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    first, second = config.adam_beta1, config.adam_beta2
    for number, gradient in enumerate(gradients, 1):
        master.grad = gradient.clone()
        optimizer.step()
        wide = gradient.double()
        mean, square = first * mean + (1 - first) * wide, second * square + (1 - second) * wide**2
        size = (square / (1 - second**number)).sqrt() + config.adam_eps
        want = want * (1 - config.lr * 0.3) - config.lr * mean / (1 - first**number) / size
    return relative(master.detach(), want), TOLERANCES[torch.float32]


def graph(device: torch.device) -> tuple[float, float]:
    """Forward and backward recorded on some numbers and replayed on others, against float64."""
    weight = numbers(32, 32, device=device, dtype=torch.float32)
    static = torch.zeros(16, 32, device=device)

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        loss = (x @ w).square().sum()
        return loss.detach(), torch.autograd.grad(loss, w)[0]

    recorder = CudaRecorder(device)
    recorder.warm_up(lambda: step(static, weight))
    recording = recorder.record(lambda: step(static, weight))
    worst = 0.0
    for seed in range(2):
        static.copy_(numbers(16, 32, device=device, dtype=torch.float32, seed=seed, grad=False))
        recording.replay()
        want = step(static.double(), weight.detach().double().requires_grad_())
        worst = max(worst, *(relative(a, b) for a, b in zip(recording.result, want, strict=True)))
    return worst, TOLERANCES[torch.float32]


