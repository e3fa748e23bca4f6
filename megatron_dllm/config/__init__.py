"""A run's configuration: frozen dataclasses that make the flags, and checks that report and never rewrite."""

from megatron_dllm.config.checkpoint import CheckpointConfig
from megatron_dllm.config.data import DataConfig
from megatron_dllm.config.evaluation import EvaluationConfig
from megatron_dllm.config.generation import GenerationConfig
from megatron_dllm.config.logging import LoggingConfig
from megatron_dllm.config.lora import LoRAConfig
from megatron_dllm.config.model import ModelConfig
from megatron_dllm.config.moe import MoEConfig
from megatron_dllm.config.objective import ObjectiveConfig
from megatron_dllm.config.optimizer import OptimizerConfig
from megatron_dllm.config.parallel import ParallelConfig
from megatron_dllm.config.presets import PRESETS
from megatron_dllm.config.problems import Problem, format_problems
from megatron_dllm.config.run import RunConfig, differences, parse, parse_or_exit, to_arguments_text, to_flags
from megatron_dllm.config.training import TrainingConfig
from megatron_dllm.config.validation import check_against_checkpoint, problems_of, validate

__all__ = [
    "PRESETS",
    "CheckpointConfig",
    "DataConfig",
    "EvaluationConfig",
    "GenerationConfig",
    "LoRAConfig",
    "LoggingConfig",
    "MoEConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Problem",
    "RunConfig",
    "TrainingConfig",
    "check_against_checkpoint",
    "differences",
    "format_problems",
    "parse",
    "parse_or_exit",
    "problems_of",
    "to_arguments_text",
    "to_flags",
    "validate",
]
