"""Dispatch by the kernels of the deep_ep package, its classic Buffer: over NVLink inside a host, RDMA between hosts, bf16 rows.

A token goes once to each rank that has any of its experts, with its k weights in fp32; that rank applies them, and the results of the ranks
are summed on the way back. The first dispatch of a plan exchanges the layout and leaves a handle; later ones, and every way back, use it.

The host waits for that first dispatch to say how many tokens arrive, unless `max_tokens` bounds what a rank sends: then there is room for
that of every rank, what has not come is marked as no expert's, and only the device knows the numbers.

Legend: as in `interface`; R tokens that arrive, or that there is room for.
"""
from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...parallel import Group, ParallelContext
from ...parallel.launch import SHARE_GPU, shares_gpu
from ..permute import Permutation, permute, sort_by_local_expert, unpermute
from .interface import LAYOUT_EXCHANGE, check_tokens
from .transfer import Transfer, UnderWay

INSIDE_A_HOST = (2, 4, 8)  # numbers of ranks that the kernels over NVLink are built for


@dataclass(frozen=True)
class Arrival:
    """What the first dispatch of a plan found: deep_ep's handle; the permutation of the R tokens; their weights fp32 [R, k], a record for
    replays, which cannot send them again with a handle."""

    handle: Any
    permutation: Permutation
    weights: Tensor


@dataclass
class DeepEPPlan:
    """indices int64 [T, k]; `arrival` is filled in by the first dispatch."""

    indices: Tensor
    arrival: Arrival | None = None


class DeepEPDispatcher:
    """See the module's docstring. `package` is deep_ep; the buffer is one for all layers that share the dispatcher."""

    def __init__(self, context: ParallelContext, num_experts: int, *, hidden_size: int, dtype: torch.dtype, package: Any,
                 max_tokens: int | None = None):
        check_use("deepep", context, dtype)
        if max_tokens is not None and context.ep.size not in INSIDE_A_HOST:
            raise ValueError(f"--moe-max-tokens-per-rank {max_tokens}: between hosts deep_ep always tells the host how many tokens arrive; "
                             f"leave it out, or set --expert-model-parallel-size to one of {INSIDE_A_HOST}")
        self.max_tokens = max_tokens
        self.index_dtype = vars(package).get("topk_idx_t", torch.int64)  # builds before 1.2.1 take int64 alone and do not say so
        self.ep, self.num_experts, self.num_local = context.ep, num_experts, num_experts // context.ep.size
        self.package, self.buffer = package, make_buffer(package, context.ep, hidden_size * dtype.itemsize)

    def prepare(self, indices: Tensor) -> DeepEPPlan:
        check_tokens(len(indices), self.max_tokens)
        return DeepEPPlan(indices)

    def trip(self, plan: DeepEPPlan, weights: Tensor) -> DeepEPTrip:
        return DeepEPTrip(self, plan, weights)

    def options(self) -> dict[str, Any]:
        """Of every call: it starts after what the current stream has, on a stream of its own, and leaves an event to wait for."""
        return {"previous_event": self.package.Buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True}

    def send(self, handle: Any, x: Tensor) -> UnderWay:
        """Rows to where the handle's dispatch sent them."""
        received, _, _, _, _, event = self.buffer.dispatch(x.contiguous(), handle=handle, **self.options())
        return UnderWay((received,), event.current_stream_wait)

    def collect(self, handle: Any, rows: Tensor) -> UnderWay:
        """For each token the sum of the rows that the ranks hold of it."""
        combined, _, event = self.buffer.combine(rows.contiguous(), handle, **self.options())
        return UnderWay((combined,), event.current_stream_wait)

    def dispatch(self, plan: DeepEPPlan, x: Tensor, weights: Tensor) -> UnderWay:
        """Tokens and weights [T, k] to the ranks of their experts."""
        if plan.arrival is None:
            return self._first_dispatch(plan, x, weights)
        under_way = self.send(plan.arrival.handle, x)
        return UnderWay((*under_way.results, plan.arrival.weights.clone()), under_way.wait)

    def collect_gradients(self, plan: DeepEPPlan, grad_tokens: Tensor, grad_weights: Tensor) -> UnderWay:
        """The way back of `dispatch`."""
        grad_x, grad_sent, event = self.buffer.combine(
            grad_tokens.contiguous(), plan.arrival.handle, topk_weights=grad_weights.contiguous(), **self.options())
        return UnderWay((grad_x, grad_sent), event.current_stream_wait)

    def _first_dispatch(self, plan: DeepEPPlan, x: Tensor, weights: Tensor) -> UnderWay:
        self.ep.log.start(LAYOUT_EXCHANGE, self.ep.name, 0, f"layout of a dispatch by deep_ep over ep {self.ep.ranks}")()
        # Copies, if any, come before the event that the kernels wait for.
        x, weights, indices = x.contiguous(), weights.contiguous(), plan.indices.to(self.index_dtype).contiguous()
        per_rank, per_node, per_expert, is_in_rank, event = self.buffer.get_dispatch_layout(indices, self.num_experts, **self.options())
        room = 0 if self.max_tokens is None else self.max_tokens * self.ep.size
        received, local, received_weights, rows_per_expert, handle, event = self.buffer.dispatch(
            x, topk_idx=indices, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank, num_tokens_per_expert=per_expert, num_worst_tokens=room,
            **(self.options() | {"previous_event": event}))

        def wait() -> None:
            event.current_stream_wait()
            num_rows = local.numel() if room else sum(rows_per_expert)
            plan.arrival = Arrival(handle, sort_by_local_expert(local.long(), self.num_local, num_rows), received_weights.clone())

        return UnderWay((received, received_weights), wait)


