"""Model directories of transformers: read, written, carried through; and the built-in tokenizers as transformers loads them."""
import importlib.util
import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import pretrain_dllm
from megatron_dllm.checkpoint import store
from megatron_dllm.checkpoint.model_state import named_tensors, whole_tensors_reader
from megatron_dllm.config import PRESETS, GenerationConfig
from megatron_dllm.data.sudoku import SudokuTokenizer
from megatron_dllm.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from megatron_dllm.models.diffusion_gemma.generation_settings import GENERATION, read_sampler, sampler_settings
from megatron_dllm.models.diffusion_gemma.huggingface import links
from megatron_dllm.models.diffusion_gemma.transformers_directory import TransformersDirectory
from megatron_dllm.models.diffusion_gemma.transformers_export import Export, save_assets
from tests.unit.small_tokenizers import TAGGED, save_tokenizer
from tests.unit.toy import toy_model

ROOT = Path(__file__).resolve().parents[2]
# One vocabulary that holds every byte, layers of both types, an odd expert width.
CONFIG = PRESETS["toy"].__class__(**{
    **PRESETS["toy"].__dict__, "num_layers": 2, "layer_types": ("sliding", "full"), "vocab_size": 264, "hidden_size": 32,
    "ffn_hidden_size": 20, "moe_ffn_hidden_size": 12, "num_experts": 4})


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    """In bf16 throughout, as the file: the model keeps its router in fp32."""
    return {name: tensor.detach().bfloat16() for name, tensor in named_tensors(toy_model(torch.bfloat16, config=CONFIG))}


@pytest.fixture(scope="module")
def exported(tensors, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("with a space") / "model"
    Export(CONFIG, whole_tensors_reader(tensors), lambda name: torch.bfloat16, tokenizer=ByteTokenizer(),
           generation=GenerationConfig(max_new_tokens=16, max_denoising_steps=3)).write(folder, shard_bytes=30_000)
    (folder / "README.md").write_text("a model card\n")
    (folder / "images").mkdir()
    (folder / "images" / "x.txt").write_text("x\n")
    return folder


def convert(*arguments: str) -> int:
    spec = importlib.util.spec_from_file_location("tool_convert", ROOT / "tools" / "convert.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.main([str(argument) for argument in arguments])


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_export_is_sharded_indexed_and_complete(exported):
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    files = sorted(exported.glob("model-*.safetensors"))
    assert len(files) > 3 and files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    found = all_tensors(exported)
    assert index["metadata"]["total_size"] == sum(tensor.numel() * tensor.itemsize for tensor in found.values())
    wanted = {name for link in links(CONFIG) for name in link.theirs}
    assert {name for name in found if ".vision_tower." not in name and ".embed_vision." not in name} == wanted
    for name, file in index["weight_map"].items():
        with safe_open(exported / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118


def test_every_rectangle_of_every_tensor_is_that_of_the_whole(exported, tensors):
    source, draw = TransformersDirectory.open(exported), random.Random(0)
    assert set(source.shapes) == set(tensors)
    for name, whole in tensors.items():
        assert torch.equal(source.read(name, (0,) * whole.dim(), tuple(whole.shape)), whole), name
        for _ in range(6):
            offset = tuple(draw.randrange(size) for size in whole.shape)
            extent = tuple(draw.randint(1, size - start) for size, start in zip(whole.shape, offset, strict=True))
            part = whole[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]
            assert torch.equal(source.read(name, offset, extent), part), (name, offset, extent)


def test_there_and_back_is_the_identity_file_by_file(exported, tmp_path):
    """transformers -> ours -> transformers: every file the same, byte for byte; the weights in one file and in many."""
    assert convert("--load", exported, "--save", tmp_path / "ours") == 0
    found = store.find_newest(tmp_path / "ours")
    assert found.state.iteration == 0 and set(found.shapes) == {link.ours for link in links(CONFIG)}
    assert convert("--load", tmp_path / "ours", "--save", tmp_path / "back", "--shard-gb", "0.00003") == 0
    assert convert("--load", tmp_path / "ours", "--save", tmp_path / "one file") == 0
    left, right, one = all_tensors(exported), all_tensors(tmp_path / "back"), all_tensors(tmp_path / "one file")
    assert left.keys() == right.keys() == one.keys()
    for name, tensor in left.items():
        for other in (right[name], one[name]):
            assert other.dtype == tensor.dtype and torch.equal(other, tensor), name
    others = sorted(path.relative_to(exported) for path in exported.rglob("*") if path.is_file() and "model" not in path.name)
    assert Path("images/x.txt") in others and Path("README.md") in others and Path("config.json") in others
    for path in others:
        assert (tmp_path / "back" / path).read_bytes() == (exported / path).read_bytes(), path
    assert sorted(path.name for path in (tmp_path / "one file").glob("model*")) == ["model.safetensors"]


def test_convert_refuses(exported, tmp_path, capsys):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert convert("--load", exported, "--save", tmp_path / "taken") == 2
    assert "is not empty" in capsys.readouterr().err
    assert convert("--load", tmp_path / "absent", "--save", tmp_path / "new") == 2
    assert "absent holds neither a transformers model" in capsys.readouterr().err


def broken(exported: Path, folder: Path, edit) -> Path:
    """A copy with all weights in one file, after `edit` of the dictionary of tensors."""
    shutil.copytree(exported, folder, ignore=shutil.ignore_patterns("model*"))
    found = all_tensors(exported)
    edit(found)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("edit", "message"), [
    (lambda found: found.pop("model.decoder.layers.1.self_attn.k_norm.weight"), "missing model.decoder.layers.1.self_attn.k_norm.weight"),
    (lambda found: found.update({"lm_head.weight": torch.zeros(3)}), "unexpected lm_head.weight"),
    (lambda found: found.update({"model.decoder.norm.weight": torch.zeros(31)}), r"model.decoder.norm.weight is \[31\].*says \[32\]"),
], ids=["missing", "unexpected", "misshapen"])
def test_a_wrong_tensor_is_named(exported, tmp_path, edit, message):
    with pytest.raises(ValueError, match=message):
        TransformersDirectory.open(broken(exported, tmp_path / "broken", edit))


def test_truncated_and_absent_files_are_named(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "cut")
    file = sorted(folder.glob("model-*"))[1]
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match=file.name):
        TransformersDirectory.open(folder)
    file.unlink()
    with pytest.raises(ValueError, match=f"{file.name} is missing"):
        TransformersDirectory.open(folder)


def test_assets_keep_what_is_carried(exported, tmp_path):
    source = TransformersDirectory.open(exported)
    save_assets(source, tmp_path / "assets")
    save_assets(source, tmp_path / "assets")  # again, over itself
    carried = load_file(tmp_path / "assets" / "carried.safetensors")
    assert carried and all(torch.equal(carried[name], tensor) for name, tensor in all_tensors(exported).items() if ".vision" in name)
    assert (tmp_path / "assets" / "images" / "x.txt").read_text() == "x\n"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_transformers_generates_from_an_export_with_its_own_settings(exported):
    model_class = transformers.DiffusionGemmaForBlockDiffusion
    model, report = model_class.from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    settings = model.generation_config
    assert (settings.max_new_tokens, settings.max_denoising_steps, settings.sampler_config.entropy_bound) == (16, 3, 0.1)
    assert settings.eos_token_id == list(CONFIG.eos_token_id) and settings.pad_token_id == CONFIG.pad_token_id
    tokenizer = AutoTokenizer.from_pretrained(exported)
    inputs = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=True,
                                           return_tensors="pt")
    torch.manual_seed(0)
    output = model.eval().generate(**inputs)
    assert output.sequences.shape == (1, inputs["input_ids"].shape[1] + CONFIG.canvas_length)


