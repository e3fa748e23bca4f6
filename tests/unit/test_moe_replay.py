"""Dispatch replay on one process: recording, following, and what is refused."""

import dataclasses
import threading

import pytest
import torch
import torch.utils.checkpoint

from megatron_dllm.config import PRESETS, MoEConfig
from megatron_dllm.moe.dispatchers.build import build_dispatcher
from megatron_dllm.moe.layer import MoELayer
from megatron_dllm.moe.replay import NOT_CHECKPOINTED, CallLog, Record, ReplayError, ReplayMonitor, fingerprint
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import Initializer
from megatron_dllm.transformer.recompute import Recompute

CONFIG = dataclasses.replace(PRESETS["toy"], hidden_size=6, moe_ffn_hidden_size=4, num_experts=5, moe_router_topk=2)


def build(*, grouped=True):
    context = ParallelContext.single()
    dispatcher = build_dispatcher(MoEConfig(), context, CONFIG, torch.float64)
    return MoELayer("layers.3", CONFIG, context=context, init=Initializer(7, 0.5), dtype=torch.float64, dispatcher=dispatcher,
                    grouped=grouped)


def tokens(count=9, seed=1):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(layer, recompute, function=None, x=None):
    """(output, input gradient, parameter gradients) of the layer, run as a part that `recompute` may checkpoint."""
    x = (tokens() if x is None else x).clone().requires_grad_()
    y = recompute.with_moe("moe", function or (lambda call, h: layer(h, h, call)), NOT_CHECKPOINTED, x)
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()])]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_recompute_is_bit_equal_with_and_without_replay():
    layer = build()
    plain = gradients(layer, Recompute(frozenset()))
    for replays, hits in ((True, 1), (False, 0)):
        recompute = Recompute(frozenset(["moe"]), replays=replays)
        assert same(gradients(layer, recompute), plain)
        report = recompute.monitor.report()
        assert (report.hits, report.misses, report.corrupted) == (hits, 1 - hits, ())
        assert recompute.monitor.report().hits == 0


def tie(direction):
    """A layer whose first two experts tie for second place, for every token; and what moves tokens off it by one unit in the last place.
    Its experts are a loop by autograd, which keeps each expert's rows, so that other counts are seen."""
    layer, x = build(grouped=False), tokens()
    x[:, 1] = x[:, 0] = x[:, 0].abs() + 1
    with torch.no_grad():
        layer.router.weight[:3, :2] = torch.tensor([[300.0, 0.0], [0.0, 300.0], [151.0, 151.0]])
        layer.router.weight[:3, 2:] = 0
        layer.router.weight[3:] *= 0.01

    def moved(h):
        step = torch.nextafter(h.detach()[:, :1], torch.full_like(h[:, :1], direction * 99)) - h.detach()[:, :1]
        return h + torch.nn.functional.pad(step, (0, 5))

    return layer, x, moved


def test_a_perturbed_recompute_is_routed_as_in_the_forward():
    changed = 0
    for direction in (1, -1):
        layer, x, moved = tie(direction)
        chosen = []
        layer.router.register_forward_hook(lambda module, _, routing, chosen=chosen: chosen.append(routing))
        function = lambda call, h, layer=layer, moved=moved: layer(h, moved(h) if call.is_recompute else h, call)  # noqa: E731
        _, _, router_gradient, *_ = gradients(layer, Recompute(frozenset(["moe"])), function, x)
        forward, again = chosen
        assert not torch.equal(forward.probabilities, again.probabilities), "the perturbation does not reach the router"
        assert torch.equal(forward.indices, again.indices)
        assert router_gradient.abs().max() > 1e-3, "the router has no gradient"
        try:
            gradients(layer, Recompute(frozenset(["moe"]), replays=False), function, x)
        except torch.utils.checkpoint.CheckpointError:
            changed += 1  # the experts' row counts are others than in the forward
    assert changed, "without replay one direction or the other must change experts, or this test shows nothing"


