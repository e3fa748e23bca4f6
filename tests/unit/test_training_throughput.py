"""Operation counts by hand, against torch's counter and against the visibility rule; rates, peaks and memory."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron_dllm.config import PRESETS, ModelConfig, ObjectiveConfig
from megatron_dllm.diffusion.batch_plan import RowRequest, fit_example, plan_batch
from megatron_dllm.diffusion.random import DrawKey, Stream
from megatron_dllm.training.operations import StepOperations, TokenCounts, canvas_pairs, causal_pairs, stack_operations, step_operations
from megatron_dllm.training.throughput import Peak, Throughput, describe_peak, memory_metrics, peak_of, peak_of_name
from megatron_dllm.transformer.visibility import CLEAN, Visibility

# Every size is a different prime where it can be, so that no two of them can be mistaken for each other.
TINY = ModelConfig(
    num_layers=2, hidden_size=7, ffn_hidden_size=11, num_attention_heads=6, num_query_groups=3, kv_channels=4, num_global_query_groups=2,
    global_kv_channels=8, window_size=3, layer_types=("sliding", "full"), num_experts=5, moe_router_topk=2, moe_ffn_hidden_size=13,
    vocab_size=17, canvas_length=2)


def counts(clean, canvases=(), *, encoder_targets=0, decoder_targets=0) -> TokenCounts:
    """canvases: (tokens, clean tokens before, self-conditioned)."""
    canvas, prefix, drafted = zip(*canvases, strict=True) if canvases else ((), (), ())
    return TokenCounts(
        clean=np.array(clean, np.int64), canvas=np.array(canvas, np.int64), canvas_prefix=np.array(prefix, np.int64),
        self_conditioned=np.array(drafted, bool), text_tokens=sum(clean), encoder_targets=encoder_targets, decoder_targets=decoder_targets)


def test_causal_pairs_by_hand():
    assert causal_pairs(np.array([4]), None) == 1 + 2 + 3 + 4
    assert causal_pairs(np.array([4]), 2) == 1 + 2 + 2 + 2
    assert causal_pairs(np.array([4, 1, 0]), 3) == (1 + 2 + 3 + 3) + 1
    assert causal_pairs(np.array([], np.int64), 3) == 0


def test_canvas_pairs_by_hand():
    assert canvas_pairs(np.array([2]), np.array([5]), None) == 2 * (5 + 2)
    assert canvas_pairs(np.array([2]), np.array([5]), 3) == 2 * (2 + 2)  # a window of 3 is 2 clean keys
    assert canvas_pairs(np.array([2, 2]), np.array([1, 0]), 3) == 2 * (1 + 2) + 2 * 2


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_pairs_are_those_of_the_visibility_rule(window):
    """One example of 9 clean tokens; a canvas of 4 that begins at 5."""
    position = np.arange(9)
    clean = Visibility(np.zeros(9, int), position + 1, np.full(9, CLEAN), np.zeros(0, int), 9)
    canvas = Visibility(np.zeros(4, int), np.full(4, 5), np.zeros(4, int), np.zeros(4, int), 9)
    assert causal_pairs(np.array([9]), window) == clean.windowed(window).dense().sum()
    assert canvas_pairs(np.array([4]), np.array([5]), window) == canvas.windowed(window).dense().sum()


def test_stack_operations_by_hand():
    """One token. Sliding: q 24, k and v 12 each, o 24 wide; full: q 48, k 16, o 48, no v projection; two operations a weight."""
    projections = 2 * 7 * (24 + 12 + 12 + 24) + 2 * 7 * (48 + 16 + 48)
    layers = 2
    assert stack_operations(TINY, tokens=1, full_pairs=10, sliding_pairs=100) == {
        "projections": projections,
        "attention": 4 * 6 * 8 * 10 + 4 * 6 * 4 * 100,
        "mlp": layers * 2 * 3 * 7 * 11,
        "router": layers * 2 * 7 * 5,
        "experts": layers * 2 * (2 * 3 * 7 * 13)}


def test_step_operations_by_hand():
    """A clean example of 5, a plain canvas of 2 at 3 and a self-conditioned one of 2 at 1."""
    tokens = counts([5], [(2, 3, False), (2, 1, True)], encoder_targets=4, decoder_targets=3)
    done = step_operations(TINY, tokens)
    full = (1 + 2 + 3 + 4 + 5) + 2 * (3 + 2) + 2 * (1 + 2)
    sliding = (1 + 2 + 3 + 3 + 3) + 2 * (2 + 2) + 2 * (1 + 2)
    assert done.forward == stack_operations(TINY, tokens=5 + 2 + 2, full_pairs=full, sliding_pairs=sliding) | {
        "self_conditioning": 2 * (2 * 3 * 7 * 11), "soft_embedding": 2 * (2 * 7 * 17), "head": (4 + 3) * (2 * 7 * 17)}
    assert done.draft == stack_operations(TINY, tokens=2, full_pairs=2 * 3, sliding_pairs=2 * 3) | {"head": 2 * (2 * 7 * 17)}
    assert done.repeated == {"soft_embedding": 2 * (2 * 7 * 17)}
    soft = 2 * (2 * 7 * 17)
    assert done.model == sum(done.draft.values()) + 3 * (sum(done.forward.values()) - soft) + 2 * soft
    assert done.hardware == done.model + soft


def test_step_operations_of_a_plain_language_model():
    done = step_operations(TINY, counts([5, 2], encoder_targets=5))
    assert done.model == 3 * sum(done.forward.values())
    assert sum(done.draft.values()) == done.forward["self_conditioning"] == done.forward["soft_embedding"] == 0
    assert done.hardware == done.model


RECOMPUTE = {
    "none": (None, (), set()),
    "full": ("full", (), {"projections", "attention", "mlp", "router", "experts"}),
    "attention": ("selective", ("core_attn",), {"attention"}),
    "mlp and experts": ("selective", ("mlp", "moe"), {"mlp", "router", "experts"}),
}


@pytest.mark.parametrize("case", RECOMPUTE)
def test_step_operations_count_recompute_apart(case):
    granularity, modules, parts = RECOMPUTE[case]
    tokens = counts([5], [(2, 3, False)], encoder_targets=4, decoder_targets=2)
    plain = step_operations(TINY, tokens)
    done = step_operations(TINY, tokens, recompute=granularity, recompute_modules=modules)
    assert done.model == plain.model
    assert done.hardware - done.model == sum(plain.forward[part] for part in parts)


def test_step_operations_beside_adapters_lack_weight_gradients():
    tokens = counts([12], [(4, 8, True)], encoder_targets=11, decoder_targets=4)
    trained, frozen = step_operations(TINY, tokens), step_operations(TINY, tokens, frozen=True)
    assert frozen.forward == trained.forward and frozen.draft == trained.draft
    for part in ("projections", "mlp", "experts", "head"):
        assert frozen.backward[part] == frozen.forward[part] == trained.backward[part] / 2
    assert frozen.backward["attention"] == trained.backward["attention"]
    assert frozen.backward["soft_embedding"] == frozen.repeated["soft_embedding"] == 0


def test_step_operations_refuses_unknown_recompute():
    with pytest.raises(ValueError, match="--recompute-granularity partial"):
        step_operations(TINY, counts([5]), recompute="partial")


def test_step_operations_agree_with_torch():
    """A sliding layer's projections, attention within its window, dense MLP, router and one expert a token, and the head: plain modules,
    forward and backward, in torch's own counter."""
    model = dataclasses.replace(TINY, num_layers=1, layer_types=("sliding",), moe_router_topk=1, num_experts=1, window_size=9)
    T, H, heads, dim, groups = 9, 7, 6, 4, 3

    def linear(width_in, width_out):
        return nn.Linear(width_in, width_out, bias=False)

    q, k, v, o = linear(H, heads * dim), linear(H, groups * dim), linear(H, groups * dim), linear(heads * dim, H)
    mlp, expert = ([linear(H, wide), linear(H, wide), linear(wide, H)] for wide in (11, 13))
    router, head = linear(H, 1), linear(H, 17)
    x = torch.randn(T, H, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        queries = q(x).view(T, heads, dim).transpose(0, 1)
        keys, values = (p(x).view(T, groups, dim).repeat_interleave(2, dim=1).transpose(0, 1) for p in (k, v))
        h = o(((queries @ keys.transpose(1, 2)).softmax(-1) @ values).transpose(0, 1).reshape(T, -1))
        for gate, up, down in (mlp, expert):
            h = h + down(gate(h) * up(h))
        loss = head(h * router(h).sigmoid()).sum()
        loss.backward()
    done = step_operations(model, counts([T], encoder_targets=T))
    dense_attention = 4 * heads * dim * T * T  # torch's matrix products also make the masked pairs: 81 against our 45
    assert done.model - 3 * done.forward["attention"] + 3 * dense_attention == counter.get_total_flops()
    assert done.forward["attention"] * T * T == dense_attention * 45


def test_step_operations_of_the_release():
    """Six layers at real width with every canvas drafted: 62 and 50 ms at 790 TFLOP/s, worked out apart from this code."""
    release = PRESETS["diffusiongemma-26b-a4b"]
    six = dataclasses.replace(release, num_layers=6, layer_types=release.layer_types[:6])
    for examples, length, milliseconds in ((4, 1024, 62), (1, 4096, 50)):
        tokens = counts(
            [length] * examples, [(256, length // 2, True)] * examples, encoder_targets=examples * (length - 1),
            decoder_targets=examples * 256)
        assert 1000 * step_operations(six, tokens).model / 790e12 == pytest.approx(milliseconds, rel=0.03)
    # 3.84 B active weights, less norms and scales, two operations each.
    active = sum(stack_operations(release, tokens=1, full_pairs=0, sliding_pairs=0).values()) / 2
    assert active + release.vocab_size * release.hidden_size == pytest.approx(3.84e9, rel=0.01)


def planned(lengths, objective):
    """One row an example, canvases of 4, at most 20 tokens."""
    fits = [fit_example(prompt, response, seq_length=20, canvas_length=4) for prompt, response in lengths]
    rows = [
        RowRequest(indices=[i], keys=[DrawKey(1, Stream.TRAIN, 0, i, 0)], fits=[fit], truncated=[False]) for i, fit in enumerate(fits)]
    return plan_batch(rows, objective, micro_batch_size=1)


def test_token_counts_of_a_plan():
    """Prompt 3 and response 6: two canvases, two tokens of fill. Prompt 5 and response 4: one canvas, no fill."""
    objective = ObjectiveConfig(self_conditioning_prob=1.0, canvases_scored="all")
    made = TokenCounts.of(planned([(3, 6), (5, 4)], objective), objective)
    assert made.clean.tolist() == [11, 9]
    assert made.canvas.tolist() == [4, 4, 4]
    assert made.canvas_prefix.tolist() == [3, 7, 5]
    assert made.self_conditioned.tolist() == [True] * 3
    assert (made.text_tokens, made.encoder_targets, made.decoder_targets) == (18, 10 + 8, 12)


def test_token_counts_of_a_plan_without_canvases():
    objective = ObjectiveConfig(objective="ar", encoder_loss_tokens="response")
    made = TokenCounts.of(planned([(3, 6)], objective), objective)
    assert (made.clean.tolist(), made.canvas.tolist(), made.encoder_targets, made.decoder_targets) == ([11], [], 8, 0)
    assert step_operations(TINY, made).model > 0


def test_token_counts_leave_out_an_unweighted_loss():
    objective = ObjectiveConfig(encoder_loss_weight=0.0, score_tokens="corrupted")
    plan = planned([(3, 6), (5, 4)], objective)
    made = TokenCounts.of(plan, objective)
    assert made.encoder_targets == 0
    assert made.decoder_targets == plan.denominators.decoder < made.canvas.sum()


def test_throughput_drain():
    meter = Throughput(num_devices=2, peak=Peak(10.0, "test"), with_operations=True)
    assert meter.drain() == {}
    operations = StepOperations(draft={"head": 1e12}, forward={"head": 3e12}, backward={"head": 6e12}, repeated={"mlp": 10e12})
    meter.add(1.5, counts([30]), operations)
    meter.add(0.5, counts([20], [(8, 0, False)]), operations)
    # Two steps of 10 TFLOP in 2 s on 2 devices.
    assert meter.drain() == {
        "iteration_ms": 1000.0, "tokens_per_second": 25.0, "canvas_tokens_per_second": 4.0, "tflops_per_device": 5.0,
        "hardware_tflops_per_device": 10.0, "mfu": 0.5}
    assert meter.drain() == {}


def test_throughput_without_a_peak_has_no_mfu():
    operations = StepOperations(draft={}, forward={"head": 1.0}, backward={}, repeated={})
    for with_operations, names in ((True, {"tflops_per_device", "hardware_tflops_per_device"}), (False, set())):
        meter = Throughput(num_devices=1, peak=None, with_operations=with_operations)
        meter.add(1.0, counts([3]), operations)
        assert set(meter.drain()) == {"iteration_ms", "tokens_per_second", "canvas_tokens_per_second"} | names


PEAKS = {
    "NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835, "NVIDIA GH200 480GB": 989,
    "NVIDIA H20": 148, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A10": 125, "NVIDIA A10G": 70, "NVIDIA A40": 150, "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500, "NVIDIA L40S": 362, "NVIDIA L4": 121, "AMD Instinct MI300X": 1307,
    # Names that hold another device's name must not get its peak.
    "NVIDIA RTX A4000": None, "NVIDIA RTX A400": None, "Quadro T1000": None}


@pytest.mark.parametrize("name", PEAKS)
def test_peak_of_name(name):
    peak = peak_of_name(name)
    assert (peak and peak.tflops) == PEAKS[name]


def test_peak_of_a_cpu_is_only_what_the_flag_says():
    cpu = torch.device("cpu")
    assert peak_of(cpu, peak_tflops=None) is None
    assert peak_of(cpu, peak_tflops=0.5).tflops == 0.5
    assert describe_peak(None, "cpu") == "MFU is not logged: no peak is known for cpu; give --peak-tflops"
    assert describe_peak(None, "cuda:0", shared=True) == "MFU is not logged: ranks share the device"
    assert "0.5 TFLOP/s per device (--peak-tflops)" in describe_peak(peak_of(cpu, peak_tflops=0.5), "cpu")
    assert "989 TFLOP/s per device (dense bf16 of H200" in describe_peak(peak_of_name("NVIDIA H200"), "cuda:0")


def test_memory_metrics_of_a_process():
    # A process that has loaded torch holds at least 50 MiB: a count in KiB would fall below, one scaled twice lie far above.
    assert 50 << 20 < memory_metrics(torch.device("cpu"))["memory_resident_bytes"] < 1 << 40
