"""A trained model and its tokenizer, for generation, from a checkpoint of ours or a transformers directory."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ...checkpoint import store
from ...checkpoint.model_state import every_tensor, fingerprint, load_tensors, named_tensors
from ...checkpoint.storage import MODEL
from ...config import GenerationConfig, RunConfig, parse
from ...data.build import build_tokenizer
from ...data.tokenizers import Tokenizer, open_tokenizer
from ...parallel import ParallelContext
from .build import UNSET, empty_model, load_transformers
from .generation_settings import read_sampler
from .lora import add_adapters, is_adapter
from .model import DiffusionGemma
from .transformers_directory import CONFIG, TransformersDirectory


@dataclass(frozen=True)
class StoredModel:
    """A model that can generate, found and checked but not loaded yet: a transformers directory, or a checkpoint of ours and its run."""

    path: Path
    sampler: GenerationConfig
    checkpoint: store.Checkpoint | None = None
    run: RunConfig | None = None

    @classmethod
    def open(cls, path: str | Path) -> StoredModel:
        """`path`: a transformers directory, a run's folder (its newest valid checkpoint), or one iteration's folder; the sampler's
        settings are those of its generation_config.json, or the run's. ValueError that names the file for whatever cannot be used.
        """
        path = Path(path)
        if (path / CONFIG).is_file():
            return cls(path, read_sampler(path))
        found = open_run(path)
        run = stored_run(found)
        return cls(path, run.generation, found, run)

    def load(self, device: torch.device, dtype: torch.dtype | None = None) -> tuple[DiffusionGemma, Tokenizer]:
        """Model and tokenizer; adapters are put beside their base.

        Without `dtype` the model computes as it did in training: bf16 for a directory, what --bf16 said for a checkpoint of ours.
        """
        context = ParallelContext.single(device)
        if self.checkpoint is None:
            model = load_transformers(self.path, context, dtype or torch.bfloat16)
            return model, open_tokenizer("HuggingFaceTokenizer", str(self.path), extra_eos_ids=model.config.eos_token_id)
        found, run = self.checkpoint, self.run
        model = empty_model(run.model, context, dtype or compute_dtype(run))
        if found.state.base:
            base = open_base(found)
            load_tensors(model, base, found.state.base["path"])
            add_adapters(model, run.lora, UNSET)
            model.requires_grad_(False).eval()
        found.check_all_held((name for name, _ in named_tensors(model)), kinds=(MODEL,))
        load_tensors(model, found, str(found.path), wanted=is_adapter if found.state.base else every_tensor)
        return model, build_tokenizer(run.data, run.model.eos_token_id)


def load_for_inference(path: str | Path, device: torch.device, dtype: torch.dtype | None = None) -> tuple[DiffusionGemma, Tokenizer]:
    """Model and tokenizer of what StoredModel.open takes, loaded as StoredModel.load says."""
    return StoredModel.open(path).load(device, dtype)


def open_run(path: Path) -> store.Checkpoint:
    """The checkpoint that `path` is, or the newest valid one in it."""
    if path.name.startswith("iter_"):
        return store.open_checkpoint(path, kinds=(MODEL,))
    found = store.find_newest(path, kinds=(MODEL,))
    if found is None:
        raise ValueError(no_model_in(path))
    return found


def no_model_in(path: Path) -> str:
    """What to say of a path that holds no model: what is looked for there, and where one is or how it comes there."""
    around = (path.parent, *(sorted(path.glob("*")) if path.is_dir() else ()))
    near = [folder for folder in around if folder != Path() and holds_model(folder)]
    if near:
        remedy = f"name {near[0]}"
    elif not path.exists() and not path.is_absolute() and len(path.parts) == 2:
        remedy = f"correct the path, or download a model of the hub first: hf download {path} --local-dir models/{path.name}"
    else:
        remedy = "name a folder that has one of them"
    return f"{path} holds neither a transformers model (config.json) nor a valid checkpoint of ours (iter_.../complete.json); {remedy}"


def holds_model(folder: Path) -> bool:
    """Whether a folder looks like a transformers directory or a run's, without a look into its files."""
    return (folder / CONFIG).is_file() or any(folder.glob(f"iter_*/{store.COMPLETE}"))


def stored_run(found: store.Checkpoint) -> RunConfig:
    """The configuration of the run that saved a checkpoint."""
    return parse([f"@{found.path / store.ARGUMENTS}"])


def compute_dtype(run: RunConfig) -> torch.dtype:
    """What a run computes in."""
    return torch.bfloat16 if run.training.bf16 else torch.float32


def open_base(found: store.Checkpoint, path: Path | None = None) -> store.Checkpoint | TransformersDirectory:
    """The weights beside which a checkpoint's adapters stand: where they were in training, or at `path`.

    ValueError where they are not there, or others than those.
    """
    base = found.state.base
    if not base["path"] and path is None:
        raise ValueError(f"checkpoint {found.path} holds adapters of {base['fingerprint']}, which no folder holds; "
                         "merge them with their base (tools/checkpoint.py merge-adapters --base DIR)")
    path = path or Path(base["path"])
    if not path.is_dir():
        raise ValueError(f"checkpoint {found.path} holds adapters of {path}, which is not there; tools/checkpoint.py merge-adapters "
                         "--base DIR merges them with their base wherever it is now")
    source = TransformersDirectory.open(path) if (path / CONFIG).is_file() else open_run(path)
    seen = fingerprint(source, compute_dtype(stored_run(found)))
    if seen != base["fingerprint"]:
        raise ValueError(f"{path} holds other weights than those that the adapters of {found.path} were trained with "
                         f"(fingerprints {seen[:12]} and {base['fingerprint'][:12]}); name those with --base (tools/checkpoint.py "
                         "merge-adapters)")
    return source
