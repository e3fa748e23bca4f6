"""One backward for both passes: the losses, gradients and figures of a backward for each."""
import dataclasses
import os
import weakref

import numpy as np
import pytest
import torch

from megatron_dllm.config import PRESETS, LoRAConfig, ObjectiveConfig, ParallelConfig, parse
from megatron_dllm.data.order import Row
from megatron_dllm.diffusion.fill import filled_up
from megatron_dllm.diffusion.random import Stream
from megatron_dllm.models.diffusion_gemma.lora import add_adapters
from megatron_dllm.models.diffusion_gemma.stages import ModelPipeline
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.pipeline import parse_layout
from megatron_dllm.tensor_parallel.initialization import Initializer
from megatron_dllm.training import batches
from megatron_dllm.training.draft_pass import PassSizes, is_short
from megatron_dllm.training.graphs import on_device
from megatron_dllm.transformer import joint_backward
from megatron_dllm.transformer.rows import Rows
from tests.unit.kernel_cases import DEVICES
from tests.unit.test_drafts_apart import ALL, CASES, LINEAR, SEED, SOME
from tests.unit.toy import CONFIG, LENGTHS, toy_inputs, toy_model, toy_plan
from tools.benchmarking.workload import calm

JOINED = [case for case in CASES if case != "linear layers"]
# The widths that kernels take, and enough tokens that rows of several tiles are moved.
WIDE = dataclasses.replace(
    PRESETS["toy"], hidden_size=256, ffn_hidden_size=192, moe_ffn_hidden_size=64, kv_channels=64, global_kv_channels=128, num_layers=2,
    layer_types=("sliding", "full"), window_size=40, canvas_length=32, vocab_size=509)
WIDE_MHC = dataclasses.replace(WIDE, enable_mhc_connections=True, mhc_num_residual_streams=4)
MANY = ((40, 60), (30, 64), (7, 61), (64, 64), (90, 32))


def plan_of(objective, lengths=LENGTHS, **options):
    return toy_plan(objective, lengths, seed=SEED, **options)


def results(model, inputs):
    """Loss terms, gradients of all that is trained, and every layer's figures."""
    model.zero_grad(set_to_none=True)
    terms = model(inputs)
    terms.total.backward()
    return terms.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}, model.routing.drain()


def differences(wanted, found):
    """By parameter, the gradients' distance beside their norm, or beside a thousandth of all gradients' where that is more."""
    assert found.keys() == wanted.keys()
    scale = torch.stack([g.norm() for g in wanted.values() if g is not None]).norm()
    assert all((found[name] is None) == (want is None) for name, want in wanted.items())
    return {name: float((found[name] - want).norm() / torch.maximum(want.norm(), 1e-3 * scale))
            for name, want in wanted.items() if want is not None}


def agree(model, shared, joint):
    """Both ways give one result."""
    assert shared.joint is None and joint.joint is not None
    wanted, found = results(model, shared), results(model, joint)
    for name in ("total", "weighted", "sums", "correct", "counts"):
        torch.testing.assert_close(getattr(found[0], name), getattr(wanted[0], name), rtol=1e-12, atol=1e-12)
    assert max(differences(wanted[1], found[1]).values()) <= 1e-11
    for layer, want in wanted[2].items():
        assert torch.equal(found[2][layer].load, want.load) and torch.equal(found[2][layer].num_tokens, want.num_tokens)
        torch.testing.assert_close(found[2][layer].entropy, want.entropy, rtol=1e-12, atol=0)
    return wanted


@pytest.mark.parametrize("case", JOINED)
def test_one_backward_is_two(case):
    config, objective, options = CASES[case]
    plan, given = plan_of(objective, config=config, **options), {"objective": objective, "config": config}
    agree(toy_model(config=config), toy_inputs(plan, **given), toy_inputs(plan, passes="joint", **given))


