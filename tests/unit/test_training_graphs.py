"""training.graphs: microbatches of one form are replayed, with inputs and results copied; held to ordinary calls, bit for bit."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from megatron_dllm.config import PRESETS, ModelConfig, MoEConfig, ObjectiveConfig, OptimizerConfig
from megatron_dllm.diffusion.inputs import to_device
from megatron_dllm.diffusion.nested import form_of, map_tensors, tensors_of
from megatron_dllm.diffusion.passes import _filled_up
from megatron_dllm.kernels.graphs import CudaRecorder
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.moe import replay
from megatron_dllm.moe.replay import ReplayReport
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel.initialization import Initializer
from megatron_dllm.training.graphs import (
    GraphedMicrobatches,
    Recording,
    StaticInputs,
    check_queues,
    forward_backward_of,
    graphed,
    note,
    on_device,
)
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import train_step
from megatron_dllm.transformer.recompute import Recompute
from tests.unit.toy import CONFIG, LENGTHS, toy_inputs, toy_model, toy_plan

CPU = torch.device("cpu")
ALWAYS = ObjectiveConfig(self_conditioning_prob=1.0)


class Rerun:
    """A recorder whose recordings call the function again and leave the results where the first ones were."""

    def __init__(self):
        self.warm_ups = self.records = self.replays = 0

    def warm_up(self, function):
        self.warm_ups += 1
        return function()

    def record(self, function):
        self.records += 1
        with torch.no_grad():
            kept = [p.clone() for p in self.untouched]
        result = function()
        for gradient, before in zip(self.untouched, kept, strict=True):  # a recording does no work
            gradient.copy_(before)

        def replay():
            self.replays += 1
            for target, source in zip(tensors_of(result), tensors_of(function()), strict=True):
                target.copy_(source)

        return Recording(replay, result)

    untouched: tuple[torch.Tensor, ...] = ()


def reshuffled(inputs, seed: int, config: ModelConfig = CONFIG):
    """The same microbatch with other tokens."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tokens):
        return torch.randint(3, config.vocab_size, tokens.shape, generator=generator)

    return dataclasses.replace(
        inputs, clean=dataclasses.replace(inputs.clean, tokens=drawn(inputs.clean.tokens)),
        canvas=dataclasses.replace(inputs.canvas, tokens=drawn(inputs.canvas.tokens)), second_tokens=drawn(inputs.second_tokens))


def runner(model, optimizer, limit=8, message=lambda text: None):
    recorder = Rerun()
    recorder.untouched = tuple(bucket.gradients for bucket in optimizer.buckets.buckets)
    return recorder, GraphedMicrobatches(forward_backward_of(model), lambda notes: note(model, notes), recorder, device=CPU, limit=limit,
                                         message=message)


def one_form(count: int, *, passes: str = "shared"):
    inputs = toy_inputs(toy_plan(ALWAYS), objective=ALWAYS, passes=passes)
    return [reshuffled(inputs, seed) for seed in range(count)]


@pytest.mark.parametrize(("recompute", "passes"), [
    ((), "shared"), (("block",), "shared"), pytest.param(("moe", "mlp"), "shared", marks=pytest.mark.slow), (("block",), "apart"),
    ((), "joint")], ids=["none", "full", "selective", "full, drafts apart", "joint"])  # fmt: skip
def test_steps_with_graphs_are_bit_equal_to_steps_without(recompute, passes):
    plain, model = (toy_model(recompute=frozenset(recompute)) for _ in range(2))
    optimizers = [MasterOptimizer(m, OptimizerConfig(lr=1e-2), m.context) for m in (plain, model)]
    recorder, graphs = runner(model, optimizers[1])
    for step in range(3):
        batch = [reshuffled(inputs, 10 * step + n) for n, inputs in enumerate(one_form(2, passes=passes))]
        expected = train_step(plain, optimizers[0], batch, 1e-2)
        got = train_step(model, optimizers[1], batch, 1e-2, graphs=graphs)
        assert got.loss == expected.loss and got.grad_norm == expected.grad_norm
        # Three layers, two passes, two microbatches; drafts that are made beforehand are not computed again.
        assert got.replay == expected.replay and (not recompute or got.replay == ReplayReport(6 if passes == "apart" else 12, 0, ()))
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(got.terms), tensors_of(expected.terms), strict=True))
    assert (recorder.warm_ups, recorder.records, recorder.replays) == (1, 1, 5)
    for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    expected, got = plain.routing.drain(), model.routing.drain()
    assert list(expected) == list(got)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(got), tensors_of(expected), strict=True))


