"""Which part of a model is computed by what under --transformer-impl or --context-parallel-impl transformer_engine, and why; decided from
the settings alone."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import RunConfig
from ..context_parallel.layout import by_package
from ..transformer.packed_attention import WIDEST_HEAD, packed_types

ENGINE, OURS = "Transformer Engine", "ours"


@dataclass(frozen=True)
class Choice:
    """A part of the model, what computes it, and the reason."""

    part: str
    taken: str
    reason: str

    def __str__(self) -> str:
        return f"{self.part}: {self.taken} ({self.reason})"


def choices(run: RunConfig) -> tuple[Choice, ...]:
    """A row for every part of the model that the package has a counterpart of; none where it is not asked for."""
    if run.training.transformer_impl == "local":
        return () if run.parallel.context_parallel_impl == "local" else tuple(_attention(run))
    fp8 = f"FP8 {run.training.fp8_format}, scales {run.training.fp8_recipe}" if run.training.fp8_format else "bf16"
    rows = [
        Choice("linear layers (q, k, v, o, gate_up, down)", ENGINE, f"{fp8}; collectives, weights and gradient buffers stay ours"),
        _experts(run, fp8),
        Choice("norms that stand alone", ENGINE, "bf16"),
        Choice("norms beside a residual or the router", OURS,
               "one kernel with what follows or precedes; alone they would read and write every row again"),
        _rotary(run),
        *_attention(run),
        Choice("router", OURS, "fp32 always"),
        Choice("embedding and output layer", OURS, "the package has no product that gives logits by chunks, in fp32"),
        _cross_entropy(run),
    ]
    if run.model.linear_layers:
        rows.append(Choice("gated delta nets", OURS, "their six projections go through one product, whose smallest have a row a head"))
    return tuple(rows)


def _experts(run: RunConfig, precision: str) -> Choice:
    if run.moe.moe_grouped_gemm_backend == "transformer_engine":
        return Choice("experts", ENGINE, f"GroupedLinear, {precision}; the host waits for the numbers of rows")
    return Choice("experts", OURS, "bf16; --moe-grouped-gemm-backend transformer_engine changes that")


def _rotary(run: RunConfig) -> Choice:
    if run.training.rotary_backend == "transformer_engine":
        return Choice("rotary", ENGINE, "after its norm of queries and keys; on full layers it gets angles of zero where no pair turns")
    return Choice("rotary", OURS, "in one kernel with the norm of queries and keys; --rotary-backend transformer_engine changes that")


def _cross_entropy(run: RunConfig) -> Choice:
    if run.training.cross_entropy_fusion_impl == "te":
        return Choice("cross entropy", ENGINE, "of the same chunks; soft cap and accuracy beside it are torch's")
    return Choice("cross entropy", OURS, "with the soft cap, in less time and memory; --cross-entropy-fusion-impl te changes that")


def _attention(run: RunConfig) -> Iterator[Choice]:
    model, shared, packed = run.model, by_package(run.parallel, run.model), packed_types(run.training, run.model)
    how = {"sliding": run.parallel.cp_comm_type_sliding, "full": run.parallel.cp_comm_type}
    for kind in dict.fromkeys(model.layer_types):
        if kind == "linear":
            continue
        size = model.head_dim(model.layer_types.index(kind))
        if kind in shared:
            why = f"keys of clean tokens by {how[kind]}, those of canvases by p2p with a bias"
            yield Choice(f"attention, {kind}, head {size}", ENGINE, why)
            continue
        if kind in packed:
            yield Choice(f"attention, {kind}, head {size}", ENGINE, "documents by one call and canvases by another, without a mask")
            continue
        if size > WIDEST_HEAD:
            why = f"the package has no heads wider than {WIDEST_HEAD}"
        else:
            why = ("one launch for clean tokens and canvases, in less time on the host and on the device; "
                   "--attention-backend transformer_engine changes that")
        yield Choice(f"attention, {kind}, head {size}", OURS, why)