def test_recorded_refuses_what_the_forward_did_not_do():
    log = CallLog(ReplayMonitor(), replays=True)
    forward = log.next_run()
    for layer, count in (("layers.0", 4), ("layers.1", 3)):
        assert forward.recorded(layer, count) is None
        forward.record(Record.of(layer, torch.zeros(count, 2, dtype=torch.int64), "plan"))
    with pytest.raises(ReplayError, match=r"layers\.1 with 3 tokens comes where the forward had layers\.0 with 4 \(call 0"):
        log.next_run().recorded("layers.1", 3)
    with pytest.raises(ReplayError, match=r"layers\.0 with 5 tokens comes where the forward had layers\.0 with 4"):
        log.next_run().recorded("layers.0", 5)
    again = log.next_run()
    assert again.recorded("layers.0", 4).plan == "plan" and again.recorded("layers.1", 3).layer == "layers.1"
    assert again.recorded("layers.2", 3) is None  # a log that runs out: dispatched anew, and counted
    report = log.monitor.report()
    assert (report.hits, report.misses) == (2, 1)


def test_a_corrupted_record_is_caught():
    layer, recompute, records = build(), Recompute(frozenset(["moe"])), []

    def function(call, h):
        y = layer(h, h, call)
        records.extend(call.log.records if not call.is_recompute else [])
        return y

    x = tokens().requires_grad_()
    y = recompute.with_moe("moe", function, NOT_CHECKPOINTED, x)
    records[0].indices[4, 1] = (records[0].indices[4, 1] + 1) % CONFIG.num_experts
    y.sum().backward()
    report = recompute.monitor.report()
    assert report.corrupted == ("layers.3",)
    with pytest.raises(ReplayError, match=r"rank 0: the routing recorded by layers\.3 changed"):
        report.check(ParallelContext.single())
    gradients(layer, recompute)
    recompute.monitor.report().check(ParallelContext.single())  # the next step starts clean


def test_fingerprint_sees_order_and_values():
    indices = torch.randint(0, 128, (300, 8), generator=torch.Generator().manual_seed(0))
    known = fingerprint(indices)
    for row, column in ((0, 0), (150, 3), (299, 7)):
        other = indices.clone()
        other[row, column] ^= 1
        assert fingerprint(other) != known
    assert fingerprint(indices.roll(1, 0)) != known and fingerprint(indices.flip(1)) != known
    assert fingerprint(indices[:0]) == 0


def test_nothing_is_recorded_without_gradient():
    layer, recompute, calls = build().requires_grad_(False), Recompute(frozenset(["moe"])), []

    def function(call, h):
        calls.append(call)
        return layer(h, h, call)

    recompute.with_moe("moe", function, NOT_CHECKPOINTED, tokens())  # no input asks for a gradient
    with torch.no_grad():
        recompute.with_moe("moe", function, NOT_CHECKPOINTED, tokens().requires_grad_())
    assert calls[0].log.records == [] and calls[1] is NOT_CHECKPOINTED
    frozen = tokens().requires_grad_()  # frozen weights under an input with gradient are recomputed, so they are recorded
    recompute.with_moe("moe", function, NOT_CHECKPOINTED, frozen).sum().backward()
    assert len(calls[2].log.records) == 1 and recompute.monitor.report().hits == 1


def test_calls_in_several_threads_keep_apart():
    layer, recompute = build(), Recompute(frozenset(["moe"]))
    expected = [gradients(layer, Recompute(frozenset()), x=tokens(5 + n, n)) for n in range(4)]
    results = [None] * 4

    def work(n):
        for _ in range(5):
            results[n] = gradients(layer, recompute, x=tokens(5 + n, n))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(got, known) for got, known in zip(results, expected, strict=True))
    report = recompute.monitor.report()
    assert (report.hits, report.misses, report.corrupted) == (20, 0, ())
