"""--transformer-impl transformer_engine against our own layers, over a stand-in for the package on the CPU."""
import dataclasses
import sys

import pytest
import torch

from megatron_dllm.config import MoEConfig, TrainingConfig, parse
from megatron_dllm.models.diffusion_gemma.build import build_model
from megatron_dllm.moe.experts import Experts, looped_linear
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import Initializer
from megatron_dllm.transformer.norms import rms_norm
from megatron_dllm.transformer_engine import Engine, choices, install, load_engine
from megatron_dllm.transformer_engine.experts import _PerExpert, grouped_product
from megatron_dllm.transformer_engine.linear import EngineLinear
from tests.unit.fake_transformer_engine import State, install_fake
from tests.unit.toy import CONFIG, gradients, toy_model, toy_plan

CPU = torch.device("cpu")
WIDE = dataclasses.replace(CONFIG, num_experts=4, moe_router_topk=4)  # every token to every expert: no near-tie decides


@pytest.fixture
def package(monkeypatch):
    return install_fake(monkeypatch)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().requires_grad_()


@pytest.mark.parametrize("rows", [0, 1, 16, 37])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_linear_of_any_number_of_rows(package, rows, fp8):
    engine = Engine(package, ("tensorwise", "hybrid") if fp8 else None)
    product, x, weight = EngineLinear(engine, 32, 48), numbers(rows, 32), numbers(48, 32, seed=1)
    y = product(x, weight)
    expected = torch.nn.functional.linear(x, weight)
    assert y.shape == (rows, 48) and State.products_in_fp8 == fp8
    torch.testing.assert_close(y, expected, rtol=0.1 if fp8 else 0, atol=1.0 if fp8 else 0)
    grads = torch.autograd.grad(y.sum(), (x, weight))
    assert [g.shape for g in grads] == [x.shape, weight.shape]
    if not fp8:
        assert all(map(torch.equal, grads, torch.autograd.grad(expected.sum(), (x, weight))))


def test_a_linear_keeps_no_parameter_and_no_weight(package):
    product = EngineLinear(Engine(package), 32, 48)
    product(numbers(3, 32), numbers(48, 32))
    assert not list(product.module.parameters()) and "weight" not in vars(product.module)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("lengths", [[5, 0, 16, 2], [0, 0, 0, 0]])
def test_grouped_rows_and_rows_of_no_expert(package, lengths, fp8):
    engine = Engine(package, ("tensorwise", "hybrid") if fp8 else None, grouped=True)
    product = grouped_product(engine, 4, [(48, 32)], CPU)
    rows, weight, counts = numbers(sum(lengths) + 3, 32), numbers(4, 48, 32, seed=1), torch.tensor(lengths)
    y, expected = product(rows, weight, counts), looped_linear(rows, weight, counts)
    torch.testing.assert_close(y[:sum(lengths)], expected[:sum(lengths)], rtol=0.1 if fp8 else 0, atol=1.0 if fp8 else 0)
    grads, wanted = (torch.autograd.grad(out.sum(), (rows, weight)) for out in (y, expected))
    assert y.shape == expected.shape and [g.shape for g in grads] == [g.shape for g in wanted]
    if not fp8:
        assert all(map(torch.equal, grads, wanted))


def test_gradients_that_lie_together_are_not_copied():
    weight, together = numbers(3, 4, 5), torch.randn(4, 4, 5).bfloat16()
    for grads, copied in ((together[1:], False), (together[[2, 0, 1]], False), (together.flip(0)[:3].contiguous().unbind(0)[::-1], True)):
        parts = list(grads)
        (total,) = torch.autograd.grad(_PerExpert.apply(weight), weight, parts)
        assert torch.equal(total, torch.stack(parts))
        assert (total.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr()) == copied


def test_both_products_of_experts_read_the_counts_once(package):
    class Counts(torch.Tensor):
        reads = 0

        def tolist(self):
            Counts.reads += 1
            return super().tolist()

    experts = Experts("experts", WIDE, context=ParallelContext.single(), init=Initializer(0, 0.1), dtype=torch.bfloat16)
    install(torch.nn.ModuleList([experts]), Engine(package, grouped=True))
    assert experts.backend == "transformer_engine" and not experts.takes_weights
    experts(numbers(10, WIDE.hidden_size), torch.tensor([1, 2, 3, 4]).as_subclass(Counts))
    assert Counts.reads == 1


@pytest.mark.parametrize("grouped", [False, True])
def test_a_model_computes_the_same_and_keeps_its_parameters(package, grouped):
    """bf16: as far from float64 as our own layers are."""
    plan = toy_plan(config=WIDE)
    exact_loss, exact = gradients(toy_model(config=WIDE), plan, config=WIDE)
    ours, engines = (toy_model(torch.bfloat16, config=WIDE) for _ in range(2))
    shapes = {name: (p.shape, p.placement) for name, p in engines.named_parameters()}
    install(engines, Engine(package, grouped=grouped))
    assert {name: (p.shape, p.placement) for name, p in engines.named_parameters()} == shapes

    def distance(model):
        loss, found = gradients(model, plan, config=WIDE, dtype=torch.float32)
        squared = sum((found[name].double() - exact[name]).square().sum() for name in exact)
        return abs(loss - exact_loss), (squared / sum(g.square().sum() for g in exact.values())).sqrt()

    (loss, gradient), (own_loss, own_gradient) = distance(engines), distance(ours)
    assert loss <= 2 * own_loss + 2.0**-9 * exact_loss and gradient <= 2 * own_gradient