@pytest.mark.slow
def test_a_replay_notes_what_was_noted_when_it_was_recorded(monkeypatch):
    """What recomputes replayed and what was sent; a record that changed on the device, in the replay in which it did and in no other."""
    model = toy_model(recompute=frozenset(["block"]))
    optimizer = MasterOptimizer(model, OptimizerConfig(), model.context)
    _, graphs = runner(model, optimizer)
    exact, made = replay.fingerprint, []

    def fingerprint(indices):
        # A run of the function has 6 forwards and 6 recomputes. The fourth of these runs is the second replay.
        made.append(len(made) == 3 * 12 + 6)
        return exact(indices) + made[-1]

    monkeypatch.setattr(replay, "fingerprint", fingerprint)
    model.layers["1"].register_forward_pre_hook(lambda *_: model.context.log.start("all_gather", "ep", 5, "") and None)
    model.context.log.start("all_gather", "ep", 7, "")  # not the microbatch's
    inputs, reports = one_form(1)[0], []
    for _ in range(4):
        graphs(inputs)
        reports.append(model.recompute.monitor.report())
    assert [(report.hits, report.misses, report.corrupted) for report in reports] == [
        (6, 0, ()), (6, 0, ()), (6, 0, ("layers.2",)), (6, 0, ())]
    assert len(made) == 5 * 12 and model.context.log.total() == (1 + 4 * 2, 7 + 4 * 2 * 5)


def test_results_survive_the_next_replay():
    model = toy_model()
    optimizer = MasterOptimizer(model, OptimizerConfig(), model.context)
    _, graphs = runner(model, optimizer)
    batches = one_form(4)
    kept = [graphs(inputs) for inputs in batches]
    with torch.no_grad():
        again = [model(inputs) for inputs in batches]
    assert [k.total for k in kept] == [a.total for a in again]
    assert len({k.total.item() for k in kept}) == 4


def test_a_new_form_is_an_ordinary_call_and_the_limit_holds():
    model, told = toy_model(), []
    optimizer = MasterOptimizer(model, OptimizerConfig(), model.context)
    recorder, graphs = runner(model, optimizer, limit=1, message=told.append)
    forms = [toy_inputs(toy_plan(lengths=LENGTHS[:n])) for n in (2, 3)]
    assert form_of(forms[0]) != form_of(forms[1])
    for inputs in (*forms, *forms, *forms):
        graphs(inputs)
    assert (recorder.records, recorder.replays) == (1, 2)
    counts = graphs.drain()
    assert (counts.replayed, counts.recorded, counts.eager, counts.held) == (2, 1, 4, 1)
    assert graphs.drain().replayed == 0
    recorded = [text for text in told if text.startswith("CUDA graph")]
    assert len(recorded) == 1 and "1 of at most 1 (--cuda-graph-limit)" in recorded[0]
    assert [text.partition(" ")[0] for text in told if text not in recorded] == ["1", "2", "4"]


def test_the_form_knows_what_shapes_the_work():
    inputs = toy_inputs(toy_plan(ALWAYS), objective=ALWAYS)
    assert form_of(inputs) == form_of(reshuffled(inputs, 3))
    assert hash(form_of(inputs)) == hash(form_of(reshuffled(inputs, 3)))
    assert form_of(inputs) != form_of(dataclasses.replace(inputs, uniform_null=True))
    first = dataclasses.replace(inputs.first_pass, num_clean=inputs.first_pass.num_clean - 1, num_canvas=inputs.first_pass.num_canvas + 1)
    assert form_of(inputs) != form_of(dataclasses.replace(inputs, first_pass=first))
    assert form_of(inputs) != form_of(map_tensors(inputs, lambda x: x.to(torch.float32) if x.is_floating_point() else x))
    assert form_of((slice(0, 2),)) != form_of((slice(0, 3),))
    with pytest.raises(TypeError, match="ndarray in nested inputs"):
        form_of((torch.zeros(2).numpy(),))


def test_the_form_does_not_follow_the_place_of_a_canvas():
    """The second loop reads other keys then, but as many are kept."""
    plans = [toy_plan(ALWAYS, ((20, 40),), seed=seed) for seed in range(6)]
    assert len({plan.microbatches[0][0].examples[0].canvases for plan in plans}) > 1
    assert len({form_of(toy_inputs(plan, objective=ALWAYS)) for plan in plans}) == 1
    assert _filled_up(np.array([5, 6]), 9).tolist() == list(range(9))
    assert _filled_up(np.arange(150, 190), 400).tolist() == [*range(88), *range(150, 190)]
    assert _filled_up(np.zeros(0, np.int64), 9).tolist() == []


