"""What is said when a device runs out of memory: what it held beside what was predicted, and the flags that would save most."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ..config import RunConfig, validate
from ..config.flags import flag_name
from ..parallel import ParallelContext
from .forecast import KINDS, forecast
from .optimizer import MasterOptimizer

GIB = 2**30
STATES = KINDS[:3]  # those that can be counted tensor by tensor
NUM_FLAGS = 3


def report(error: torch.OutOfMemoryError, run: RunConfig, context: ParallelContext, model: nn.Module | None = None,
           optimizer: MasterOptimizer | None = None) -> str:
    """The text for the user; without a model it happened while one was built, and only the whole was measured."""
    held = {} if model is None else state_bytes(model, optimizer)
    cuda = context.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(context.device) if cuda else None
    reserved = torch.cuda.max_memory_reserved(context.device) if cuda else None
    first = str(error).strip().partition("\n")[0]
    predicted = forecast(run, context.world.size).held[context.pp.rank]
    return "\n".join([f"out of memory on {context.device}, rank {context.world.rank}: {first}", "",
                      *table(held, peak, reserved, predicted), "", *advice(run, context.world.size)])


def state_bytes(model: nn.Module, optimizer: MasterOptimizer) -> dict[str, int]:
    """Weights, gradients and optimizer state that this rank holds, each storage counted once."""
    weights = _storages(model.parameters())
    gradients = _storages(held.piece.gradient for held in optimizer.held)
    moments = [value for state in optimizer.torch.state.values() for value in state.values() if isinstance(value, Tensor)]
    steps = _storages([*(held.master for held in optimizer.held), *moments])
    # The master of a wide parameter is the parameter itself.
    kinds = (weights, gradients, {place: size for place, size in steps.items() if place not in weights})
    return {kind: sum(storages.values()) for kind, storages in zip(STATES, kinds, strict=True)}


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def table(held: Mapping[str, int], peak: int | None, reserved: int | None, predicted: Mapping[str, float]) -> Iterator[str]:
    """Lines of GiB by kind, measured and predicted."""
    rest = "activations and buffers"
    yield f"{'GiB':<24}{'measured':>10}{'predicted':>11}"
    for kind in STATES:
        yield f"{kind:<24}{_gib(held.get(kind)):>10}{_gib(predicted[kind]):>11}"
    measured = None if peak is None or not held else max(peak - sum(held.values()), 0)
    # torch does not count CUDA's own memory, which the prediction has among the buffers.
    yield f"{rest:<24}{_gib(measured):>10}{_gib(sum(predicted[kind] for kind in KINDS[3:])):>11}"
    yield f"{'in all':<24}{_gib(peak):>10}{_gib(sum(predicted.values())):>11}"
    if peak is not None and reserved is not None:
        yield f"{'reserved beyond that':<24}{_gib(reserved - peak):>10}{'-':>11}"


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def advice(run: RunConfig, world_size: int) -> Iterator[str]:
    """The changes of one flag that the forecast says to save most on the fullest GPU, each legal on as many processes."""
    before = sum(forecast(run, world_size).fullest.values())
    saved = []
    for change in changes(run):
        changed = run.with_values(**change)
        if not validate(changed, world_size=world_size):
            saved.append((before - sum(forecast(changed, world_size).fullest.values()), change))
    best = [(size, change) for size, change in sorted(saved, key=lambda pair: -pair[0]) if size > 0.01 * before][:NUM_FLAGS]
    if not best:
        yield "No single flag would save much on as many GPUs: use more of them, or a shorter --seq-length."
        return
    yield "Flags that would save most on the fullest GPU (predicted):"
    for size, change in best:
        words = " ".join(_spelled(name, value) for name, value in change.items())
        yield f"  {words:<60} {size / GIB:8.2f} GiB of {before / GIB:.2f}"


def changes(run: RunConfig) -> Iterator[dict[str, object]]:
    """What could be tried, one flag each (with those that it needs)."""
    training, parallel = run.training, run.parallel
    if training.micro_batch_size > 1:
        yield {"micro_batch_size": training.micro_batch_size // 2}
    if training.recompute_granularity != "full":
        yield {"recompute_granularity": "full", "recompute_modules": ()}
    if training.recompute_granularity is None:
        yield {"recompute_granularity": "selective", "recompute_modules": ("moe", "mlp")}
    if not training.bf16:
        yield {"bf16": True}
    if not parallel.use_distributed_optimizer:
        yield {"use_distributed_optimizer": True}
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield {"sequence_parallel": True}
    yield {"tensor_model_parallel_size": 2 * parallel.tensor_model_parallel_size, "sequence_parallel": True}
    for axis in ("expert", "pipeline", "context"):
        name = f"{axis}_model_parallel_size" if axis != "context" else "context_parallel_size"
        yield {name: 2 * run.value(name)}
    if run.lora.lora_rank is None:
        yield {"lora_rank": 16}
    yield {"seq_length": run.data.seq_length // 2}


def _spelled(name: str, value: object) -> str:
    if isinstance(value, bool):
        return flag_name(name)
    return f"{flag_name(name)} {' '.join(value) if isinstance(value, tuple) else value}" if value != () else ""