@pytest.mark.parametrize("settings", [{}, {"max_denoising_steps": 7, "entropy_bound": 0.25, "t_max": 1.0}])
def test_sampler_settings_there_and_back(tmp_path, settings):
    sampler = GenerationConfig(**settings)
    (tmp_path / GENERATION).write_text(json.dumps({"eos_token_id": [1], **sampler_settings(sampler)}))
    assert read_sampler(tmp_path) == sampler


@pytest.mark.parametrize("entries, message", [
    ({"sampler_config": {"_cls_name": "Other"}}, "only EntropyBoundSamplerConfig is known here; remove sampler_config"),
    ({"t_min": "low", "max_denoising_steps": 2.5}, "t_min is 'low', max_denoising_steps is 2.5; set whole numbers for counts"),
])
def test_sampler_settings_that_are_not_understood(tmp_path, entries, message):
    (tmp_path / GENERATION).write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=message):
        read_sampler(tmp_path)
    (tmp_path / GENERATION).write_text(json.dumps({"max_new_tokens": None}))  # as transformers writes what is not set
    assert read_sampler(tmp_path) == GenerationConfig()


def test_an_export_has_the_sampler_settings_of_its_run(exported, tensors, tmp_path):
    """A run's own replace those of the folder that it began with; a run that has none leaves the file as it is."""
    assets = tmp_path / "assets"
    save_assets(TransformersDirectory.open(exported), assets)
    for name, sampler, steps in (("default", GenerationConfig(), 3), ("own", GenerationConfig(max_denoising_steps=5), 5)):
        Export(CONFIG, whole_tensors_reader(tensors), lambda name: torch.bfloat16, assets, generation=sampler).write(tmp_path / name)
        written = json.loads((tmp_path / name / GENERATION).read_text())
        assert written["max_denoising_steps"] == steps and written["eos_token_id"] == list(CONFIG.eos_token_id)
    assert (tmp_path / "default" / GENERATION).read_bytes() == (exported / GENERATION).read_bytes()


CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "<eos> <user> é\n"},
        {"role": "assistant", "content": "yo", "tool_calls": [{"b": 1, "a": "é<&'"}]},
        {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "end"}]


