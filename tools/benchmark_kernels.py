"""Checks each Triton kernel against its reference, then times it beside plain torch, at the widths of the released model.

    python tools/benchmark_kernels.py [--tokens 5120] [--only NAME] [--repeats 20]

A row: milliseconds of forward and of backward, the kernel's and plain torch's; the kernel's GB/s of the bytes that must move, and its
share of a copy's 4.26 TB/s (H200). Needs one CUDA device; about half a minute. Attention, the experts' products and mHC:
`python tools/benchmark.py --suite kernels`.
"""
from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

if importlib.util.find_spec("triton") is None:
    print("error: this needs a CUDA device and Triton, which is not there: take a machine whose torch is built for CUDA", file=sys.stderr)
    sys.exit(2)

from megatron_dllm.kernels import gated_gelu, norm_and_rotate, permute, reference, rms_norm  # noqa: E402
from megatron_dllm.moe import permute as moe  # noqa: E402
from megatron_dllm.parallel import ParallelContext  # noqa: E402
from megatron_dllm.tensor_parallel import cross_entropy as head  # noqa: E402
from megatron_dllm.tensor_parallel.vocabulary import VocabularyRange  # noqa: E402
from megatron_dllm.transformer import norms, rotary  # noqa: E402

COPY_BYTES_A_SECOND = 4.26e12
CACHE_BYTES = 256 << 20  # several times the 50 MiB of cache, so that inputs come from memory
EPS = 1e-6
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """y = function(*inputs) of `kernel`, plain torch and the reference; bytes that forward and backward must move (0: no backward)."""

    name: str
    kernel: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    inputs: Callable[[], list[Tensor]]
    forward_bytes: int
    backward_bytes: int
    tolerance: float = 2**-6  # of the largest: two roundings of bf16, sums beside it


