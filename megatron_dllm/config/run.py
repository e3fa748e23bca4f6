"""The configuration of a whole run: from the command line, and back to it."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron_dllm.config import model_source
from megatron_dllm.config.arguments_file import expand_argument_files
from megatron_dllm.config.checkpoint import CheckpointConfig
from megatron_dllm.config.data import DataConfig
from megatron_dllm.config.evaluation import EvaluationConfig
from megatron_dllm.config.extensions import ExtensionConfig, import_extensions
from megatron_dllm.config.flags import Flag, build_parser, flags_of
from megatron_dllm.config.generation import GenerationConfig
from megatron_dllm.config.logging import LoggingConfig
from megatron_dllm.config.lora import LoRAConfig
from megatron_dllm.config.model import ModelConfig
from megatron_dllm.config.model_source import ModelSource
from megatron_dllm.config.moe import MoEConfig
from megatron_dllm.config.objective import ObjectiveConfig
from megatron_dllm.config.optimizer import OptimizerConfig
from megatron_dllm.config.parallel import ParallelConfig
from megatron_dllm.config.training import TrainingConfig
from megatron_dllm.config.unknown_flags import refuse_unknown


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run is told. The last two say where `model` came from, for people to read; equality leaves them out."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    moe: MoEConfig = MoEConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    lora: LoRAConfig = LoRAConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    logging: LoggingConfig = LoggingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    generation: GenerationConfig = GenerationConfig()
    extensions: ExtensionConfig = ExtensionConfig()
    model_origin: str = field(default="code", compare=False)
    overrides: tuple[str, ...] = field(default=(), compare=False)

    def value(self, field_name: str) -> Any:
        """The value of a field of any group, for code that goes over flags."""
        return getattr(getattr(self, FLAGS[field_name][0]), field_name)

    def with_values(self, **values: Any) -> "RunConfig":
        """This run with other values of fields, of whatever group."""
        by_group: dict[str, dict[str, Any]] = {}
        for field_name, value in values.items():
            by_group.setdefault(FLAGS[field_name][0], {})[field_name] = value
        return replace(self, **{group: replace(getattr(self, group), **changes) for group, changes in by_group.items()})


# Attribute of RunConfig -> its config class, in the order of --help.
GROUPS: dict[str, type] = {
    "source": ModelSource,
    "model": ModelConfig,
    "objective": ObjectiveConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "evaluation": EvaluationConfig,
    "lora": LoRAConfig,
    "optimizer": OptimizerConfig,
    "parallel": ParallelConfig,
    "moe": MoEConfig,
    "logging": LoggingConfig,
    "checkpoint": CheckpointConfig,
    "generation": GenerationConfig,
    "extensions": ExtensionConfig,
}
DESCRIPTION = "Train a block-diffusion language model. Flags may also stand in files: @args.txt."
# Field name, which is unique over all groups -> its group and its flag.
FLAGS: dict[str, tuple[str, Flag]] = {item.field: (name, item) for name, group in GROUPS.items() for item in flags_of(group)}


def parse(argv: Sequence[str]) -> RunConfig:
    """The run that command-line words describe; a flag given twice has its last value.

    Reads argument files, and the transformers configuration or checkpoint that the model comes from, nothing else. ValueError with a
    text for the user: unknown flags, values that are not understood, no model, a model that contradicts its checkpoint.
    """
    words = expand_argument_files(argv, Path())
    import_extensions(words)
    parser = build_parser(GROUPS.values(), description=DESCRIPTION)
    refuse_unknown(words, parser.known_flags)
    given = vars(parser.parse_args(words))
    values = {name: {f.name: given[f.name] for f in fields(group) if f.name in given} for name, group in GROUPS.items()}
    source, checkpoint = ModelSource(**values.pop("source")), CheckpointConfig(**values["checkpoint"])
    resolved = model_source.resolve_model(
        source, values.pop("model"), load=checkpoint.load, pretrained_checkpoint=checkpoint.pretrained_checkpoint
    )
    others = {name: GROUPS[name](**fields_given) for name, fields_given in values.items()}
    return RunConfig(model=resolved.model, model_origin=resolved.origin, overrides=resolved.overrides, **others)


def parse_or_exit(argv: Sequence[str] | None = None) -> RunConfig:
    """`parse` for entry scripts: without `argv` the process's own arguments; an error is printed and ends the process with status 2."""
    try:
        return parse(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def to_flags(run: RunConfig) -> list[str]:
    """Command-line words that `parse` turns into `run` again: every flag that has a value, so that no later default changes it."""
    return [word for line in _flag_lines(run).values() for words in line for word in words]


def to_arguments_text(run: RunConfig) -> str:
    """`to_flags` as the text of an args.txt: one flag with its value on a line, a comment before each group."""
    sections = []
    for name, lines in _flag_lines(run).items():
        notes = (f"from {run.model_origin}", *run.overrides) if name == "model" else ()
        origin = "".join("\n# " + " ".join(note.split()) for note in notes)
        title = GROUPS[name].__doc__.partition(" (")[0]
        sections.append("\n".join([f"# {title}{origin}", *(shlex.join(words) for words in lines)]))
    return "\n\n".join(sections) + "\n"


def _flag_lines(run: RunConfig) -> dict[str, list[list[str]]]:
    """The words of each flag, by group; the model in full, so that its source is not needed again."""
    return {
        name: [words for item in flags_of(group) if (words := item.to_command_line(getattr(getattr(run, name), item.field)))]
        for name, group in GROUPS.items()
        if name != "source"
    }


def differences(runs: Sequence[RunConfig]) -> dict[str, tuple[Any, ...]]:
    """The flags in which `runs` differ, each with the value of every run."""
    values = {item.name: tuple(run.value(name) for run in runs) for name, (group, item) in FLAGS.items() if group != "source"}
    return {name: of_runs for name, of_runs in values.items() if any(value != of_runs[0] for value in of_runs)}