def test_a_state_goes_from_one_to_the_other(package):
    ours, engines = toy_model(torch.bfloat16, seed=1), toy_model(torch.bfloat16, seed=2)
    install(engines, Engine(package, grouped=True))
    engines.load_state_dict(ours.state_dict(), strict=True)
    assert all(map(torch.equal, ours.state_dict().values(), engines.state_dict().values()))
    ours.load_state_dict(engines.state_dict(), strict=True)


def test_fp8_is_in_linears_and_experts_alone(package):
    model, plan = toy_model(torch.bfloat16, config=WIDE), toy_plan(config=WIDE)
    loss, _ = gradients(model, plan, config=WIDE, dtype=torch.float32)
    install(model, Engine(package, ("tensorwise", "hybrid"), grouped=True))
    low_loss, _ = gradients(model, plan, config=WIDE, dtype=torch.float32)
    linears, layers = 3 * (2 + 4) - 1 + 2, 3  # a full layer has no v; self-conditioning's MLP
    # The second pass runs linears and experts again; self-conditioning runs in it alone, since the first has no signal.
    assert State.products_in_fp8 == 2 * (linears - 2) + 2 + 2 * layers * 2 * WIDE.num_experts
    assert low_loss == pytest.approx(loss, rel=0.05) and low_loss != loss


def test_norms_of_the_package(package):
    from megatron_dllm.transformer_engine.norms import engine_rms_norm

    x, weight = numbers(3, 5, 24), numbers(24, seed=1)
    results = [(norm(x, weight, 1e-3), norm) for norm in (engine_rms_norm(), rms_norm)]
    grads = [torch.autograd.grad(y.float().square().sum(), (x, weight)) for y, _ in results]
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(grads[0], grads[1])


class TestRefusals:
    def test_without_the_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformer_engine", None)
        with pytest.raises(ValueError, match="install it with tools/install_gpu.sh --te, or set --transformer-impl local"):
            load_engine(TrainingConfig(), MoEConfig(), torch.device("cuda"))

    def test_on_a_cpu(self, package):
        with pytest.raises(ValueError, match="this run is on cpu; set --device cuda, or set --transformer-impl local"):
            load_engine(TrainingConfig(), MoEConfig(), CPU)
        run = parse("--preset toy --train-iters 1 --data-source sudoku --bf16 --transformer-impl transformer_engine".split())
        with pytest.raises(ValueError, match="this run is on cpu"):
            build_model(run, ParallelContext.single())

    def test_without_fp8(self, monkeypatch):
        install_fake(monkeypatch, fp8=(False, "Device compute capability 8.9 or higher required."))
        with pytest.raises(ValueError, match="--fp8-recipe tensorwise: Device compute capability 8.9 or higher required; leave --fp8"):
            load_engine(TrainingConfig(fp8_format="hybrid"), MoEConfig(), torch.device("cuda"))


def test_the_recipe_of_the_flags(package):
    assert load_engine(TrainingConfig(), MoEConfig(), torch.device("cuda")) == Engine(package)
    training = TrainingConfig(fp8_format="e4m3", fp8_recipe="blockwise")
    engine = load_engine(training, MoEConfig(moe_grouped_gemm_backend="transformer_engine"), torch.device("cuda"))
    assert engine == Engine(package, ("blockwise", "e4m3"), grouped=True)


def test_the_table_tells_every_part():
    words = "--preset diffusiongemma-26b-a4b --train-iters 1 --data-source sudoku --bf16"
    assert choices(parse(words.split())) == ()
    rows = {row.part: row for row in choices(parse(f"{words} --transformer-impl transformer_engine --fp8-format hybrid".split()))}
    assert rows["linear layers (q, k, v, o, gate_up, down)"].taken == "Transformer Engine"
    assert rows["linear layers (q, k, v, o, gate_up, down)"].reason.startswith("FP8 hybrid, scales tensorwise")
    assert str(rows["attention, full, head 512"]) == "attention, full, head 512: ours (the package has no heads wider than 256)"
    assert rows["experts"].taken == "ours" and rows["attention, sliding, head 256"].taken == "ours"


def test_the_table_tells_who_attends_over_context_parallel_ranks():
    words = "--preset diffusiongemma-26b-a4b --train-iters 1 --data-source sudoku --bf16 --context-parallel-size 2"
    package = "--context-parallel-impl transformer_engine --cp-comm-type-sliding a2a"
    rows = [str(row) for row in choices(parse(f"{words} {package}".split()))]
    assert rows == ["attention, sliding, head 256: Transformer Engine (keys of clean tokens by a2a, those of canvases by p2p with a bias)",
                    "attention, full, head 512: ours (the package has no heads wider than 256)"]