class DeepEPTrip:
    """Phases as in `interface.Trip`. Its transfers hold dispatcher and plan, not the trip: through its tensors that would be a cycle."""

    def __init__(self, dispatcher: DeepEPDispatcher, plan: DeepEPPlan, weights: Tensor):
        self.dispatcher, self.plan, self.weights = dispatcher, plan, weights
        self.there = Transfer(partial(dispatcher.dispatch, plan), partial(dispatcher.collect_gradients, plan))

    def dispatch(self, x: Tensor) -> None:
        self.there.start(x, self.weights)

    def after_dispatch(self) -> tuple[Tensor, Tensor]:
        tokens, self.received_weights = self.there.finish()
        return permute(tokens, self.plan.arrival.permutation), self.plan.arrival.permutation.counts

    def take_weights(self) -> None:
        return None

    def combine(self, rows: Tensor) -> None:
        arrival = self.plan.arrival
        self.back = Transfer(partial(self.dispatcher.collect, arrival.handle), partial(self.dispatcher.send, arrival.handle))
        self.back.start(unpermute(rows, self.received_weights, arrival.permutation))

    def after_combine(self) -> Tensor:
        y, = self.back.finish()
        return y


def check_use(name: str, context: ParallelContext, dtype: torch.dtype) -> None:
    """ValueError where these kernels cannot work: what no machine can, before what this one cannot."""
    flag = f"--moe-token-dispatcher-type {name}"
    if context.ep.size == 1:
        raise ValueError(f"{flag}: its kernels connect the ranks that share experts, and there is one; set --expert-model-parallel-size "
                         "above 1, or --moe-token-dispatcher-type alltoall")
    if context.etp.size > 1:
        raise ValueError(f"{flag}, --expert-tensor-parallel-size {context.etp.size}: its kernels send a token to one rank an expert; set "
                         "--expert-tensor-parallel-size 1, or --moe-token-dispatcher-type alltoall")
    if dtype != torch.bfloat16:
        raise ValueError(f"{flag}: its kernels move bf16 rows, and the model computes in {str(dtype).removeprefix('torch.')}; set --bf16, "
                         "or --moe-token-dispatcher-type alltoall")


def import_package(name: str, attribute: str, context: ParallelContext) -> Any:
    """deep_ep, with the class that the dispatcher `name` needs, on devices that can reach each other; ValueError otherwise."""
    flag, instead = f"--moe-token-dispatcher-type {name}", "set --moe-token-dispatcher-type alltoall"
    if context.device.type != "cuda":
        raise ValueError(f"{flag}: its kernels run on CUDA devices, and this run is on {context.device.type}; {instead}")
    try:
        package = importlib.import_module("deep_ep")
    except ImportError as error:
        raise ValueError(f"{flag} needs the package deep_ep ({error}); install it with tools/install_gpu.sh, or {instead}") from error
    if attribute not in vars(package):
        raise ValueError(f"{flag} needs a deep_ep with {attribute}, which the one in {package.__file__} has not; {instead}")
    check_peers(flag, context)
    return package


def check_peers(flag: str, context: ParallelContext) -> None:
    """The devices of one host must map each other's memory; ranks on one device would wait for kernels that may not run beside theirs."""
    if shares_gpu():
        raise ValueError(f"{flag}: its kernels wait for those of other ranks on other devices, and {SHARE_GPU}=1 gives all ranks one; "
                         "set --moe-token-dispatcher-type alltoall")
    own, count = torch.cuda.current_device(), torch.cuda.device_count()
    apart = [peer for peer in range(min(count, context.ep.size)) if peer != own and not torch.cuda.can_device_access_peer(own, peer)]
    if apart:
        raise ValueError(f"{flag}: device {own} cannot reach the memory of devices {apart} of this host; set "
                         "--moe-token-dispatcher-type alltoall")


def make_buffer(package: Any, ep: Group, row_bytes: int) -> Any:
    """deep_ep's buffer for rows of this size."""
    configs = (package.Buffer.get_dispatch_config(ep.size), package.Buffer.get_combine_config(ep.size))
    nvlink_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, ep.size) for config in configs)
    rdma_bytes = 0
    if ep.size not in INSIDE_A_HOST:
        if ep.size % 8:
            raise ValueError(
                f"--moe-token-dispatcher-type deepep over {ep.size} ranks: its kernels know {INSIDE_A_HOST} ranks of one host, or several "
                "hosts of 8; set --expert-model-parallel-size to one of these, or --moe-token-dispatcher-type alltoall")
        rdma_bytes = max(config.get_rdma_buffer_size_hint(row_bytes, ep.size) for config in configs)
    return package.Buffer(ep.handle, nvlink_bytes, rdma_bytes)
