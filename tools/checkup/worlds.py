"""Trials over two processes of this machine: the collectives that training makes, over gloo and, with two GPUs, over NCCL; dispatchers."""
from __future__ import annotations

import importlib.util
import multiprocessing
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dllm.config import PRESETS, MoEConfig
from megatron_dllm.moe.dispatchers.build import BY_DEEP_EP, PLAIN, build_dispatcher
from megatron_dllm.moe.layer import MoELayer
from megatron_dllm.parallel import ParallelContext, Topology, communication, create_context
from megatron_dllm.tensor_parallel import Initializer

from .report import outcome_of
from .trials import TOLERANCES, Trial, numbers, relative

RANKS, SECONDS, TOKENS = 2, 90, (9, 14)
Errors = dict[str, tuple[float, float] | str]  # of each part of a world: (error, allowed), or why it failed
COLLECTIVES = "all-reduce, all-gather, reduce-scatter, all-to-all, send"


class World:
    """Runs everything that is to be tried over one backend in one world of two processes, when it is first asked for."""

    def __init__(self, backend: str, dispatchers: tuple[str, ...]):
        self.backend, self.dispatchers = backend, dispatchers
        self._errors: Errors | None = None

    def measure(self, part: str) -> tuple[float, float]:
        """(error, allowed) of a part, the worst of both ranks; RuntimeError with what a rank says."""
        if self._errors is None:
            self._errors = merged(in_world(self.backend, self.dispatchers))
        result = self._errors.get(part, self._errors.get("start", "not reached"))
        if isinstance(result, str):
            raise RuntimeError(result)
        return result


def trials(device: torch.device) -> Iterator[Trial]:
    """gloo wherever there are processes; NCCL, and what needs it, where there are two GPUs."""
    gloo = World("gloo", tuple(PLAIN))
    yield Trial("two processes, gloo", COLLECTIVES, partial(gloo.measure, "collectives"))
    for name in PLAIN:
        yield Trial("two processes, gloo", f"experts by {name}", partial(gloo.measure, name))
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    absent = None if gpus >= RANKS else f"needs {RANKS} GPUs, and there {'is 1' if gpus == 1 else f'are {gpus}'}"
    has_deep_ep = importlib.util.find_spec("deep_ep") is not None
    nccl = World("nccl", (*PLAIN, *(BY_DEEP_EP if has_deep_ep else ())))
    yield Trial("two processes, NCCL", COLLECTIVES, partial(nccl.measure, "collectives"), absent)
    for name in (*PLAIN, *BY_DEEP_EP):
        of_package = name in BY_DEEP_EP
        lacks = "deep_ep is not installed" if of_package and not has_deep_ep else absent
        yield Trial("two processes, NCCL", f"experts by {name}", partial(nccl.measure, name), lacks, optional=of_package)


def merged(errors: list[Errors]) -> Errors:
    """The worst of the ranks."""
    worst: Errors = {}
    for of_rank in errors:
        for part, result in of_rank.items():
            held = worst.get(part)
            if held is None or not isinstance(held, str) and (isinstance(result, str) or result > held):
                worst[part] = result
    return worst


def in_world(backend: str, dispatchers: tuple[str, ...]) -> list[Errors]:
    """What each rank found, in processes that are ended when they take too long."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = [spawn.Pipe(duplex=False) for _ in range(RANKS)]
        store = str(Path(folder) / "store")
        processes = [spawn.Process(target=run_rank, args=(rank, backend, dispatchers, store, sender), daemon=True)
                     for rank, (_, sender) in enumerate(ends)]
        for process in processes:
            process.start()
        for _, sender in ends:
            sender.close()
        errors = [_received(receiver, process) for (receiver, _), process in zip(ends, processes, strict=True)]
        for process in processes:
            process.kill()
            process.join()
    return errors


def _received(receiver: Connection, process: multiprocessing.Process) -> Errors:
    if not receiver.poll(SECONDS):
        return {"start": f"a process of the world has not ended after {SECONDS} s"}
    answer = outcome_of(receiver.recv)
    process.join(5)
    return {"start": f"a process of the world ended with {process.exitcode}"} if answer.error else answer.value


def run_rank(rank: int, backend: str, dispatchers: tuple[str, ...], store: str, sender: Connection) -> None:
    """One process: every part in turn; sends what each gave."""
    torch.set_num_threads(1)
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    errors: Errors = {}
    start = outcome_of(partial(joined, rank, backend, store, device))
    if start.error:
        errors["start"] = start.first_line
    else:
        parts = {"collectives": partial(collectives, start.value), **{name: partial(experts, start.value, name) for name in dispatchers}}
        for part, measure in parts.items():
            outcome = outcome_of(measure)
            errors[part] = outcome.first_line if outcome.error else outcome.value
            if outcome.error:
                break  # the other rank may wait in another place
    sender.send(errors)
    # Until the other rank has sent too, and both are ended: a connection that closes would take what is under way with it.
    threading.Event().wait(SECONDS)


def joined(rank: int, backend: str, store: str, device: torch.device) -> ParallelContext:
    """The context of a world of two where both have all experts between them."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS // 2),
                            device_id=device if device.type == "cuda" else None)
    return create_context(Topology(world=RANKS, ep=RANKS), rank=rank, device=device, sequence_parallel=False)


def collectives(context: ParallelContext) -> tuple[float, float]:
    """The largest error of each on whole numbers, which add up without one."""
    group, rank, device = context.world, context.world.rank, context.device
    blocks = [torch.arange(6.0, device=device).view(2, 3) + 10 * n for n in range(RANKS)]  # of each rank
    both = torch.cat(blocks)
    results = [
        (communication.all_reduce(blocks[rank], group), blocks[0] + blocks[1]),
        (communication.all_gather(blocks[rank], group, [2, 2]), both),
        (communication.reduce_scatter(both, group, [2, 2]), 2 * blocks[rank]),
        (communication.exchange(blocks[rank], [1, 1], [1, 1], group), torch.stack([block[rank] for block in blocks])),
    ]
    received, peer = torch.zeros_like(blocks[rank]), 1 - rank
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, blocks[rank], peer), dist.P2POp(dist.irecv, received, peer)]):
        work.wait()
    results.append((received, blocks[peer]))
    return max(relative(got, want) for got, want in results), 0.0


def experts(context: ParallelContext, dispatcher: str) -> tuple[float, float]:
    """A layer of experts, half of them on each rank, against all on one: outputs, and gradients of the tokens."""
    dtype = torch.bfloat16 if context.device.type == "cuda" else torch.float32
    config = replace(PRESETS["toy"], hidden_size=128 if dtype == torch.bfloat16 else 16)
    results = []
    for where in (context, ParallelContext.single(context.device)):
        name = dispatcher if where is context else "allgather"
        made = build_dispatcher(MoEConfig(moe_token_dispatcher_type=name), where, config, dtype)
        layer = MoELayer("layers.0", config, context=where, init=Initializer(7, 0.1), dtype=dtype, dispatcher=made)
        x, residual, weight = (
            numbers(TOKENS[context.world.rank], config.hidden_size, device=context.device, dtype=dtype, seed=n) for n in range(3))
        y = layer(x, residual)
        results.append((y.detach(), *torch.autograd.grad(y, (x, residual), weight.detach())))
    worst = max(relative(got, want) for got, want in zip(*results, strict=True))
    return worst, TOLERANCES[dtype]
