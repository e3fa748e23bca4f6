"""Where a run's model comes from: a preset, a transformers config.json, a checkpoint, or flags that say it whole."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_dllm.config.arguments_file import split_arguments
from megatron_dllm.config.flags import Flag, build_parser, flag, flags_of
from megatron_dllm.config.model import (
    DEFAULT_LAYER_PATTERN,
    ModelConfig,
    read_layer_types,
    repeat_layer_types,
    with_linear_layers,
    write_layer_types,
)
from megatron_dllm.config.presets import PRESETS
from megatron_dllm.config.problems import Problem, format_problems

# Of a checkpoint on disk: its folder in a run's, and the two of its files that matter here.
ITERATION_FOLDER = r"iter_\d{7,}"
COMPLETE_FILE, ARGUMENTS_FILE = "complete.json", "args.txt"
MODEL_FLAGS: dict[str, Flag] = {item.field: item for item in flags_of(ModelConfig)}


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Model source (one of these, or a checkpoint by --load or --pretrained-checkpoint, or the model's own flags)"""

    preset: Literal["diffusiongemma-26b-a4b", "toy"] | None = flag("A model by name.", None)
    model_config: str | None = flag("A transformers config.json, or the folder that holds one.", None, metavar="PATH")
    linear_attention_freq: int | None = flag(
        "Of so many layers only the last keeps its type, the others become linear (gated delta net); --layer-types says it freely.", None
    )


@dataclass(frozen=True)
class ResolvedModel:
    """The model of a run, where it came from (for messages), and one sentence for each value that a flag replaced."""

    model: ModelConfig
    origin: str
    overrides: tuple[str, ...] = ()


def resolve_model(source: ModelSource, given: Mapping[str, Any], *, load: str | None, pretrained_checkpoint: str | None) -> ResolvedModel:
    """The model that the command line asks for; `given` are the model fields that it names itself.

    Flags override a preset or a config.json. A checkpoint of ours, from `load` or else from `pretrained_checkpoint`, overrides nothing and
    may not be contradicted: ValueError names both values. ValueError too where no source, or more than one, describes a whole model.
    """
    if source.preset and source.model_config:
        both = f"--preset {source.preset} and --model-config {source.model_config}"
        raise ValueError(f"{both}: a model comes from one of them; drop the other")
    checkpoint = next((folder for folder in (load, pretrained_checkpoint) if folder and checkpoint_folder(folder)), None)
    described = _described_model(source, given, None if load and checkpoint == load else pretrained_checkpoint)
    frequency = source.linear_attention_freq
    if frequency is not None and described is not None:
        described = _with_frequency(described, frequency)
    if checkpoint is None:
        if described is None:
            raise ValueError(_no_model(given, load or pretrained_checkpoint))
        return described
    stored = read_stored_model(checkpoint)
    if frequency is not None and described is None and with_linear_layers(stored.layer_types, frequency) != stored.layer_types:
        raise ValueError(f"--linear-attention-freq {frequency}: checkpoint {checkpoint} has the layers "
                         f"{write_layer_types(stored.layer_types)}; leave the flag out, or start from another checkpoint")
    named = asdict(described.model) if described else _expanded(given, stored.num_layers)
    if problems := contradictions(named, stored, checkpoint):
        raise ValueError(format_problems(problems))
    return ResolvedModel(stored, f"checkpoint {checkpoint}")


def _described_model(source: ModelSource, given: Mapping[str, Any], pretrained_checkpoint: str | None) -> ResolvedModel | None:
    """The model without any checkpoint of ours, None where nothing describes a whole one."""
    if source.preset:
        return override(PRESETS[source.preset], given, f"--preset {source.preset}")
    if source.model_config:
        model = ModelConfig.from_transformers(read_config_file(Path(source.model_config)))
        return override(model, given, f"--model-config {source.model_config}")
    missing = missing_fields(given)
    if not missing:
        pattern = given.get("layer_types", ())
        return ResolvedModel(ModelConfig(**{**given, "layer_types": layer_types_for(pattern, given["num_layers"])}), "flags")
    if pretrained_checkpoint and (Path(pretrained_checkpoint) / "config.json").is_file():
        model = ModelConfig.from_transformers(read_config_file(Path(pretrained_checkpoint)))
        return override(model, given, f"--pretrained-checkpoint {pretrained_checkpoint}")
    return None


def _with_frequency(plain: ResolvedModel, frequency: int) -> ResolvedModel:
    """The model with the layers that --linear-attention-freq makes linear; ValueError where it cannot."""
    types, named = plain.model.layer_types, f"--linear-attention-freq {frequency}"
    if frequency < 2:
        raise ValueError(f"{named}: of fewer than two layers none is left to be linear; leave the flag out, or set it to 2 or more")
    if "linear" in types:
        raise ValueError(f"{named} and --layer-types {write_layer_types(types)}: both say which layers are linear; drop one")
    linear = with_linear_layers(types, frequency)
    sentence = f"--layer-types {write_layer_types(linear)} replaces {write_layer_types(types)} of {plain.origin}, by {named}"
    return ResolvedModel(replace(plain.model, layer_types=linear), plain.origin, (*plain.overrides, sentence))


