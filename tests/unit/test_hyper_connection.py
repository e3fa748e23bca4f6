"""mHC: its two functions against the formula as a loop, its weights, its recompute, and that a model without it is as it was."""
import dataclasses
import math

import pytest
import torch

from megatron_dllm.config import PRESETS
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel.initialization import Initializer
from megatron_dllm.transformer import hyper_connection
from megatron_dllm.transformer.hyper_connection import HyperConnection, StreamChain, sinkhorn, stream_chains
from megatron_dllm.transformer.recompute import Recompute
from megatron_dllm.transformer.stream_copies import contract_streams, expand_streams
from tests.unit.toy import CONFIG, gradients, toy_inputs, toy_model, toy_plan

STREAMS = 3
MHC = dataclasses.replace(CONFIG, enable_mhc_connections=True, mhc_num_residual_streams=STREAMS)
SMALL = dataclasses.replace(MHC, hidden_size=5)


def connection(initial=False, dtype=torch.float64, config=SMALL) -> HyperConnection:
    module = HyperConnection("mhc", config, context=ParallelContext.single(), init=Initializer(3, 0.02), dtype=dtype)
    if not initial:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            module.alpha.copy_(torch.rand(3, generator=generator) + 0.5)
            module.bias.copy_(torch.randn(module.bias.shape, generator=generator))
    return module


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def formula(x, y, scale, module):
    """u and the new streams of each token, written out as docs/design.md pins them."""
    n, hidden, (pre_gate, post_gate, res_gate) = STREAMS, x.shape[1] // STREAMS, module.alpha
    read, written = [], []
    for token in range(len(x)):
        streams = [x[token, i * hidden:(i + 1) * hidden] for i in range(n)]
        r = 1 / (sum(value ** 2 for value in x[token]).sqrt() / math.sqrt(n * hidden) + 1e-6)
        project = [r * (x[token] * module.weight[o]).sum() for o in range(n * n + 2 * n)]
        pre = [torch.sigmoid(project[i] * pre_gate + module.bias[i]) for i in range(n)]
        post = [2 * torch.sigmoid(project[n + i] * post_gate + module.bias[n + i]) for i in range(n)]
        res = [[project[2 * n + n * i + j] * res_gate + module.bias[2 * n + n * i + j] for j in range(n)] for i in range(n)]
        res = [[torch.exp(value - max(row)) for value in row] for row in res]
        for _ in range(20):
            res = [[value / sum(row).clamp(min=1e-6) for value in row] for row in res]
            sums = [sum(res[i][j] for i in range(n)).clamp(min=1e-6) for j in range(n)]
            res = [[res[i][j] / sums[j] for j in range(n)] for i in range(n)]
        read.append(sum(pre[i] * streams[i] for i in range(n)))
        written.append(torch.cat([sum(res[i][j] * streams[j] for j in range(n)) + post[i] * y[token] for i in range(n)]) * scale[token])
    return torch.stack(read), torch.stack(written)


