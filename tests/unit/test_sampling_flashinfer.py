"""--sampling-backend flashinfer: logits, argmax and entropy as ours; samples as likely, whatever stands in the batch around them."""
import sys
import types

import pytest
import torch

from megatron_dllm.diffusion.sampler import read_product
from megatron_dllm.diffusion.sampling_flashinfer import FlashInferReader, flashinfer_reader
from megatron_dllm.models.diffusion_gemma import static_session
from megatron_dllm.models.diffusion_gemma.static_session import StaticDecoder, session_maker
from tests.unit.test_generation_graphs import SETTINGS, generated, model_on

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def drawn(probabilities, *, seed, offset):
    """FlashInfer's interface: int32, a generator with a seed a row."""
    assert probabilities.dtype == torch.float32 and seed.dtype == torch.int64 and seed.shape == offset.shape == probabilities.shape[:1]
    return torch.stack([torch.multinomial(row, 1, generator=torch.Generator().manual_seed(one))[0]
                        for row, one in zip(probabilities, seed.tolist(), strict=True)]).int()


PACKAGE = types.SimpleNamespace(sampling=types.SimpleNamespace(softmax=lambda logits: logits.softmax(-1), sampling_from_probs=drawn))


def case(count, vocabulary, device=CPU):
    generator = torch.Generator().manual_seed(1)
    product = 20 * torch.randn(count, vocabulary, generator=generator)
    uniforms = torch.rand(count, generator=generator, dtype=torch.float64)
    return product.to(device), 30.0, torch.tensor(0.7, dtype=torch.float64, device=device), uniforms.to(device)


def read(reader, product, softcap, temperature, uniforms):
    kept = torch.full_like(product, torch.nan)
    return kept, *reader(product, softcap, temperature, uniforms, kept=kept)


def test_as_ours_but_for_the_samples(monkeypatch):
    monkeypatch.setattr("megatron_dllm.diffusion.sampling_flashinfer.CHUNK_BYTES", 4 * 61 * 3)  # three positions at once
    given = case(8, 61)
    ours, theirs = read(read_product, *given), read(FlashInferReader(PACKAGE), *given)
    for a, b in zip((ours[0], *ours[2:]), (theirs[0], *theirs[2:]), strict=True):
        torch.testing.assert_close(b, a.to(b.dtype), rtol=1e-5, atol=1e-5)
    assert theirs[1].dtype == torch.int64


def test_a_sample_does_not_depend_on_the_batch():
    product, *rest, uniforms = case(9, 61)
    reader = FlashInferReader(PACKAGE)
    whole, part = read(reader, product, *rest, uniforms)[1], read(reader, product[4:7], *rest, uniforms[4:7])[1]
    assert torch.equal(whole[4:7], part)
    assert len(read(reader, product[:1].expand(50, -1), *rest, torch.rand(50, dtype=torch.float64))[1].unique()) > 3


def test_it_reads_a_whole_generation(monkeypatch):
    model, calls = model_on(CPU, torch.float64), []

    def reader(*given, kept):
        calls.append(len(kept))
        return read_product(*given, kept=kept)

    ours = generated(StaticDecoder(model, None).session(3), SETTINGS)
    theirs = generated(StaticDecoder(model, None, reader=reader).session(3), SETTINGS)
    assert torch.equal(ours.tokens, theirs.tokens) and calls
    with pytest.raises(ValueError, match="set --sampling-backend local"):
        session_maker(model, reader)
    monkeypatch.setattr(static_session, "can_record", lambda model: True)
    assert session_maker(model, reader)


def test_refusals(monkeypatch):
    with pytest.raises(ValueError, match="--sampling-backend flashinfer: its kernels need a CUDA device"):
        flashinfer_reader(CPU)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError, match="install_gpu.sh --flashinfer"):
        flashinfer_reader(CUDA)


@pytest.mark.gpu
def test_samples_of_the_package():
    """Of 40,000 positions with one distribution: frequencies within five deviations; a recording draws as its seeds say."""
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    reader, count = flashinfer_reader(CUDA), 40_000
    product, *rest, _ = case(1, 61, CUDA)
    product, uniforms = product.expand(count, -1).contiguous(), torch.rand(count, dtype=torch.float64, device=CUDA)
    kept, sample, argmax, entropy = read(reader, product, *rest, uniforms)
    expected = kept[0].double().softmax(-1)
    found = torch.bincount(sample, minlength=61) / count
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1 / count).all()
    ours = read(read_product, product, *rest, uniforms)
    torch.testing.assert_close(entropy, ours[3], rtol=1e-4, atol=1e-5)
    assert torch.equal(argmax, ours[2]) and torch.equal(sample, read(reader, product, *rest, uniforms)[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = read(reader, product, *rest, uniforms)[1]
    uniforms.copy_(torch.rand_like(uniforms))
    graph.replay()
    assert torch.equal(recorded, read(reader, product, *rest, uniforms)[1]) and not torch.equal(recorded, sample)
