"""The experts' feed-forwards over rows sorted by expert: our kernels on GPUs that suit them, torch's grouped matrix product elsewhere and
beside adapters, or a loop over experts (the oracle).

Legend: N rows, E experts of this rank, I expert width (of this etp rank), H hidden.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from ..config import ModelConfig
from ..kernels.launch import has_large_shared_memory
from ..kernels.row_weights import RowWeights
from ..parallel import ParallelContext, place
from ..parallel.main_gradient import Kernels, SummedGradient
from ..tensor_parallel.initialization import Init, make_parameter
from ..tensor_parallel.linear import unadapted
from ..transformer.activations import gated_gelu, gated_gelu_in_torch, gradient_of_gated_gelu
from ..transformer.plain_function import PlainFunction
from ..transformer.precision import at_least_fp32

ExpertProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
ALIGNMENT_BYTES = 16  # grouped_mm wants the start of every row on such a boundary


class Experts(nn.Module):
    """down_e(gelu(gate_e(x)) * up_e(x)) for the expert e of each row. With etp, our share of it: the sum over etp is the whole.

        gate_up  [E, 2, I, H]   gate and up on an axis of their own, so that a cut along I stays a rectangle
        down     [E, H, I]

    The adapters may add to the two products (see adapters.py).
    """

    def __init__(self, name: str, config: ModelConfig, *, context: ParallelContext, init: Init, dtype: torch.dtype, grouped: bool = True):
        super().__init__()
        num_experts, inner, hidden = config.num_experts, config.moe_ffn_hidden_size, config.hidden_size

        def parameter(which: str, shape: tuple[int, ...]) -> nn.Parameter:
            placement = place(shape, context, cut={"ep": 0, "etp": 2}, grid="expert")
            return make_parameter(f"{name}.{which}", placement, init=init, dtype=dtype, device=context.device)

        self.gate_up = parameter("gate_up", (num_experts, 2, inner, hidden))
        self.down = parameter("down", (num_experts, hidden, inner))
        self.gate_up_adapter = self.down_adapter = unadapted
        self.product = choose_product(dtype, context.device, hidden, self.down.shape[2], grouped=grouped)
        self.gate_up_gradient, self.down_gradient = SummedGradient(), SummedGradient()
        self.by_kernels = self.product is grouped_linear and has_large_shared_memory(context.device)
        self.in_one_function = grouped and context.device.type == "cpu"  # where not, the loop is the oracle, by autograd

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter stands beside a weight; it reads what the kernels do not keep."""
        return self.gate_up_adapter is not unadapted or self.down_adapter is not unadapted

    @property
    def backend(self) -> str:
        """The name of what computes the products."""
        return "grouped_mlp" if self.by_kernels and not self.is_adapted else self.product.__name__

    @property
    def is_trained(self) -> bool:
        """Whether any parameter asks for a gradient: the weights, or adapters beside them."""
        return any(parameter.requires_grad for parameter in self.parameters())

    @property
    def takes_weights(self) -> bool:
        """Whether `forward` takes the rows' weights: before the second product they cost nothing, and the rows' results need not be kept
        for the weights' gradient."""
        return self.skips_rows or self._is_one_function

    @property
    def skips_rows(self) -> bool:
        """Whether no work is done for the gradients of rows that are known to have none (see LiveRows)."""
        return self.backend == "grouped_mlp"

    @property
    def _is_one_function(self) -> bool:
        return self.in_one_function and self.product in (grouped_linear, looped_linear) and not self.is_adapted

    def forward(self, rows: Tensor, counts: Tensor, weighted: RowWeights | None = None) -> Tensor:
        """[N, H] from rows [N, H], sorted by expert; counts int64 [E]; with weights (see `takes_weights`) times each row's own. An expert
        without rows still gets a (zero) gradient.

        N may be more than the sum of counts: nothing is told of the results, or the gradients, of the rows that stand after.
        """
        if self.backend == "grouped_mlp":
            return self._by_kernels(rows, counts, weighted)
        if self._is_one_function:
            weights, slot = (None, None) if weighted is None else (weighted.weights, weighted.slot)
            return _FeedForward.of(rows, self.gate_up, self.down, counts, self.product is grouped_linear, weights, slot)
        assert weighted is None, f"{self.backend} takes no weights of rows"
        hidden = self.gate_up_adapter(self.product(rows, self.gate_up.flatten(1, 2), counts), rows, counts)
        activated = gated_gelu(hidden.unflatten(1, (2, -1)))
        return self.down_adapter(self.product(activated, self.down, counts), activated, counts)

    def _by_kernels(self, rows: Tensor, counts: Tensor, weighted: RowWeights | None) -> Tensor:
        """The feed-forward by our kernels. All uses of a weight in a backward make one gradient, in its fp32 buffer where it has one."""
        from ..kernels import grouped_gemm, grouped_mlp  # Triton is there with CUDA alone

        kernels = Kernels(grouped_mlp.add_parts, grouped_gemm.clear_fresh, grouped_mlp.num_sums, grouped_mlp.sum_parts)

        def deferred(weight: Parameter, summed: SummedGradient) -> grouped_mlp.Deferred | None:
            if not weight.requires_grad or not torch.is_grad_enabled():
                return None
            main = weight.main_gradient
            if main is not None:
                return grouped_mlp.Deferred(main.ticket, partial(main.put_off, kernels))
            return grouped_mlp.Deferred(summed.ticket(weight), partial(summed.put_off, kernels))

        return grouped_mlp.grouped_mlp(rows, self.gate_up, self.down, counts, deferred_up=deferred(self.gate_up, self.gate_up_gradient),
                                       deferred_down=deferred(self.down, self.down_gradient),
                                       weighted=weighted)