def missing_fields(given: Mapping[str, Any]) -> list[str]:
    """The model fields that have no default and are not `given` (the layer types follow from the number of layers)."""
    return [f for f, item in MODEL_FLAGS.items() if item.default is MISSING and f not in given and f != "layer_types"]


def _no_model(given: Mapping[str, Any], folder: str | None) -> str:
    if given and (missing := missing_fields(given)):
        names = ", ".join(MODEL_FLAGS[f].name for f in missing)
        reason = f"the model flags given do not describe a whole model: {names} missing; add them, or"
    elif folder:
        reason = f"{folder} holds no checkpoint that the model could come from;"
    else:
        reason = "no model is given;"
    return f"{reason} give one of --preset ({', '.join(PRESETS)}), --model-config PATH, or --load DIR with a checkpoint"


def layer_types_for(pattern: tuple[str, ...], num_layers: int) -> tuple[str, ...]:
    """`pattern` over all layers; without one the default pattern, whose last layer is made full."""
    if pattern:
        return repeat_layer_types(pattern, num_layers)
    return (*repeat_layer_types(DEFAULT_LAYER_PATTERN, num_layers)[: num_layers - 1], "full")


def override(model: ModelConfig, given: Mapping[str, Any], origin: str) -> ResolvedModel:
    """`model` with the `given` fields, and a sentence for each that differs.

    Where only the number of layers is given, the layer types are the model's own, repeated or cut, the last layer full.
    """
    values = asdict(model) | dict(given)
    if "layer_types" in given or values["num_layers"] != model.num_layers:
        pattern = given.get("layer_types") or read_layer_types(write_layer_types(model.layer_types))
        values["layer_types"] = repeat_layer_types(pattern, values["num_layers"])
        if "layer_types" not in given:
            values["layer_types"] = (*values["layer_types"][: values["num_layers"] - 1], "full")
    overrides = [
        f"{item.name} {item.describe(values[f])} replaces {item.describe(getattr(model, f))} of {origin}"
        + ("" if f in given else ", to go with --num-layers")
        for f, item in MODEL_FLAGS.items()
        if values[f] != getattr(model, f)
    ]
    return ResolvedModel(ModelConfig(**values), origin, tuple(overrides))


def read_config_file(path: Path) -> dict[str, Any]:
    """The transformers configuration in `path`, a config.json or a folder with one; ValueError names the file."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"there is no transformers configuration at {file}; name a config.json or the folder that holds it")
    try:
        source = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}; correct it, or name another") from error
    if not isinstance(source, dict):
        raise ValueError(f"{file} holds a {type(source).__name__}, not an object with settings; name the config.json of a model")
    return source


def checkpoint_folder(folder: str) -> Path | None:
    """The folder of one iteration that `folder` is, or else the newest complete one in it; None where there is neither."""
    path = Path(folder)
    if re.fullmatch(ITERATION_FOLDER, path.name) and path.is_dir():
        return path
    inside = path.iterdir() if path.is_dir() else ()
    complete = [p for p in inside if re.fullmatch(ITERATION_FOLDER, p.name) and (p / COMPLETE_FILE).is_file()]
    return max(complete, key=lambda p: int(p.name.partition("_")[2]), default=None)


def read_stored_model(folder: str) -> ModelConfig:
    """The model of a checkpoint of ours, from its args.txt; ValueError where that file is missing or does not describe a whole model."""
    file = checkpoint_folder(folder) / ARGUMENTS_FILE
    if not file.is_file():
        raise ValueError(f"checkpoint {folder} has no {file}, so its model is not known; copy that file from another checkpoint of the run")
    return read_model_arguments(split_arguments(file.read_text(encoding="utf-8"), str(file)), str(file))


def read_model_arguments(words: Sequence[str], origin: str) -> ModelConfig:
    """The model that the flags in `words` describe; all other flags are passed over."""
    values = vars(build_parser([ModelConfig], description="").parse_known_args(words)[0])
    if missing := missing_fields(values):
        raise ValueError(f"{origin} does not describe a whole model: {', '.join(MODEL_FLAGS[f].name for f in missing)} missing; give "
                         "these too, or --preset or --model-config")
    return ModelConfig(**{**values, "layer_types": layer_types_for(values.get("layer_types", ()), values["num_layers"])})


def _expanded(given: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """`given` with its layer pattern over all layers."""
    if "layer_types" not in given:
        return dict(given)
    return {**given, "layer_types": repeat_layer_types(given["layer_types"], given.get("num_layers", num_layers))}


def contradictions(named: Mapping[str, Any], stored: ModelConfig, origin: str) -> list[Problem]:
    """A problem for each model field in `named` that is not what the checkpoint has."""
    return [
        Problem(
            flags={MODEL_FLAGS[f].name: MODEL_FLAGS[f].describe(value)},
            why=f"checkpoint {origin} has {MODEL_FLAGS[f].describe(getattr(stored, f))}",
            remedy="leave the flag out, or start from another checkpoint",
            fix={f: getattr(stored, f)},
        )
        for f, value in named.items()
        if value != getattr(stored, f)
    ]