def test_static_inputs_take_over_every_tensor():
    inputs, other = one_form(2)
    static = StaticInputs(inputs, CPU)
    assert form_of(static.inputs) == form_of(inputs)
    addresses = [tensor.data_ptr() for tensor in static.tensors]
    assert all((address - static.buffer.data_ptr()) % 256 == 0 for address in addresses)
    for source in (inputs, other):
        static.load(source)
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(static.inputs), tensors_of(source), strict=True))
    assert addresses == [tensor.data_ptr() for tensor in tensors_of(static.inputs)]


@pytest.mark.gpu
def test_inputs_go_to_the_device_in_one_copy():
    inputs, device = one_form(1)[0], torch.device("cuda", 0)
    there = on_device(inputs, device)
    assert form_of(there) == form_of(inputs)
    tensors = tensors_of(there)
    assert all(tensor.device == device for tensor in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors, tensors_of(inputs), strict=True))
    assert on_device(there, device).clean.tokens is there.clean.tokens


def test_without_cuda_graphs_are_refused():
    with pytest.raises(ValueError, match="the device is cpu; set --cuda-graph-impl none"):
        graphed(toy_model(), limit=1, message=print)


@pytest.mark.parametrize("setting", [None, "1", "8"])
def test_recorded_pipelines_want_queues(setting):
    with pytest.raises(ValueError, match=f"MAX_CONNECTIONS={setting or 'not set'} work may stand.*export CUDA_DEVICE_MAX_CONNECTIONS=32"):
        check_queues(setting)
    check_queues("32")


WIDE = dataclasses.replace(PRESETS["toy"], num_layers=3, layer_types=("sliding", "sliding", "full"), window_size=32, canvas_length=16)


BALANCED = MoEConfig(moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1, moe_router_enable_expert_bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("moe", "recompute"), [(MoEConfig(), ()), (BALANCED, ()), (MoEConfig(), ("block",)), (BALANCED, ("moe", "mlp"))],
                         ids=["plain", "balanced", "full recompute", "balanced, selective recompute"])
def test_cuda_graphs_give_the_same_losses_and_gradients(moe, recompute):
    device = torch.device("cuda", 0)

    def built():
        model = DiffusionGemma(WIDE, context=ParallelContext.single(device), init=Initializer(5, 0.15), dtype=torch.bfloat16, moe=moe,
                               recompute=Recompute(frozenset(recompute)))
        return model, MasterOptimizer(model, OptimizerConfig(lr=1e-3), model.context)

    (plain, plain_optimizer), (model, optimizer) = built(), built()
    inputs = toy_inputs(toy_plan(ALWAYS, config=WIDE), objective=ALWAYS, config=WIDE, dtype=torch.float32)
    graphs = graphed(model, limit=2, message=print)
    torch.set_deterministic_debug_mode("default")  # filling fresh memory would be recorded too
    for step in range(5):
        batch = [reshuffled(inputs, 2 * step + n, WIDE) for n in range(2)]
        expected = train_step(plain, plain_optimizer, batch, 1e-3)
        got = train_step(model, optimizer, batch, 1e-3, graphs=graphs)
        assert (got.loss, got.grad_norm, got.replay) == (expected.loss, expected.grad_norm, expected.replay), f"step {step}"
    assert graphs.drain().replayed == 9
    for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # that it does not see every wait
def test_a_microbatch_waits_for_nobody():
    device = torch.device("cuda", 0)
    torch.set_deterministic_debug_mode("default")
    model = DiffusionGemma(WIDE, context=ParallelContext.single(device), init=Initializer(5, 0.15), dtype=torch.bfloat16)
    inputs = to_device(toy_inputs(toy_plan(ALWAYS, config=WIDE), objective=ALWAYS, config=WIDE, dtype=torch.float32), device)
    model(inputs).total.backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        model(inputs).total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_recorder_goes_on_after_the_last_of_its_recordings_is_gone():
    device = torch.device("cuda", 0)
    torch.set_deterministic_debug_mode("default")
    recorder, x = CudaRecorder(device), torch.ones(1000, device=device)
    recorder.warm_up(lambda: x * 2 + 1)
    both = [recorder.record(lambda: x * 2 + 1), recorder.record(lambda: x * 3 + 3)]
    for recording in both:
        recording.replay()
    kept = both[1].result
    del recording
    both.clear()
    third = recorder.record(lambda: x * 5 + 2)
    third.replay()
    assert (third.result.unique().tolist(), kept.unique().tolist()) == ([7.0], [6.0])
