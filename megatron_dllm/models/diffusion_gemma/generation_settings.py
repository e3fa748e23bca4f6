"""The sampler's settings in a generation_config.json, as transformers' generate reads them for this model."""
from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...config import GenerationConfig
from .transformers_directory import read_json

GENERATION = "generation_config.json"
SAMPLER, BOUND = "EntropyBoundSamplerConfig", "entropy_bound"


def read_sampler(folder: Path) -> GenerationConfig:
    """The settings of a model directory; the release's where it says nothing. ValueError for another sampler, and for what is no number."""
    file = folder / GENERATION
    if not file.is_file():
        return GenerationConfig()
    held = read_json(file)
    bound = held.get("sampler_config") or {"_cls_name": SAMPLER}
    if bound.get("_cls_name") != SAMPLER:
        raise ValueError(f"{file}: sampler_config is of {bound.get('_cls_name')}, and only {SAMPLER} is known here; remove sampler_config")
    known = {name: type(value) for name, value in asdict(GenerationConfig()).items()}
    found = {name: value for name, value in {**held, **bound}.items() if name in known and value is not None}
    wrong = [f"{name} is {value!r}" for name, value in found.items()
             if isinstance(value, bool) or not isinstance(value, (int, known[name]))]
    if wrong:
        raise ValueError(f"{file}: {', '.join(wrong)}; set whole numbers for counts, and numbers for all else")
    return GenerationConfig(**{name: known[name](value) for name, value in found.items()})


def sampler_settings(sampler: GenerationConfig) -> dict[str, Any]:
    """The entries that say `sampler`."""
    settings = asdict(sampler)
    bound = settings.pop(BOUND)
    return {**settings, "sampler_config": {"_cls_name": SAMPLER, BOUND: bound}}