def test_byte_tokenizer_is_the_same_in_transformers(tmp_path):
    ours = ByteTokenizer()
    ours.save_pretrained(tmp_path)
    theirs, wrapped = AutoTokenizer.from_pretrained(tmp_path), HuggingFaceTokenizer(str(tmp_path))
    draw = random.Random(0)
    texts = ["", " a  b\t\n\r\n", "<eos><bos> <user>hi</user>", "日本 \x00\x7f\xa0\xad", "".join(map(chr, range(1, 600)))]
    texts += ["".join(chr(draw.randrange(1, 0xD800)) for _ in range(20)) for _ in range(50)]
    for text in texts:
        assert ours.encode(text) == theirs.encode(text) == theirs(text)["input_ids"] == wrapped.encode(text), text
    for _ in range(200):
        ids = [draw.randrange(ours.vocab_size) for _ in range(30)]  # mostly no UTF-8 at all
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), ids
    assert (wrapped.vocab_size, wrapped.eos_ids, wrapped.pad_id, wrapped.bos_id) == (264, ours.eos_ids, ours.pad_id, ours.bos_id)
    assert [wrapped.is_special(i) for i in range(264)] == [ours.is_special(i) for i in range(264)]
    for tools in (None, [{"name": "é", "a": 1}]):
        for prompt in (False, True):
            assert ours.apply_chat_template(CHAT, tools, add_generation_prompt=prompt) \
                == wrapped.apply_chat_template(CHAT, tools, add_generation_prompt=prompt)


@pytest.mark.parametrize("size", [4, 9])
def test_sudoku_tokenizer_is_the_same_in_transformers(tmp_path, size):
    ours = SudokuTokenizer(size)
    ours.save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("12043 ..\n= 1234", "", "....=0000"):
        assert ours.encode(text) == theirs.encode(text), text
    for skip in (False, True):
        every = list(range(ours.vocab_size))
        assert ours.decode(every, skip_special_tokens=skip) == theirs.decode(every, skip_special_tokens=skip)
    with pytest.raises(Exception, match="UNK"):  # noqa: B017 (a plain Exception is what the library raises)
        theirs.encode("x")


def test_hugging_face_tokenizer_is_copied_with_the_template_given(tmp_path):
    folder = save_tokenizer(tmp_path / "source")
    HuggingFaceTokenizer(folder).save_pretrained(_made(tmp_path / "plain"))
    for file in Path(folder).iterdir():
        assert (tmp_path / "plain" / file.name).read_bytes() == file.read_bytes()
    HuggingFaceTokenizer(folder, chat_template=TAGGED).save_pretrained(_made(tmp_path / "tagged"))
    assert AutoTokenizer.from_pretrained(tmp_path / "tagged").chat_template == TAGGED


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_one_command_line_starts_resumes_and_is_requeued(exported, tmp_path, capfd):
    """--pretrained-checkpoint gives the first weights, --load the run's own progress, and a valid --load wins."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": f"text number {i} " * 3}) + "\n" for i in range(12)))
    command = ["--pretrained-checkpoint", str(exported), "--load", str(tmp_path / "run"), "--save", str(tmp_path / "run"),
               "--data-path", str(tmp_path / "data.jsonl"), "--split", "100,0,0", "--data-cache-path", str(tmp_path / "cache"),
               "--seq-length", "64", "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "4", "--exit-interval", "2",
               "--device", "cpu", "--save-hf", str(tmp_path / "hf"), "--lr", "1e-3"]
    said = []
    for _ in range(3):
        assert pretrain_dllm.main(command) == 0, capfd.readouterr()
        said.append(capfd.readouterr().out)
        shutil.rmtree(tmp_path / "hf", ignore_errors=len(said) < 2)
    assert f"{tmp_path / 'run'} holds no checkpoint: starting from --pretrained-checkpoint {exported}" in said[0]
    assert "resuming from" in said[1] and "iteration 2" in said[1] and "starting from the weights" not in said[1]
    assert "resuming from" in said[2] and "iteration 4" in said[2]
    assert pretrain_dllm.main([*command[:-2], "--lr", "2e-3"]) == 2
    assert "max_lr 0.001 became 0.002" in capfd.readouterr().err
    assert pretrain_dllm.main([*command[:-2], "--lr", "2e-3", "--override-opt-param-scheduler"]) == 0
    assert (tmp_path / "hf" / "README.md").read_text() == "a model card\n"
    # Into another folder, which the first one's assets come along to.
    elsewhere = {"--load": tmp_path / "run" / "iter_0000004", "--save": tmp_path / "else", "--save-hf": tmp_path / "hf2", "--lr": "2e-3"}
    flags = [str(word) for pair in elsewhere.items() for word in pair]
    assert pretrain_dllm.main([*command[:-2], *flags, "--override-opt-param-scheduler"]) == 0
    assert (tmp_path / "hf2" / "README.md").read_text() == "a model card\n"
    for file in (tmp_path / "run" / "iter_0000002").glob("*.safetensors"), (tmp_path / "run" / "iter_0000004").glob("*.safetensors"):
        next(file).unlink()
    assert pretrain_dllm.main(command) == 2
    assert "none of its checkpoints is valid" in capfd.readouterr().err