@pytest.mark.parametrize("targets", [("attention", "mlp"), ("attention", "mlp", "router", "self_conditioning"), ("router",)])
def test_adapters(targets):
    model, plan = toy_model(), plan_of(SOME)
    model.requires_grad_(False)
    add_adapters(model, LoRAConfig(lora_rank=2, lora_targets=targets), Initializer(3, 0.2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("adapter.b"):
                parameter.fill_(0.1)
    agree(model, toy_inputs(plan, objective=SOME), toy_inputs(plan, objective=SOME, passes="joint"))


def test_filled_up_tokens():
    given = {"objective": SOME, "edit": lambda streams: filled_up(streams, 16, CONFIG.pad_token_id)}
    plan = plan_of(SOME)
    agree(toy_model(), toy_inputs(plan, **given), toy_inputs(plan, passes="joint", **given))


def test_without_gradient_and_twice():
    """Nothing is left over from one microbatch to the next, and no gradient is needed."""
    model, plan = toy_model(), plan_of(ALL)
    joint = toy_inputs(plan, objective=ALL, passes="joint")
    first, second = results(model, joint), results(model, joint)
    assert all(torch.equal(a, b) for a, b in zip(first[1].values(), second[1].values(), strict=True))
    with torch.no_grad():
        torch.testing.assert_close(model(joint).total, first[0].total, rtol=1e-12, atol=0)
    model.requires_grad_(False)
    torch.testing.assert_close(model(joint).total, first[0].total, rtol=1e-12, atol=0)


def test_nothing_is_held_after_a_step(monkeypatch):
    """Not by a cycle either, which Python's collector would not see: it would pass through autograd's nodes."""
    held = weakref.WeakSet()

    class Counted(joint_backward._Kept):
        def __init__(self, tensor):
            super().__init__(tensor)
            held.add(self)

    monkeypatch.setattr(joint_backward, "_Kept", Counted)
    model, joint = toy_model(), toy_inputs(plan_of(ALL), objective=ALL, passes="joint")
    total = model(joint).total
    assert len(held) > 50
    total.backward()
    del total
    assert not held
    model(joint)
    assert not held


@pytest.mark.parametrize("broken", ["rows", "choices", "numbers"])
def test_what_is_not_replaced_is_seen(broken, monkeypatch):
    """Each of the rules is needed: without one of them the gradients are others."""
    if broken == "rows":
        monkeypatch.setattr(joint_backward._Copies, "make", lambda self: None)
    elif broken == "choices":
        moved = joint_backward._Move.moved
        monkeypatch.setattr(joint_backward._Move, "moved", lambda self, tensor, other: tensor
                            if len(tensor) == len(self.source) and tensor.is_floating_point() else moved(self, tensor, other))
    else:
        whole = joint_backward._Move.of_layers
        monkeypatch.setattr(joint_backward._Move, "of_layers", lambda *given: [
            dataclasses.replace(move, replaced=()) for move in whole(*given)])
    model, plan = toy_model(), plan_of(ALL)
    wanted = results(model, toy_inputs(plan, objective=ALL))
    try:
        found = results(model, toy_inputs(plan, objective=ALL, passes="joint"))
    except ValueError as error:
        assert broken == "numbers" and "no rule joins" in str(error)
        return
    assert max(differences(wanted[1], found[1]).values()) > 1e-4


def test_columns_of_one_matrix_are_copied_at_once(monkeypatch):
    def parts(x):  # queries, keys and values, and columns that nobody has kept
        return x[:, :32].unflatten(1, (4, 8)), x[:, 32:48].unflatten(1, (2, 8)), x[:, 48:64].unflatten(1, (2, 8))

    whole, wide, by_columns = ((torch.randn(7, width), torch.randn(3, width)) for width in (64, 80, 7))
    turned = torch.randn(2, 7, 5).transpose(0, 1), torch.randn(2, 3, 5).transpose(0, 1)
    wanted = [tensor.clone() for tensor, _ in (whole, wide, turned)]
    for want, (_, other), width in zip(wanted, (whole, wide, turned), (64, 64, 2), strict=True):
        want[4:, :width] = other[:, :width]
    copies = joint_backward._Copies(Rows(slice(4, 7), True), 7, 3)
    for tensor, other in (*zip(parts(wide[0]), parts(wide[1]), strict=True), *zip(parts(whole[0]), parts(whole[1]), strict=True), turned,
                          (by_columns[0][:, :3], by_columns[1][:, 1:4])):
        copies.add(tensor, other)
    at_once, alone, copy = [], [], torch.Tensor.copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda targets, sources: at_once.append(
        [copy(*pair).shape for pair in zip(targets, sources, strict=True)]))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *pair: alone.append(copy(*pair).shape))
    copies.make()
    assert at_once == [[(3, 64)]] and sorted(alone) == [(3, 2, 5), (3, 3), (3, 64)]
    for (tensor, _), want in zip((whole, wide, turned), wanted, strict=True):
        assert torch.equal(tensor, want)
    assert torch.equal(by_columns[0][4:, :3], by_columns[1][:, 1:4])


def test_other_layers_are_refused():
    plan = plan_of(ALL, LENGTHS[:4], config=LINEAR)
    with pytest.raises(ValueError, match="set --draft-pass shared"):
        toy_model(config=LINEAR)(toy_inputs(plan, objective=ALL, config=LINEAR, passes="joint"))


def test_long_texts_on_a_cpu_are_not_joined():
    sizes = PassSizes.of(plan_of(ALL).microbatches[0][0])
    assert is_short(sizes, 7) and not is_short(dataclasses.replace(sizes, longest=1200), 7)
    for longest, window in ((1000, 200), (1000, 1000), (500, 600)):
        assert is_short(dataclasses.replace(sizes, longest=longest), window)
    assert not is_short(dataclasses.replace(sizes, longest=952), 600)


