"""--gdn-kernel-backend fla: whole runs in calls of that package's interface give what chunks give; what its kernels cannot do is refused.

On a CPU the package's function is a loop over tokens with the same interface; on a GPU it is the package's, if it is installed.
"""
import importlib
import sys
import types

import pytest
import torch

from megatron_dllm.config import parse
from megatron_dllm.models.diffusion_gemma.build import build_model
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.transformer import gated_delta_fla
from megatron_dllm.transformer.gated_delta_fla import FlaGatedDelta, check_fla, use_fla
from megatron_dllm.transformer.gated_delta_net import GatedDeltaNet
from megatron_dllm.transformer.gated_delta_plan import Runs, first_runs, gated_delta_plan, second_runs
from tests.unit.fake_fla import by_tokens
from tests.unit.test_gated_delta_net import CPU, LINEAR, SMALL, layer, tokens, visibility
from tests.unit.toy import toy_model

CUDA = torch.device("cuda")


def both_loops(module: GatedDeltaNet, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs and kept states of a pass and of the loop after it, and all gradients."""
    seen = visibility()
    again = seen.canvas_keys % 2 == 0
    first = gated_delta_plan(first_runs(seen, again), module.kernel, x.device)
    second = gated_delta_plan(second_runs(seen, again), module.kernel, x.device)
    x = x.clone().requires_grad_()
    y, kept = module(x, first, None)
    z, _ = module(x[-second.num_tokens:], second, kept)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    ((y * weights).sum() + (z * weights[:len(z)]).sum()).backward()
    results = [y.detach(), z.detach(), kept.state.detach(), x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return results


def test_whole_runs_give_what_chunks_give():
    """Documents with canvases before each other's starts, so that runs start where others end, three deep."""
    module, x = layer(), tokens(150 + 3 + 66 + 1 + 6 * 5)
    chunks = both_loops(module, x)
    module.rule = FlaGatedDelta(by_tokens)
    for ours, theirs in zip(both_loops(module, x), chunks, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_run_levels():
    """d b c | a with runs by origin: 0 and 3 start from nothing, 1 from the end of 0, 2 from a kept state."""
    plan = gated_delta_plan(Runs((2, 3, 1, 4), (0, 2, 1, 0), num_contexts=1, kept=(3, 0, 1, 5)), 4, CPU)
    assert [level.bounds for level in plan.run_levels] == [(0, 2, 3, 7), (0, 3)]
    assert [level.parents.tolist() for level in plan.run_levels] == [[0, 1, 0], [2]]
    order = [0, 1, 5, 6, 7, 8, 9, 2, 3, 4]
    rows = torch.arange(10)
    assert torch.cat([level.tokens.take(rows) for level in plan.run_levels]).tolist() == order
    assert plan.run_order.take(torch.tensor(order)).tolist() == list(range(10))
    assert plan.kept_runs.tolist() == [5, 0, 1, 4]  # the ends of runs: 0 at 2, 2 at 3, 3 at 4, 1 at 5


def test_the_flag_chooses_for_every_layer(monkeypatch):
    model = toy_model(config=LINEAR)
    monkeypatch.setattr(gated_delta_fla, "check_fla", lambda device, sizes: None)
    package = types.ModuleType("fla.ops.gated_delta_rule")
    package.chunk_gated_delta_rule = by_tokens
    for name, module in (("fla", types.ModuleType("fla")), ("fla.ops", types.ModuleType("fla.ops")), (package.__name__, package)):
        monkeypatch.setitem(sys.modules, name, module)
    use_fla(model, CPU)
    assert [type(module.rule) for module in model.modules() if isinstance(module, GatedDeltaNet)] == [FlaGatedDelta]


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="no layer of this model is linear"):
        use_fla(toy_model(), CPU)


def test_a_cpu_is_refused():
    with pytest.raises(ValueError, match="need a CUDA device"):
        check_fla(CPU)
    run = parse("--preset toy --linear-attention-freq 3 --gdn-kernel-backend fla --bf16 --device cuda --num-layers 6".split())
    with pytest.raises(ValueError, match="need a CUDA device"):
        build_model(run, ParallelContext.single())


@pytest.mark.parametrize(("version", "capability", "wrong"), [
    ("3.6.0", (9, 0), True), ("3.4.0", (9, 0), True), ("3.3.1", (9, 0), False), ("3.7.1", (9, 0), False), ("3.6.0", (10, 0), False)])
def test_tritons_with_wrong_gradients_need_tilelang(monkeypatch, version, capability, wrong):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for name, module in (("fla", types.ModuleType("fla")), ("triton", types.SimpleNamespace(__version__=version)), ("tilelang", None)):
        monkeypatch.setitem(sys.modules, name, module)  # None: an import that fails
    if not wrong:
        return check_fla(CUDA, [128])
    with pytest.raises(ImportError, match=f"Triton is {version}.*wrong on sm_90.*pip install tilelang"):
        check_fla(CUDA, [128])


def test_missing_package_and_large_keys(monkeypatch):
    with pytest.raises(ValueError, match="--linear-key-head-dim is 320.*at most 256"):
        check_fla(CUDA, [320, 64])
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match="install_gpu.sh --fla"):
        check_fla(CUDA, [128])


@pytest.mark.gpu
def test_kernels_of_the_package():
    """bf16 on a GPU: twice what the chunks in bf16 are off from float64, by the norm of each result."""
    try:
        check_fla(CUDA, [64])
    except ImportError as error:  # the package, or tilelang where it needs that
        pytest.skip(str(error))
    import dataclasses

    config = dataclasses.replace(SMALL, hidden_size=128, linear_key_head_dim=64, linear_value_head_dim=64)
    from megatron_dllm.tensor_parallel.initialization import Initializer
    from megatron_dllm.transformer.recompute import Recompute

    def made(dtype):
        return GatedDeltaNet("gdn", config, 0, context=ParallelContext.single(CUDA), init=Initializer(3, 0.05), dtype=dtype,
                             recompute=Recompute(frozenset()))

    exact, module = made(torch.float64), made(torch.bfloat16)
    for own, rounded in zip(exact.parameters(), module.parameters(), strict=True):
        own.data.copy_(rounded.data)
    x = torch.randn(150 + 3 + 66 + 1 + 6 * 5, 128, generator=torch.Generator().manual_seed(0)).to(CUDA, torch.bfloat16)
    truth, chunks = both_loops(exact, x.double()), both_loops(module, x)
    module.rule = FlaGatedDelta(importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule)
    for index, (ours, torchs, right) in enumerate(zip(both_loops(module, x), chunks, truth, strict=True)):
        off, allowed = (ours.double() - right).norm(), 2 * (torchs.double() - right).norm() + 2 ** -9 * right.norm()
        assert off <= allowed, f"result {index}: off by {off:.3e}, allowed {allowed:.3e} of {right.norm():.3e}"
