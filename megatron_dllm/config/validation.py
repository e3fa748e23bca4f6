"""validate(): every check of a run's settings that needs no files and no processes. It reads and reports; nothing is rewritten."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from types import MappingProxyType
from typing import Any

# The files of checks enter their rules into CHECKS.
from megatron_dllm.config import (  # noqa: F401
    checks_context,
    checks_engine,
    checks_lora,
    checks_model,
    checks_moe,
    checks_passes,
    checks_pipeline,
    checks_run,
)
from megatron_dllm.config.check import CHECKS
from megatron_dllm.config.model import ModelConfig
from megatron_dllm.config.model_source import contradictions
from megatron_dllm.config.problems import Problem
from megatron_dllm.config.run import FLAGS, RunConfig


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; an open end is left out."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        return above and (value < self.high if self.high_open else value <= self.high) and math.isfinite(value)

    def __str__(self) -> str:
        low = f"above {self.low}" if self.low_open else f"at least {self.low}"
        if self.high == math.inf:
            return low
        return f"{low} and {'below' if self.high_open else 'at most'} {self.high}"


COUNT, COUNT_OR_NONE = Range(1), Range(0)
POSITIVE, NOT_NEGATIVE, SHARE = Range(0, low_open=True), Range(0), Range(0, 1)
# Field -> where its value, or each of its values, must lie on its own; fields with choices, and free texts, have none.
RANGES: dict[str, Range] = {
    **dict.fromkeys(
        ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "window_size",
         "num_global_query_groups", "global_kv_channels", "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "vocab_size",
         "canvas_length", "max_position_embeddings", "seq_length", "max_canvases_per_row", "sudoku_num_puzzles", "micro_batch_size",
         "global_batch_size", "train_iters", "train_samples", "num_epochs", "eval_interval", "eval_iters", "exit_duration_in_mins",
         "exit_interval", "max_skipped_steps", "lr_decay_iters", "lr_wsd_decay_iters", "mhc_num_residual_streams",
         "mhc_sinkhorn_iterations", "mhc_recompute_layer_num", "cuda_graph_limit", "cuda_graph_token_multiple",
         "cuda_graph_canvas_multiple", "moe_max_tokens_per_rank",
         "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
         "tensor_model_parallel_size",
         "context_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
         "distributed_timeout_minutes",
         "num_layers_per_virtual_pipeline_stage", "microbatch_group_size_per_virtual_pipeline_stage",
         "log_interval", "save_interval", "save_retain_interval", "save_total_limit", "save_hf_interval", "max_new_tokens",
         "eval_generations", "max_denoising_steps", "lora_rank"),
        COUNT,
    ),
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id", "num_workers", "seed", "profile_step_start", "profile_step_end",
         "lr_warmup_iters", "stability_threshold", "mtp_num_layers"),
        COUNT_OR_NONE,
    ),
    **dict.fromkeys(
        ("final_logit_softcapping", "norm_epsilon", "rotary_base", "rotary_base_global", "lr", "adam_eps", "peak_tflops", "t_min",
         "t_max", "mtp_loss_scaling_factor", "lora_alpha"),
        POSITIVE,
    ),
    **dict.fromkeys(
        ("moe_aux_loss_coeff", "moe_z_loss_coeff",
         "init_method_std", "encoder_loss_weight", "min_lr", "weight_decay", "clip_grad", "entropy_bound", "confidence_threshold",
         "mhc_init_gating_factor", "log_grad_norm_spike"),
        NOT_NEGATIVE,
    ),
    "moe_router_bias_update_rate": POSITIVE,
    "lora_dropout": Range(0, 1, high_open=True),
    "rotary_percent_global": Range(0, 1, low_open=True),
    "self_conditioning_prob": SHARE,
    "noise_min": Range(0, 1, low_open=True, high_open=True),
    "lr_warmup_fraction": Range(0, 1, high_open=True),
    "adam_beta1": Range(0, 1, high_open=True),
    "adam_beta2": Range(0, 1, high_open=True),
}  # fmt: skip


@dataclass(frozen=True)
class Needs:
    """Settings that do something only where `holds`; `condition` says so in flags."""

    fields: tuple[str, ...]
    condition: str
    holds: Callable[[RunConfig], bool]


NEEDS = (
    Needs(
        ("diffusion_loss", "canvases_scored", "score_tokens", "score_eos_fill", "encoder_loss_weight", "self_conditioning_prob",
         "self_conditioning_null", "noise_min", "noise_schedule", "noise_sampling", "canvas_length_schedule"),
        "--objective block-diffusion",
        lambda run: run.objective.has_canvases,
    ),
    Needs(("encoder_loss_normalization", "encoder_loss_tokens", "mtp_num_layers"), "--encoder-loss-weight above 0",
          lambda run: run.objective.encoder_loss_weight > 0),
    Needs(("moe_flex_dispatcher_backend",), "--moe-token-dispatcher-type flex", lambda run: run.moe.moe_token_dispatcher_type == "flex"),
    Needs(("mtp_loss_scaling_factor",), "--mtp-num-layers", lambda run: run.model.mtp_num_layers > 0),
    Needs(("self_conditioning_null",), "--self-conditioning-prob below 1", lambda run: run.objective.self_conditioning_prob < 1),
    Needs(("data_path", "split", "tokenizer_type"), "--data-source auto, chat or indexed", lambda run: run.data.data_source != "sudoku"),
    Needs(("data_columns", "chat_template", "supervise_turns"), "--data-source auto or chat",
          lambda run: run.data.data_source in ("auto", "chat")),
    Needs(("data_cache_path",), "--data-source auto, chat or sudoku", lambda run: run.data.data_source != "indexed"),
    Needs(("sudoku_size", "sudoku_num_puzzles"), "--data-source sudoku", lambda run: run.data.makes_examples),
    Needs(("tokenizer_model", "chat_template"), "--tokenizer-type HuggingFaceTokenizer",
          lambda run: run.data.tokenizer_type == "HuggingFaceTokenizer"),
    Needs(("max_canvases_per_row",), "--packing", lambda run: run.data.packing),
    Needs(("eval_iters", "eval_generations"), "--eval-interval", lambda run: run.evaluation.eval_interval is not None),
    Needs(("eval_score",), "--eval-generations", lambda run: run.evaluation.eval_generations is not None),
    Needs(("recompute_modules",), "--recompute-granularity selective", lambda run: run.training.recompute_granularity == "selective"),
    Needs(("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
          "a linear layer in --layer-types", lambda run: "linear" in run.model.layer_types),
    Needs(("mhc_num_residual_streams", "mhc_sinkhorn_iterations", "mhc_init_gating_factor"), "--enable-mhc-connections",
          lambda run: run.model.enable_mhc_connections),
    Needs(("mhc_recompute_layer_num",), "mhc among --recompute-modules", lambda run: "mhc" in run.training.recompute_modules),
    Needs(("moe_recompute_replay",), "--recompute-granularity", lambda run: run.training.recompute_granularity is not None),
    Needs(("moe_aux_loss_coeff", "moe_z_loss_coeff"), "a router that is trained",
          lambda run: not run.objective.freeze_router and (run.lora.lora_rank is None or "router" in run.lora.lora_targets)),
    Needs(("lora_alpha", "lora_dropout", "lora_targets"), "--lora-rank", lambda run: run.lora.lora_rank is not None),
    Needs(("freeze_router",), "weights that are trained (--lora-rank freezes all)", lambda run: run.lora.lora_rank is None),
    Needs(("moe_router_bias_update_rate",), "--moe-router-enable-expert-bias", lambda run: run.moe.moe_router_enable_expert_bias),
    Needs(("cuda_graph_limit", "cuda_graph_token_multiple", "cuda_graph_canvas_multiple"), "--cuda-graph-impl local",
          lambda run: run.training.cuda_graph_impl != "none"),
    Needs(("fp8_format", "moe_grouped_gemm_backend", "attention_backend", "rotary_backend", "cross_entropy_fusion_impl"),
          "--transformer-impl transformer_engine", lambda run: run.training.transformer_impl == "transformer_engine"),
    Needs(("fp8_recipe",), "--fp8-format", lambda run: run.training.fp8_format is not None),
    Needs(("draft_pass",), "canvases that are decoded twice (--self-conditioning-prob)",
          lambda run: run.objective.decodes_twice),
    Needs(("profile_step_start", "profile_step_end"), "--profile", lambda run: run.training.profile),
    Needs(("lr_decay_iters", "min_lr"), "an --lr-decay-style that decays", lambda run: run.optimizer.lr_decay_style != "constant"),
    Needs(("lr_wsd_decay_iters", "lr_wsd_decay_style"), "--lr-decay-style WSD", lambda run: run.optimizer.lr_decay_style == "WSD"),
    Needs(("overlap_param_gather",), "--use-distributed-optimizer", lambda run: run.parallel.use_distributed_optimizer),
    Needs(("sequence_parallel",), "--tensor-model-parallel-size above 1", lambda run: run.parallel.tensor_model_parallel_size > 1),
    Needs(("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage", "account_for_embedding_in_pipeline_split",
           "account_for_loss_in_pipeline_split", "microbatch_group_size_per_virtual_pipeline_stage", "overlap_p2p_communication",
           "batch_p2p_communication"),
          "--pipeline-model-parallel-size above 1", lambda run: run.parallel.pipeline_model_parallel_size > 1),
    Needs(("num_layers_per_virtual_pipeline_stage", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
          "stages of equal size (--pipeline-model-parallel-layout says what they are)",
          lambda run: run.parallel.pipeline_model_parallel_layout is None),
    Needs(("cp_comm_type", "cp_comm_type_sliding", "context_parallel_impl"), "--context-parallel-size above 1",
          lambda run: run.parallel.context_parallel_size > 1),
    Needs(("peak_tflops",), "--log-throughput", lambda run: run.logging.log_throughput),
    Needs(("wandb_exp_name",), "--wandb-project", lambda run: run.logging.wandb_project is not None),
    Needs(("save_interval", "save_best", "async_save", "save_retain_interval", "save_total_limit"), "--save",
          lambda run: run.checkpoint.save is not None),
    Needs(("override_opt_param_scheduler",), "--load", lambda run: run.checkpoint.load is not None),
    Needs(("save_hf_interval",), "--save-hf", lambda run: run.checkpoint.save_hf is not None),
)  # fmt: skip


def validate(run: RunConfig, *, world_size: int = 1) -> list[Problem]:
    """Every reason why `world_size` processes cannot train as `run` says, empty if there is none."""
    values = {name: run.value(name) for name, (group, _) in FLAGS.items() if group != "source"} | {"world_size": world_size}
    out_of_range = dict(_range_problems(values))
    without_effect = [problem for needs in NEEDS for problem in _without_effect(run, needs)]
    return [*out_of_range.values(), *without_effect, *_broken_rules(values, out_of_range)]


def problems_of(settings: Any, known: Mapping[str, Any] = MappingProxyType({})) -> list[Problem]:
    """Every reason why the settings of one config dataclass cannot work, whatever the run around them: ranges, and rules among them.

    `known`: values of fields of other groups, which those rules may read too.
    """
    values = {item.name: getattr(settings, item.name) for item in fields(settings)} | known
    out_of_range = dict(_range_problems(values))
    return [*out_of_range.values(), *_broken_rules(values, out_of_range)]


def _broken_rules(values: Mapping[str, Any], out_of_range: Collection[str]) -> Iterator[Problem]:
    """Of the rules that read nothing but `values`. A rule may count on each value alone being sensible."""
    for entry in CHECKS:
        if values.keys() >= set(entry.fields) and not set(out_of_range) & set(entry.fields):
            if fault := entry.rule(*(values[name] for name in entry.fields)):
                shown = {_shown_name(name): _shown(name, values[name]) for name in entry.fields}
                yield Problem(shown, fault.why, fault.remedy, fault.fix)


def _shown_name(name: str) -> str:
    return FLAGS[name][1].name if name in FLAGS else name.replace("_", " ")


def _shown(name: str, value: Any) -> str:
    return FLAGS[name][1].describe(value) if name in FLAGS else str(value)


def _range_problems(values: Mapping[str, Any]) -> Iterator[tuple[str, Problem]]:
    for name, allowed in RANGES.items():
        if name not in values:
            continue
        value = values[name]
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        if any(number not in allowed for number in numbers):
            default = FLAGS[name][1].default
            mended = int(allowed.low) if default is MISSING else default
            remedy = f"set {_shown_name(name)} to {_shown(name, mended)}, for example" if mended is not None else "leave it out"
            yield name, Problem({_shown_name(name): _shown(name, value)}, f"must be {allowed}", remedy, {name: mended})


def _without_effect(run: RunConfig, needs: Needs) -> Iterator[Problem]:
    if needs.holds(run):
        return
    for name in needs.fields:
        default, value = FLAGS[name][1].default, run.value(name)
        if value != default:
            yield Problem(
                {_shown_name(name): _shown(name, value)},
                f"has no effect without {needs.condition}",
                "add that, or leave the flag out",
                {name: default},
            )


def check_against_checkpoint(run: RunConfig, stored: ModelConfig) -> list[Problem]:
    """A problem for each setting of the model that is not what a checkpoint's model, `stored`, has."""
    return contradictions(asdict(run.model), stored, run.checkpoint.load or run.checkpoint.pretrained_checkpoint or "")