def choose_product(dtype: torch.dtype, device: torch.device, hidden: int, inner: int, *, grouped: bool) -> ExpertProduct:
    """The grouped product where torch has it (bf16 on every device, fp32 on CPUs, where it makes the loop's products, to the bit) and the
    rows of both sizes lie as it wants; otherwise the loop."""
    aligned = all(size * dtype.itemsize % ALIGNMENT_BYTES == 0 for size in (hidden, inner))
    there = dtype == torch.bfloat16 or (dtype == torch.float32 and device.type == "cpu")
    return grouped_linear if grouped and there and aligned else looped_linear


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """[N, out]: rows [N, in] times the transposed weight [E, out, in] of each row's expert."""
    product = F.grouped_mm(rows, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    return _ContiguousGradient.apply(product)


def looped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The same, one product an expert. Reads the counts on the host. Rows of no expert stand last and give zero."""
    lengths = counts.tolist()
    *parts, rest = rows.split([*lengths, len(rows) - sum(lengths)])
    products = [F.linear(part, expert) for part, expert in zip(parts, weight.unbind(0), strict=True)]
    return torch.cat([*products, rows.new_zeros(len(rest), weight.shape[1])])


class _ContiguousGradient(torch.autograd.Function):
    """The identity. grouped_mm's backward refuses gradients with strides of zero, which broadcasts make."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _contiguous(grad)


def _contiguous(grad: Tensor) -> Tensor:
    return grad.contiguous() if grad.numel() else grad.new_zeros(grad.shape)  # an empty one counts as contiguous whatever its strides


def _times(rows: Tensor, weight: Tensor, counts: Tensor, ends: Tensor | None) -> Tensor:
    """[N, out]: rows [N, in] times the matrix [in, out] of each row's expert, grouped by their `ends`, or (None) in a loop; of rows after
    those of all experts zeros, or anything."""
    return looped_linear(rows, weight.mT, counts) if ends is None else F.grouped_mm(rows, weight, offs=ends)


def _outer(grad: Tensor, rows: Tensor, counts: Tensor, ends: Tensor | None) -> Tensor:
    """[E, out, in]: grad^T rows of each expert, from [N, out] and [N, in]."""
    if ends is not None:
        return F.grouped_mm(grad.t(), rows, offs=ends)
    lengths = counts.tolist()
    parts = (x[:sum(lengths)].split(lengths) for x in (grad, rows))
    return torch.stack([dy.t() @ x for dy, x in zip(*parts, strict=True)])


def _ends(counts: Tensor) -> Tensor:
    """As grouped_mm has them."""
    return counts.cumsum(0, dtype=torch.int32)


class _FeedForward(PlainFunction):
    """The feed-forward in one function, by grouped_mm or a loop, for CPUs, where autograd's nodes take as long as small products; each row
    times its own of the weights [T, k], if there are any, at whose number `slot` it is: before the second product, where it costs less.

    Saved: the inputs, the first product, the sigmoid of its gate, what the second product reads, the rows' weights.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, grouped: bool, weights: Tensor | None,
                slot: Tensor | None) -> Tensor:
        ends = _ends(counts) if grouped else None
        hidden = _times(rows, gate_up.flatten(1, 2).mT, counts, ends).unflatten(1, (2, -1))
        inner, sigmoid = gated_gelu_in_torch(at_least_fp32(hidden))
        of_rows = None if weights is None else weights.reshape(-1, 1).index_select(0, slot)
        if of_rows is not None:
            inner = inner.mul_(of_rows)
        inner = inner.to(rows.dtype)
        ctx.save_for_backward(rows, gate_up, down, counts, hidden, sigmoid, inner, of_rows, slot)
        ctx.ends, ctx.place, ctx.shape = ends, counts.data_ptr(), None if weights is None else weights.shape
        return _times(inner, down.mT, counts, ends)

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows, gate_up, down, counts, hidden, sigmoid, inner, of_rows, slot = ctx.saved_tensors
        wants_rows, wants_gate_up, wants_down, *_ = ctx.needs_input_grad
        grad, ends = _contiguous(grad), ctx.ends
        if ends is not None and counts.data_ptr() != ctx.place:  # other counts than the forward's: see transformer/joint_backward.py
            ends = _ends(counts)
        of_inner = at_least_fp32(_times(grad, down, counts, ends))
        of_hidden, of_weights = gradient_of_gated_gelu(of_inner, at_least_fp32(hidden), sigmoid, of_rows)
        of_hidden = of_hidden.flatten(1).to(rows.dtype)
        if of_weights is not None:
            of_weights = torch.empty_like(of_weights).scatter_(0, slot, of_weights).view(ctx.shape)
        of_x = _times(of_hidden, gate_up.flatten(1, 2), counts, ends) if wants_rows else None
        of_gate_up = _outer(of_hidden, rows, counts, ends).view_as(gate_up) if wants_gate_up else None
        return of_x, of_gate_up, _outer(grad, inner, counts, ends) if wants_down else None, None, None, of_weights, None