@pytest.mark.parametrize("initial", [False, True], ids=["random", "initial values"])
def test_read_and_write_follow_the_formula(initial):
    module, x, y, scale = connection(initial), random(3, 15), random(3, 5, seed=1), random(3, 1, seed=2).detach()
    weights = random(3, 5, seed=3).detach(), random(3, 15, seed=4).detach()
    u, same, mix = module.read(x, None, scale)
    found = u, module.write(same, y, mix, None)
    expected = formula(x, y, scale, module)
    leaves = [x, y, *module.parameters()]
    ours, theirs = (torch.autograd.grad(sum((a * b).sum() for a, b in zip(results, weights, strict=True)), leaves)
                    for results in (found, expected))
    for one, other in zip((*found, *ours), (*expected, *theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_gradients():
    tiny = dataclasses.replace(SMALL, hidden_size=2, mhc_num_residual_streams=2, mhc_sinkhorn_iterations=3)
    module = connection(config=tiny)

    def both(x, y, weight, alpha, bias):
        mirror = connection(config=tiny)
        for name, value in (("weight", weight), ("alpha", alpha), ("bias", bias)):
            del mirror._parameters[name]
            setattr(mirror, name, value)
        u, same, mix = mirror.read(x, None)
        return u, mirror.write(same, y, mix, None)

    assert torch.autograd.gradcheck(both, (random(2, 4), random(2, 2, seed=1), *module.parameters()))


def test_sinkhorn_gives_nearly_doubly_stochastic_matrices():
    matrix = sinkhorn(random(50, 4, 4).detach() * 3, 20)
    assert (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(-2), torch.ones(50, 4, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(50, 4, dtype=torch.float64), rtol=0, atol=0.05)
    assert (sinkhorn(random(50, 4, 4).detach() * 3, 1).sum(-1) - 1).abs().max() > 0.3


def test_streams_of_zero_have_finite_gradients():
    module, x = connection(), torch.zeros(2, 15, dtype=torch.float64, requires_grad=True)
    u, same, mix = module.read(x, None)
    (u.sum() + module.write(same, random(2, 5).detach(), mix, None).sum()).backward()
    assert all(torch.isfinite(t.grad).all() for t in (x, *module.parameters()))


def test_mappings_are_at_least_fp32_under_bf16():
    """Weights, mix and their gradients are fp32, and a bf16 module gives the fp32 one's result, rounded once."""
    low, high = connection(dtype=torch.bfloat16), connection(dtype=torch.float32)
    x, y = random(6, 15, dtype=torch.bfloat16).detach().requires_grad_(), random(6, 5, seed=1, dtype=torch.bfloat16).detach()
    results = []
    for module, values in ((low, (x, y)), (high, (x.float(), y.float()))):
        u, same, mix = module.read(values[0], None)
        results.append((u, module.write(same, values[1], mix, None), mix.post, mix.res))
    assert [t.dtype for t in results[0]] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert all(torch.equal(one, other.to(one.dtype)) for one, other in zip(*results, strict=True))
    (results[0][0].sum() + results[0][1].sum()).backward()
    assert x.grad.dtype == torch.bfloat16 and all(p.grad.dtype == p.dtype == torch.float32 for p in low.parameters())
    assert all(p.placement.hold_fp32 for p in low.parameters())


def test_initial_weights():
    """W as Xavier has it, alpha and the bias at their constants; equal streams then stay equal, and W's gradient is not zero."""
    config = dataclasses.replace(PRESETS["toy"], enable_mhc_connections=True)
    module = connection(initial=True, dtype=torch.float32, config=config)
    width, outputs = 4 * config.hidden_size, 4 * 4 + 2 * 4
    assert module.weight.std().item() == pytest.approx((2 / (width + outputs)) ** 0.5, rel=0.05)
    assert module.alpha.tolist() == pytest.approx([0.01] * 3) and not module.bias.any()
    x = expand_streams(torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0)), 4)
    u, same, mix = module.read(x, None)
    (module.write(same, u, mix, None) ** 2).sum().backward()
    # H_res of equal streams gives them back whatever it is: its part of the gradient vanishes but for rounding.
    assert module.weight.grad[:8].abs().max() > 1e-3 and module.weight.grad[8:].abs().max() < 1e-4


def test_sequence_parallelism_sums_the_weights_gradients():
    context = dataclasses.replace(ParallelContext.single(), sequence_parallel=True)
    module = HyperConnection("mhc", SMALL, context=context, init=Initializer(3, 0.02), dtype=torch.float32)
    assert all(p.placement.partial_over_tp for p in module.parameters())
    assert not any(p.placement.partial_over_tp for p in connection().parameters())


def test_expansion_and_contraction():
    x = random(3, 4)
    wide = expand_streams(x, STREAMS)
    assert wide.is_contiguous() and torch.equal(wide.unflatten(1, (STREAMS, 4)), torch.stack([x] * STREAMS, 1))
    apart = random(3, 12, seed=1)
    torch.testing.assert_close(contract_streams(apart, STREAMS), sum(apart[:, 4 * i:4 * i + 4] for i in range(STREAMS)) / STREAMS)
    assert expand_streams(x, 1) is x and contract_streams(x, 1) is x


def test_without_mhc_a_layer_is_as_it_was():
    """Bit for bit: the plain residual, written out."""
    plan, model = toy_plan(), toy_model()
    token_pass, layer = toy_inputs(plan).first_pass, model.layers["0"]
    x = random(token_pass.num_tokens, CONFIG.hidden_size)

    def written_out(x):
        h = x + layer.post_attention_layernorm(layer.attention(layer.input_layernorm(x), token_pass.layers["sliding"], None)[0])
        d = layer.post_feedforward_layernorm_1(layer.mlp(layer.pre_feedforward_layernorm(h)))
        m = layer.post_feedforward_layernorm_2(layer.moe(layer.pre_feedforward_layernorm_2(h), h))
        return (h + layer.post_feedforward_layernorm(d + m)) * token_pass.per_stream(layer.layer_scalars)

    results = [layer(x, token_pass, None)[0], written_out(x)]
    assert torch.equal(*results)
    assert torch.allclose(*(torch.autograd.grad(y.square().sum(), x)[0] for y in results), rtol=1e-12, atol=1e-12)
    assert not [name for name, _ in model.named_parameters() if "connection" in name]


def mhc_model(num_layers=None, parts=("mhc",)):
    """A model of 3 layers whose streams are recomputed in groups of so many layers."""
    recompute, model = Recompute(frozenset(parts), mhc_layers=num_layers), toy_model(config=MHC)
    for module in (model, *model.layers.values(), *(layer.attention for layer in model.layers.values())):
        module.recompute = recompute
    return model


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [None, 1, 2])
@pytest.mark.parametrize("others", [(), ("mlp", "core_attn")], ids=["mhc", "mhc and others"])
def test_recompute_changes_no_bit(num_layers, others):
    kept, again = gradients(mhc_model(parts=()), toy_plan()), gradients(mhc_model(num_layers, ("mhc", *others)), toy_plan())
    assert kept[0] == again[0] and all(torch.equal(g, again[1][name]) for name, g in kept[1].items())