def normal(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_(grad)


def cases(tokens: int) -> Iterator[Case]:
    """The model's shapes: hidden 2816, experts of 704, dense MLP of 2112, heads of 256 and 512, 8 of 128 experts, 262144 tokens."""
    for shape, weighted, dtype in (((tokens, 2816), True, BF16), ((tokens, 2816), False, torch.float32), ((tokens, 8, 256), False, BF16)):
        size = dtype.itemsize * torch.Size(shape).numel()
        function = partial(with_eps, weighted=weighted)
        yield Case(f"rms_norm {shape} {'w' if weighted else ''} {str(dtype)[6:]}", function(rms_norm.rms_norm),
                   function(norms._RMSNorm.apply), function(reference.rms_norm),
                   lambda s=shape, w=weighted, d=dtype: [normal(*s, dtype=d)] + [normal(s[-1], dtype=d)] * w, 2 * size, 3 * size,
                   2**-6 if dtype == BF16 else 1e-5)
    for rows, width in ((8 * tokens, 704), (tokens, 2112)):
        yield Case(f"gated_gelu {rows} x {width}", gated_gelu.gated_gelu, plain_gelu, reference.gated_gelu,
                   lambda n=rows, w=width: [normal(n, 2, w)], 6 * rows * width, 10 * rows * width)
    for heads, width in ((16, 256), (8, 256), (2, 512)):
        size = 2 * tokens * heads * width
        yield Case(f"norm_and_rotate {heads} x {width}", norm_and_rotate_of(norm_and_rotate.norm_and_rotate),
                   norm_and_rotate_of(plain_norm_and_rotate), norm_and_rotate_of(reference.norm_and_rotate),
                   lambda h=heads, w=width: [*angles(tokens, w), normal(tokens, h, w), normal(w)], 2 * size, 3 * size)
    yield from permute_cases(tokens)
    yield from head_cases(512, 262144)


def permute_cases(tokens: int) -> Iterator[Case]:
    indices = torch.rand(tokens, 128, device="cuda").argsort(1)[:, :8]
    order, size = moe.sort_by_expert(indices, 128), 2 * tokens * 2816
    yield Case("permute", lambda x: permute.permute(x, order.row, 8 * tokens),
               lambda x: moe._Permute.apply(x, order.slot, order.row, False), lambda x: reference.permute(x, order.row, 8 * tokens),
               lambda: [normal(tokens, 2816)], 9 * size, 9 * size)
    yield Case("unpermute", lambda r, w: permute.unpermute(r, w, order.row),
               lambda r, w: moe._Unpermute.apply(r, w, order.slot, order.row, False), lambda r, w: reference.unpermute(r, w, order.row),
               lambda: [normal(8 * tokens, 2816), normal(tokens, 8, dtype=torch.float32)], 9 * size, 17 * size)


def head_cases(n: int, v: int) -> Iterator[Case]:
    """Scores alone, and scores with the gradient, of a chunk's product, which is overwritten."""
    tp = ParallelContext.single().tp
    targets, weights = torch.randint(0, v, (n,), device="cuda"), torch.rand(n, device="cuda")
    config = head._Head(30.0, tp, VocabularyRange(0, v), 1 << 29)

    def score(how: Callable, dtype: torch.dtype | None, product: Tensor) -> Tensor:
        scores, grad = how(head._Chunk(product, targets, weights, None, None), config, dtype)
        return scores.per_token if grad is None else grad

    def exact(dtype: torch.dtype | None, product: Tensor) -> Tensor:
        largest, total, at_target, _ = reference.softmax_statistics(product, targets, 30.0, None, None)[0]
        if dtype is None:
            return total.log() + largest - at_target
        return reference.logit_gradient(product, targets, weights, largest, 1 / total, 30.0, None, None, dtype)

    for name, dtype, size, tolerance in (("scores", None, 4 * n * v, 1e-5), ("scores and gradient", BF16, 10 * n * v, 2**-6)):
        yield Case(f"head, {name}, {n} x {v}", partial(score, head._score_by_kernel, dtype), partial(score, head._score_in_torch, dtype),
                   partial(exact, dtype), lambda: [10 * normal(n, v, dtype=torch.float32, grad=False)], size, 0, tolerance)


def with_eps(function: Callable[..., Tensor], *, weighted: bool) -> Callable[..., Tensor]:
    return (lambda x, weight: function(x, weight, EPS)) if weighted else (lambda x: function(x, None, EPS))


def norm_and_rotate_of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda cos, sin, x, weight: function(x, weight, cos, sin, EPS)


def plain_gelu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.unbind(1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def plain_norm_and_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return rotary.rotate(norms._RMSNorm.apply(x, weight, eps), rotary.RotaryTable(cos[:, None], sin[:, None]))


def angles(tokens: int, width: int) -> list[Tensor]:
    turned = torch.rand(tokens, width // 2, device="cuda") * 6
    return [turned.cos(), turned.sin()]


def leaves(inputs: list[Tensor]) -> list[Tensor]:
    return [x for x in inputs if x.requires_grad]


def worst_error(case: Case) -> float:
    """Largest |kernel - reference| over the largest |reference|, of the output and each gradient."""
    inputs = case.inputs()
    results = []
    for function, given in ((case.kernel, inputs), (case.exact, [x.detach().float().requires_grad_(x.requires_grad) for x in inputs])):
        y = function(*[x if x.requires_grad else x.clone() for x in given])
        torch.manual_seed(1)
        dy = torch.randn(y.shape, device="cuda")
        gradients = torch.autograd.grad(y, leaves(given), dy.to(y.dtype)) if case.backward_bytes else ()
        results.append([y.detach(), *gradients])
    return max(float((a.float() - b.float()).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))


def milliseconds(case: Case, function: Callable[..., Tensor], repeats: int) -> tuple[float, float]:
    """Medians of (forward, backward) over `repeats` runs, each on the next of several sets of inputs."""
    first = case.inputs()
    size = sum(x.numel() * x.itemsize for x in first)
    sets = [first, *(case.inputs() for _ in range(min(7, CACHE_BYTES // size)))]
    forward, backward = [], []
    for repeat in range(3 + repeats):
        inputs = sets[repeat % len(sets)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        # The device is kept busy while the host enqueues, so that its launches are not what is timed.
        torch.cuda._sleep(2_000_000)
        events[0].record()
        y = function(*inputs)
        events[1].record()
        if case.backward_bytes:
            dy = torch.randn_like(y)
            torch.cuda._sleep(2_000_000)
            events[2].record()
            torch.autograd.grad(y, leaves(inputs), dy)
            events[3].record()
        torch.cuda.synchronize()
        if repeat >= 3:
            forward.append(events[0].elapsed_time(events[1]))
            backward.append(events[2].elapsed_time(events[3]) if case.backward_bytes else 0.0)
    return statistics.median(forward), statistics.median(backward)


def share(size: int, time: float) -> str:
    if not size:
        return " " * 14
    return f"{size / time / 1e6:8.0f} {size / time * 1e3 / COPY_BYTES_A_SECOND:4.0%} "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=5120, help="tokens of a microbatch (4 x 1024 clean, 4 x 256 of canvases)")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs of each")
    parser.add_argument("--only", default="", help="only the cases whose name has this in it")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the kernels are timed on a CUDA device, and torch sees none; the tests run them on a CPU (TRITON_INTERPRET=1)")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.tokens} tokens; ms, GB/s, "
          f"share of {COPY_BYTES_A_SECOND / 1e9:.0f}")
    print(f"{'case':<44}{'error':>9} | {'forward':>8}{'torch':>9}{'GB/s':>9}{'':6}| {'backward':>8}{'torch':>9}{'GB/s':>9}")
    failed = []
    for case in cases(arguments.tokens):
        if arguments.only not in case.name:
            continue
        error = worst_error(case)
        if not error <= case.tolerance:
            failed.append(f"{case.name}: error {error:.3g}, allowed {case.tolerance:.3g}")
        (forward, backward), (plain_forward, plain_backward) = (milliseconds(case, f, arguments.repeats) for f in (case.kernel, case.plain))
        print(f"{case.name:<44}{error:9.2g} | {forward:8.3f}{plain_forward:9.3f}{share(case.forward_bytes, forward)} | "
              f"{backward:8.3f}{plain_backward:9.3f}{share(case.backward_bytes, backward)}", flush=True)
        torch.cuda.empty_cache()
    print("\n".join(["wrong:", *failed]) if failed else "every kernel agrees with its reference")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