@pytest.mark.parametrize("window", [7, 200, 256, 300, 600])
def test_what_is_short_is_small_attention(window):
    """Else the attention of a joint pass refuses to keep rows."""
    for longest in (60, 300, 700, 1000):
        plan = toy_plan(ALL, ((longest // 2, longest - longest // 2 - 4),), config=CONFIG, seq_length=1024)
        if is_short(PassSizes.of(plan.microbatches[0][0]), window):
            inputs = toy_inputs(plan, objective=ALL, config=dataclasses.replace(CONFIG, window_size=window), passes="joint")
            for token_pass in (inputs.first_pass, inputs.second_pass):
                assert all(token_pass.layers[kind].attention.work.small is not None for kind in ("sliding", "full"))


def test_a_flag_that_cannot_be_followed_is_refused(monkeypatch):
    monkeypatch.setattr(batches, "may_be_joint", lambda *given: False)
    run = parse("--preset toy --train-iters 2 --data-source sudoku --draft-pass joint --self-conditioning-prob 1".split())
    with pytest.raises(ValueError, match="--draft-pass joint: on cpu layers are joined where"):
        batches.BatchMaker(run, None, None, Stream.TRAIN, ParallelContext.single()).can_join  # noqa: B018 (the question is the test)


def test_the_device_is_asked_before_processes_are_forked(monkeypatch):
    """A forked process that asks a CUDA device fails."""
    asked, parent = [], os.getpid()
    monkeypatch.setattr(batches, "may_be_joint", lambda *given: asked.append(os.getpid()) or False)
    words = "--preset toy --train-iters 2 --data-source sudoku --num-workers 1 --global-batch-size 2 --self-conditioning-prob 1"
    run = parse(words.split())

    class Examples:
        keys, lengths, truncated = np.zeros((8, 2), np.int64), np.full((8, 2), 9), np.zeros(8, bool)

        def row(self, number):
            return Row(0, (number % 8,))

        def tokens(self, index):
            return np.full(18, 5, np.int64)

    maker = batches.BatchMaker(run, Examples(), Examples(), Stream.TRAIN, ParallelContext.single())
    assert len(list(batches.training_batches(maker, start_iteration=0, iterations=2))) == 2 and asked == [parent]


@DEVICES
@pytest.mark.parametrize("config", [WIDE, pytest.param(WIDE_MHC, marks=pytest.mark.slow)], ids=["plain", "mhc"])
@pytest.mark.parametrize("share, adapted", [(1.0, False), (0.5, False), (1.0, True)])
def test_in_16_bits(device, config, share, adapted):
    """Calm, as the other ways' roundings are otherwise as large as what is to be seen."""
    device, objective = torch.device(device), ObjectiveConfig(self_conditioning_prob=share)
    plan = toy_plan(objective, MANY, seed=SEED, config=config)
    model = toy_model(torch.bfloat16, config=config, context=ParallelContext.single(device))
    calm(model)
    if adapted:
        model.requires_grad_(False)
        add_adapters(model, LoRAConfig(lora_rank=16, lora_targets=("attention", "mlp")), Initializer(3, 0.2))
    given = {"objective": objective, "config": config}

    def found(passes):
        """Inputs lie in one piece of memory, as in training, so that a write to one would be seen as one to all."""
        inputs = on_device(toy_inputs(plan, passes=passes, dtype=torch.float32, **given), device)
        terms, grads, _ = results(model, inputs)
        return float(terms.total), torch.cat([grad.double().flatten() for grad in grads.values() if grad is not None])

    (loss, wanted), (_, apart), (own_loss, joint) = (found(passes) for passes in ("shared", "apart", "joint"))
    assert abs(own_loss - loss) <= 2e-3 * abs(loss)
    # Left as it is after the first pass, a joint gradient is off by more than its own size.
    assert (joint - wanted).norm() <= max(0.02 * wanted.norm(), 2 * (apart - wanted).norm()) <= 0.1 * wanted.norm()


@DEVICES
@pytest.mark.parametrize("config", [WIDE, pytest.param(WIDE_MHC, marks=pytest.mark.slow)], ids=["plain", "mhc"])
def test_stages_in_16_bits(device, config):
    """Three virtual stages, the last with the loss alone, are as near to the whole model as two backwards through them."""
    context, objective = ParallelContext.single(torch.device(device)), ObjectiveConfig(self_conditioning_prob=0.5)
    plan = toy_plan(objective, MANY, seed=SEED, config=config)
    model = toy_model(torch.bfloat16, config=config, context=context)
    calm(model)
    pipeline = ModelPipeline(model, parse_layout("Et|t|L", ranks=1, layers="tt"), ParallelConfig())

    def found(passes, through=None):
        inputs = on_device(toy_inputs(plan, passes=passes, dtype=torch.float32, objective=objective, config=config), context.device)
        model.zero_grad(set_to_none=True)
        if through is None:
            terms = model(inputs)
            terms.total.backward()
        else:
            terms = through.train([inputs])
        return float(terms.total.detach()), torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])

    (loss, wanted), (_, two), (own_loss, joint) = found("shared"), found("shared", pipeline), found("joint", pipeline)
    assert abs(own_loss - loss) <= 2e-3 * abs(loss)
    assert (joint - wanted).norm() <= max(0.02 * wanted.norm(), 2 * (two - wanted).norm()) <= 0.1 * wanted.norm()
