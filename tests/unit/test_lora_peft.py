"""Adapters as PEFT loads them into transformers' model, and merged into a full one: the same logits as ours."""
import copy
import importlib.util
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch

from megatron_dllm.checkpoint import store
from megatron_dllm.checkpoint.model_state import fingerprint
from megatron_dllm.checkpoint.save import save
from megatron_dllm.config import LoRAConfig, RunConfig, to_arguments_text
from megatron_dllm.models.diffusion_gemma.build import load_transformers
from megatron_dllm.models.diffusion_gemma.inference import Session
from megatron_dllm.models.diffusion_gemma.loading import load_for_inference
from megatron_dllm.models.diffusion_gemma.lora import TARGETS, add_adapters, is_adapter
from megatron_dllm.models.diffusion_gemma.peft_format import CONFIG, WEIGHTS, adapter_names, write_adapters
from megatron_dllm.models.diffusion_gemma.transformers_directory import TransformersDirectory
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel.initialization import Initializer

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "tools") not in sys.path:
    sys.path.append(str(ROOT / "tools"))
from verification.oracle import TransformersDenoiser, tiny_oracle  # noqa: E402

LORA = LoRAConfig(lora_rank=3, lora_alpha=5.0, lora_targets=tuple(TARGETS))


@pytest.fixture(scope="module")
def oracle():
    return tiny_oracle(3)


@pytest.fixture(scope="module")
def base(oracle, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    oracle.save_pretrained(folder)
    return folder


def adapted(base: Path, lora: LoRAConfig = LORA):
    """Ours with adapters that do something."""
    model = load_transformers(base, ParallelContext.single(), torch.float32)
    add_adapters(model, lora, Initializer(1, 1.0))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("adapter.b"):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.requires_grad_(False).eval()


@torch.no_grad()
def logits(denoiser) -> list[torch.Tensor]:
    """Of a canvas after a prompt without a signal, then with one."""
    generator = torch.Generator().manual_seed(9)
    prompt, canvas = torch.randint(3, 512, (29,), generator=generator), torch.randint(3, 512, (1, 16), generator=generator)
    denoiser.encode([prompt])
    first = denoiser.denoise(canvas, None, torch.tensor([0]))
    return [first, denoiser.denoise(canvas, first, torch.tensor([0]))]


def differences(left, right) -> float:
    return max((a - b).abs().max().item() for a, b in zip(logits(left), logits(right), strict=True))


TARGET_SETS = {"all": LORA.lora_targets, "attention and mlp": ("attention", "mlp"), "experts alone": ("experts",)}


@pytest.mark.slow
@pytest.mark.parametrize("targets", TARGET_SETS.values(), ids=TARGET_SETS)
def test_peft_loads_them_into_transformers(oracle, base, tmp_path, targets):
    lora = LoRAConfig(lora_rank=3, lora_alpha=5.0, lora_targets=targets)
    model = adapted(base, lora)
    tensors = dict(model.named_parameters())
    assert set(adapter_names(model.config, lora)) == set(filter(is_adapter, tensors))
    write_adapters(tmp_path / "adapters", model.config, lora, str(base), tensors.__getitem__)
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == [CONFIG, WEIGHTS]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(oracle), tmp_path / "adapters").eval()
    assert not [warning for warning in told if "adapter" in str(warning.message)]  # PEFT warns of such as are missing
    assert differences(Session(model, 1), TransformersDenoiser(loaded.base_model.model, 1)) < 1e-4
    assert differences(Session(model, 1), TransformersDenoiser(oracle, 1)) > 1e-2


def tool(name: str, *arguments) -> int:
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def run(base, tmp_path_factory) -> Path:
    """A checkpoint as a LoRA run leaves it."""
    folder = tmp_path_factory.mktemp("run")
    model, source = adapted(base), TransformersDirectory.open(base)
    state = store.TrainingState(2, 0, 0, base={"path": str(base), "fingerprint": fingerprint(source, torch.float32)})
    adapters = {name: tensor for name, tensor in model.named_parameters() if is_adapter(name)}
    save(folder, state, model=adapters, optimizer={}, arguments=to_arguments_text(RunConfig(model=model.config, lora=LORA)))
    return folder


@pytest.mark.slow
def test_merged_into_a_full_model(oracle, base, run, tmp_path):
    assert tool("checkpoint", "merge-adapters", run, "--save", tmp_path / "full") == 0
    merged, _ = load_for_inference(tmp_path / "full", torch.device("cpu"))
    beside, _ = load_for_inference(run, torch.device("cpu"))
    assert not any(map(is_adapter, dict(merged.named_parameters())))
    assert differences(Session(merged, 1), Session(beside, 1)) < 1e-4
    assert differences(Session(merged, 1), TransformersDenoiser(oracle, 1)) > 1e-2
    # Both uses of the shared stack, in transformers.
    assert tool("convert", "--load", tmp_path / "full", "--save", tmp_path / "exported") == 0
    theirs = type(oracle).from_pretrained(tmp_path / "exported", attn_implementation="sdpa").eval()
    for one, other in zip(theirs.model.encoder.language_model.layers, theirs.model.decoder.layers, strict=True):
        assert torch.equal(one.self_attn.q_proj.weight, other.self_attn.q_proj.weight)
        assert torch.equal(one.experts.down_proj, other.experts.down_proj)
    assert differences(Session(beside, 1), TransformersDenoiser(theirs, 1)) < 1e-4


def test_convert_writes_what_peft_reads(oracle, run, tmp_path):
    assert tool("convert", "--load", run, "--save", tmp_path / "adapters") == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(oracle), tmp_path / "adapters").eval()
    beside, _ = load_for_inference(run, torch.device("cpu"))
    assert differences(Session(beside, 1), TransformersDenoiser(loaded.base_model.model, 1)) < 1e-4


def test_another_base_is_refused(oracle, base, run, tmp_path, capsys):
    other = copy.deepcopy(oracle)
    with torch.no_grad():
        other.model.decoder.norm.weight.add_(1e-3)
    other.save_pretrained(tmp_path / "other")
    assert tool("checkpoint", "merge-adapters", run, "--save", tmp_path / "full", "--base", tmp_path / "other") == 2
    assert "other weights than those that the adapters of" in capsys.readouterr().err
    assert tool("checkpoint", "merge-adapters", tmp_path, "--save", tmp_path / "full") == 2


def test_a_fingerprint_is_that_of_the_model(base, tmp_path):
    assert tool("convert", "--load", base, "--save", tmp_path / "ours") == 0
    theirs, ours = TransformersDirectory.open(base), store.find_newest(tmp_path / "ours")
    assert fingerprint(theirs, torch.bfloat16) == fingerprint(ours, torch.bfloat16) != fingerprint(ours, torch.float32)
