"""Rules of the objective, the data, the batches and the course of training."""

import math

from megatron_dllm.config.check import Fault, check, listed
from megatron_dllm.config.data import DataConfig
from megatron_dllm.config.moe import dispatcher_in_use


@check("world_size", "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size",
       "micro_batch_size", "global_batch_size")  # fmt: skip
def batch_divides(world_size: int, tp: int, cp: int, pp: int, micro: int, total: int) -> Fault | None:
    """Every data-parallel rank must make the same number of whole microbatches."""
    copies = world_size // (tp * cp * pp)
    if copies == 0 or total % (micro * copies) == 0:
        return None
    unit = micro * copies
    above = -(-total // unit) * unit
    fits = ([above - unit] if above > unit else []) + [above]
    return Fault(
        f"{total} rows do not divide into microbatches of {micro} on {copies} data-parallel ranks",
        f"set --global-batch-size to a multiple of {unit}, such as {listed(fits)}",
        {"global_batch_size": above},
    )


@check("train_iters", "train_samples", "num_epochs")
def one_duration(iters: int | None, samples: int | None, epochs: int | None) -> Fault | None:
    given = [value for value in (iters, samples, epochs) if value is not None]
    if len(given) == 1:
        return None
    if not given:
        return Fault("nothing says how long to train", "set --train-iters, --train-samples or --num-epochs", {"train_iters": 1000})
    keep = "train_iters" if iters is not None else "train_samples"
    drop = {name: None for name in ("train_iters", "train_samples", "num_epochs") if name != keep}
    return Fault(f"{len(given)} flags say how long to train", f"keep one of them, such as --{keep.replace('_', '-')}", drop)


@check("train_samples", "global_batch_size")
def samples_fill_a_batch(samples: int | None, batch: int) -> Fault | None:
    if samples is None or samples >= batch:
        return None
    return Fault("the samples do not fill one batch", f"set --train-samples to at least {batch}", {"train_samples": batch})


@check("diffusion_loss", "noise_min")
def reweighting_is_bounded(loss: str, noise_min: float) -> Fault | None:
    if not loss.startswith("reweighted") or noise_min < 0.5:
        return None
    return Fault("1 / (1 - t) is bounded by t <= 1 - noise_min, which leaves no range", "set --noise-min below 0.5", {"noise_min": 1e-3})


@check("noise_sampling", "global_batch_size")
def antithetic_needs_company(sampling: str, batch: int) -> Fault | None:
    if sampling != "antithetic" or batch > 1:
        return None
    return Fault("one example has no others to be spread against", "set --noise-sampling to uniform", {"noise_sampling": "uniform"})


@check("gradient_accumulation_fusion", "bf16", "transformer_impl", "lora_rank")
def linear_gradients_can_be_fused(fused: bool, bf16: bool, impl: str, rank: int | None) -> Fault | None:
    if not fused:
        return None
    leave = {"gradient_accumulation_fusion": False}
    if not bf16:
        return Fault("in fp32 torch adds every gradient to its buffer as it is",
                     "set --bf16, or leave out --gradient-accumulation-fusion", leave)  # fmt: skip
    if impl != "local":
        return Fault("Transformer Engine's linear layers hand their gradients to autograd",
                     "set --transformer-impl local, or leave out --gradient-accumulation-fusion", leave)  # fmt: skip
    if rank is not None:
        return Fault("beside adapters linear layers are frozen", "leave out --gradient-accumulation-fusion, or --lora-rank", leave)
    return None


@check("data_source", "data_path")
def some_data(source: str, path: tuple[str, ...]) -> Fault | None:
    if path or DataConfig(data_source=source).makes_examples:
        return None
    return Fault("there is nothing to train on", "give --data-path, or set --data-source to sudoku", {"data_source": "sudoku"})


@check("data_path")
def blend_alternates(path: tuple[str, ...]) -> Fault | None:
    try:
        DataConfig(data_path=path).blend()
    except ValueError as error:
        return Fault(str(error), "write --data-path as 0.3 A 0.7 B, or without any weight")
    return None


@check("data_columns")
def columns_are_pairs(columns: tuple[str, ...]) -> Fault | None:
    wrong = [word for word in columns if not all(word.partition("=")[::2])]
    if not wrong:
        return None
    return Fault(f"{wrong[0]} is not OURS=THEIRS", "write --data-columns as messages=dialogue")


@check("split")
def split_is_three_shares(split: str) -> Fault | None:
    try:
        DataConfig(split=split).split_shares()
    except ValueError as error:
        return Fault(str(error), "set --split to 969,30,1", {"split": "969,30,1"})
    return None


@check("data_source", "eval_interval", "split")
def evaluation_has_data(source: str, interval: int | None, split: str) -> Fault | None:
    """Puzzles are held out by their solutions, without --split."""
    data = DataConfig(data_source=source, split=split)
    if data.makes_examples or interval is None or split_is_three_shares(split) or data.split_shares()[1] > 0:
        return None
    return Fault("no share of the data is for validation", "set --split to 969,30,1, or leave out --eval-interval", {"split": "969,30,1"})


@check("eval_generations", "objective", "pipeline_model_parallel_size")
def answers_need_canvases_and_whole_models(count: int | None, objective: str, stages: int) -> Fault | None:
    if count is None or objective != "ar" and stages == 1:
        return None
    why = "no rank of a pipeline has the whole model" if objective != "ar" else "--objective ar has no canvases to denoise"
    return Fault(f"answers cannot be generated while training: {why}",
                 "leave --eval-generations out, and score checkpoints with tools/evaluate.py", {"eval_generations": None})  # fmt: skip


@check("tokenizer_type", "tokenizer_model")
def tokenizer_is_named(kind: str, model: str | None) -> Fault | None:
    if kind != "HuggingFaceTokenizer" or model:
        return None
    return Fault(
        "the tokenizer's files are not named",
        "give --tokenizer-model DIR, or set --tokenizer-type to ByteTokenizer",
        {"tokenizer_type": "ByteTokenizer"},
    )


@check("lr", "min_lr")
def lr_falls(lr: float, min_lr: float) -> Fault | None:
    if min_lr <= lr:
        return None
    return Fault("the learning rate cannot decay upwards", f"set --min-lr to at most {lr}", {"min_lr": lr})


@check("lr_warmup_iters", "lr_warmup_fraction")
def one_warmup(iters: int, fraction: float | None) -> Fault | None:
    if not iters or fraction is None:
        return None
    return Fault("both say how long the warm-up is", "leave out one, such as --lr-warmup-fraction", {"lr_warmup_fraction": None})


@check("lr_decay_style", "lr_wsd_decay_iters")
def wsd_has_a_decay(style: str, iters: int | None) -> Fault | None:
    if style != "WSD" or iters is not None:
        return None
    return Fault("nothing says how long the decay at the end is", "set --lr-wsd-decay-iters", {"lr_wsd_decay_iters": 1})


@check("lr_decay_style", "lr_warmup_iters", "lr_warmup_fraction", "lr_wsd_decay_iters", "lr_decay_iters", "train_iters")
def course_fits(
    style: str, warmup_iters: int, fraction: float | None, wsd_decay: int | None, decay_iters: int | None, train_iters: int | None
) -> Fault | None:
    """Warm-up and decay must fit into the steps of the schedule, where their number is known."""
    steps = decay_iters if decay_iters is not None else train_iters
    if steps is None or style == "constant":
        return None
    warmup = warmup_iters or math.ceil((fraction or 0) * steps)
    tail = (wsd_decay or 1) if style == "WSD" else 1
    if warmup + tail <= steps:
        return None
    if tail > steps:
        return Fault(f"a decay of {tail} steps does not fit into {steps}", f"set --lr-wsd-decay-iters below {steps}")
    return Fault(
        f"a warm-up of {warmup} steps leaves less than {tail} of {steps} for the decay",
        f"set --lr-warmup-iters to at most {steps - tail}",
        {"lr_warmup_iters": steps - tail, "lr_warmup_fraction": None},
    )


@check("recompute_granularity", "recompute_modules")
def selective_names_modules(granularity: str | None, modules: tuple[str, ...]) -> Fault | None:
    if granularity != "selective" or modules:
        return None
    return Fault(
        "nothing is named to compute again", "set --recompute-modules, to core_attn for example", {"recompute_modules": ("core_attn",)}
    )


@check("device", "memory_snapshot_path")
def snapshot_needs_cuda(device: str, path: str | None) -> Fault | None:
    if device != "cpu" or path is None:
        return None
    return Fault("only CUDA memory has a snapshot", "leave out --memory-snapshot-path", {"memory_snapshot_path": None})


@check("profile", "profile_step_start", "profile_step_end")
def profile_has_steps(profile: bool, start: int, end: int) -> Fault | None:
    if not profile or start < end:
        return None
    return Fault("no step lies between them", f"set --profile-step-end to at least {start + 1}", {"profile_step_end": start + 1})


@check("profile", "profile_step_start", "train_iters")
def profile_is_reached(profile: bool, start: int, train_iters: int | None) -> Fault | None:
    if not profile or train_iters is None or start < train_iters:
        return None
    return Fault("training ends before", f"set --profile-step-start below {train_iters}", {"profile_step_start": 0})


@check("profile", "run_dir", "save")
def profile_has_a_folder(profile: bool, run_dir: str | None, save: str | None) -> Fault | None:
    if not profile or run_dir or save:
        return None
    return Fault("the trace goes to the run's folder, and there is none", "give --run-dir or --save", {"run_dir": "runs/profile"})


@check("save_best", "eval_interval")
def best_is_measured(save_best: bool, interval: int | None) -> Fault | None:
    if not save_best or interval is not None:
        return None
    return Fault("without evaluation no checkpoint is the best", "set --eval-interval, or leave out --save-best", {"save_best": False})


@check("t_min", "t_max")
def temperature_falls(t_min: float, t_max: float) -> Fault | None:
    if t_min <= t_max:
        return None
    return Fault("the temperature cannot rise over the steps", f"set --t-min to at most {t_max}", {"t_min": t_max})


@check("gdn_kernel_backend", "deterministic_mode", "bf16", "device")
def gated_delta_kernels(backend: str, deterministic: bool, bf16: bool, device: str) -> Fault | None:
    whys = {"its kernels add up in another order from run to run": deterministic, "its kernels compute in bf16": not bf16,
            "its kernels need a CUDA device": device == "cpu"}
    why = next((why for why, holds in whys.items() if holds), None)
    if backend == "torch" or why is None:
        return None
    return Fault(why, "set --gdn-kernel-backend torch", {"gdn_kernel_backend": "torch"})


@check("overlap_param_gather", "pipeline_model_parallel_size", "cuda_graph_impl")
def layers_wait_when_called(overlap: bool, stages: int, graphs: str) -> Fault | None:
    if not overlap or (stages == 1 and graphs == "none"):
        return None
    return Fault("layers wait for their parameters when they are called, which a recorded graph does not do and a pipeline not in order",
                 "leave --overlap-param-gather out", {"overlap_param_gather": False})


NO_GRAPHS = {"cuda_graph_impl": "none"}


@check("cuda_graph_impl", "device")
def graphs_need_cuda(impl: str, device: str) -> Fault | None:
    if impl == "none" or device != "cpu":
        return None
    return Fault("a graph is of CUDA work", "set --device cuda, or --cuda-graph-impl none", NO_GRAPHS)


@check("cuda_graph_impl", "bf16", "moe_grouped_gemm")
def graphs_need_grouped_products(impl: str, bf16: bool, grouped: bool) -> Fault | None:
    if impl == "none" or bf16 and grouped:
        return None
    return Fault(
        "the loop over experts reads on the host how many rows each has, and a recording cannot wait for that",
        "set --bf16 and --moe-grouped-gemm, or --cuda-graph-impl none",
        NO_GRAPHS,
    )


@check("cuda_graph_impl", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend")
def graphs_need_known_rooms(impl: str, kind: str, backend: str | None) -> Fault | None:
    if impl == "none" or dispatcher_in_use(kind, backend) in ("alltoall", "deepep"):
        return None
    return Fault("its dispatch reads numbers of rows on the host",
                 "set --moe-token-dispatcher-type to alltoall or deepep, or --cuda-graph-impl none", NO_GRAPHS)  # fmt: skip


@check("cuda_graph_impl", "moe_max_tokens_per_rank", "expert_model_parallel_size", "expert_tensor_parallel_size")
def graphs_need_bounded_dispatch(impl: str, bound: int | None, *sizes: int) -> Fault | None:
    if impl == "none" or bound is not None or max(sizes) == 1:
        return None
    return Fault("over several ranks the host waits in every dispatch for its numbers of rows, unless there is room for the most",
                 "set --moe-max-tokens-per-rank, or --cuda-graph-impl none", NO_GRAPHS)  # fmt: skip


WITHOUT_ONE_FORM = {"cuda_graph_canvas_multiple": None}


@check("cuda_graph_canvas_multiple", "moe_aux_loss_coeff", "self_conditioning_prob")
def one_form_keeps_passes(multiple: int | None, coefficient: float, share: float) -> Fault | None:
    if multiple is None or coefficient == 0 or share in (0, 1):
        return None
    return Fault("the auxiliary loss is of each pass, and canvases that no coin decodes twice would be in another one",
                 "set --moe-aux-loss-coeff 0, or leave --cuda-graph-canvas-multiple out", WITHOUT_ONE_FORM)  # fmt: skip


@check("cuda_graph_canvas_multiple", "context_parallel_size", "objective")
def one_form_is_of_whole_rows(multiple: int | None, cp: int, objective: str) -> Fault | None:
    if multiple is None or cp == 1 and objective != "ar":
        return None
    why = "there are no canvases" if objective == "ar" else "what ranks of a sequence send each other differs with its documents"
    return Fault(why, "leave --cuda-graph-canvas-multiple out", WITHOUT_ONE_FORM)


@check("cuda_graph_impl", "layer_types")
def graphs_need_attention(impl: str, layer_types: tuple[str, ...]) -> Fault | None:
    if impl == "none" or "linear" not in layer_types:
        return None
    return Fault("linear layers are not recorded yet", "set --cuda-graph-impl none", NO_GRAPHS)


@check("cuda_graph_impl", "kv_channels", "global_kv_channels")
def graphs_need_attention_kernels(impl: str, *head_dims: int) -> Fault | None:
    """Attention without the kernels is cut by the lengths of the batch, which the host reads."""
    if impl == "none" or all(16 <= size <= 512 and size & (size - 1) == 0 for size in head_dims):
        return None
    return Fault("only attention of head dimensions that are powers of two from 16 to 512 is recorded",
                 "set --kv-channels and --global-kv-channels to such numbers, or --cuda-graph-impl none", NO_GRAPHS)  # fmt: skip