def kept_bytes(model) -> int:
    """Bytes that a forward leaves for the backward, streams in chains included."""
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        terms = model(toy_inputs(toy_plan()))
    assert torch.isfinite(terms.total)
    return sum(seen.values())


def test_recompute_keeps_less():
    """Streams [T, n*C] inside a group are not kept: 5 of 6 in one group of three layers, 3 in groups of one."""
    everything, by_layer, at_once = kept_bytes(mhc_model(parts=())), kept_bytes(mhc_model(1)), kept_bytes(mhc_model(None))
    tokens = sum(p.num_tokens for p in (toy_inputs(toy_plan()).first_pass, toy_inputs(toy_plan()).second_pass))
    streams = tokens * STREAMS * CONFIG.hidden_size * 8
    assert everything - by_layer == 3 * streams and everything - at_once == 5 * streams


def test_a_chain_lets_go_of_what_the_backward_has_passed():
    module, chain = connection(), StreamChain()
    x = random(2, 15)
    streams = x
    for seed in range(3):
        u, streams, mix = module.read(streams, chain)
        streams = module.write(streams, u * random(2, 5, seed=seed).detach(), mix, chain)
    assert len(chain._writes) == 3 and set(chain._streams) == {0}
    loss = streams.sum()
    loss.backward(retain_graph=True)
    assert chain._writes == [] and set(chain._streams) == {0}
    with pytest.raises(RuntimeError, match="let go by an earlier backward"):
        loss.backward()


def test_stream_chains():
    def groups(**options):
        chains = [chain for _, chain in zip(range(5), stream_chains(Recompute(**options)), strict=False)]
        return [chains.index(chain) for chain in chains] if chains[0] is not None else chains

    assert groups(parts=frozenset(["mlp"])) == [None] * 5
    assert groups(parts=frozenset(["mhc"])) == [0] * 5
    assert groups(parts=frozenset(["mhc"]), mhc_layers=2) == [0, 0, 2, 2, 4]
    with torch.no_grad():
        assert groups(parts=frozenset(["mhc"])) == [None] * 5


def test_kernels_take_a_few_streams(monkeypatch):
    monkeypatch.setattr(hyper_connection, "takes", lambda *tensors: True)
    assert hyper_connection.by_kernels(hyper_connection.MOST_STREAMS) and not hyper_connection.by_kernels(hyper_connection.MOST_STREAMS + 1)


def test_export_is_refused():
    with pytest.raises(ValueError, match="residual streams of --enable-mhc-connections"):
        MHC.to_transformers()
