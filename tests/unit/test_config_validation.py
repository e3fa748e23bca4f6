"""validate(): one case for every rule, each problem's remedy applied and the problem seen gone."""

import typing

import pytest

from megatron_dllm.config import ObjectiveConfig, Problem, RunConfig, format_problems, parse, validate
from megatron_dllm.config.check import CHECKS, divisors, listed
from megatron_dllm.config.data import DataConfig
from megatron_dllm.config.run import FLAGS
from megatron_dllm.config.validation import NEEDS, RANGES

DEEPEP = {"moe_token_dispatcher_type": "deepep", "expert_model_parallel_size": 2, "bf16": True}
PP2 = {"pipeline_model_parallel_size": 2}
LORA = {"lora_rank": 4}
APART, JOINT = ({"draft_pass": order} for order in ("apart", "joint"))
A2A = {"cp_comm_type": "a2a"}
LINEAR = ("linear",) * 5 + ("full",)
GRAPHS = {"cuda_graph_impl": "local", "bf16": True}
ONE_FORM = GRAPHS | {"cuda_graph_canvas_multiple": 4}
ENGINE = {"transformer_impl": "transformer_engine", "bf16": True}
ENGINE_EXPERTS = ENGINE | {"moe_grouped_gemm_backend": "transformer_engine"}
ENGINE_ATTENTION = ENGINE | {"attention_backend": "transformer_engine"}
PACKAGE = {"context_parallel_impl": "transformer_engine", "context_parallel_size": 2, "bf16": True, "cp_comm_type_sliding": "all_gather"}
WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 60}
GOOD = parse(["--preset", "toy", "--train-iters", "100", "--data-path", "data.jsonl", "--global-batch-size", "24"])


def flag_of(name: str) -> str:
    return FLAGS[name][1].name


def test_good_runs_have_no_problem():
    assert validate(GOOD) == []
    for course in ({"lr_warmup_iters": 99}, {"lr_decay_style": "constant", "lr_warmup_iters": 200}, WSD | {"lr_warmup_fraction": 0.4}):
        assert validate(GOOD.with_values(**course)) == []
    release = GOOD.with_values(**vars(parse(["--preset", "diffusiongemma-26b-a4b"]).model))
    assert validate(release) == []
    assert validate(GOOD, world_size=3) == []


# Rule -> settings that break it and no other, the processes, what the problem's text says.
CASES: list[tuple[str, dict, int, str]] = [
    ("passes: context_parallel_size", APART | {"context_parallel_size": 2}, 2, "--draft-pass apart, --context-parallel-size 2: drafts"),
    ("passes: context_parallel_size", JOINT | {"context_parallel_size": 2}, 2, "set --draft-pass auto, or leave --context-parallel-size"),
    ("passes: sequence_parallel", APART | {"sequence_parallel": True, "tensor_model_parallel_size": 2}, 2, "or leave --sequence-parallel"),
    ("passes: moe_aux_loss_coeff", APART | {"moe_aux_loss_coeff": 0.01}, 1, "another loss; set --draft-pass auto, or --moe-aux-loss-coeff"),
    ("passes: moe_aux_loss_coeff", JOINT | {"moe_aux_loss_coeff": 0.01}, 1, "--draft-pass joint, --moe-aux-loss-coeff 0.01: the loss on"),
    ("passes: pipeline_model_parallel_size", APART | PP2, 2, "or leave --pipeline-model-parallel-size out"),
    ("passes: tensor_model_parallel_size", JOINT | {"tensor_model_parallel_size": 2}, 2, "or leave --tensor-model-parallel-size out"),
    ("passes: expert_model_parallel_size", JOINT | {"expert_model_parallel_size": 2}, 2, "its layers whole, with all experts"),
    ("passes: expert_tensor_parallel_size", JOINT | {"expert_tensor_parallel_size": 2}, 2, "or leave --expert-tensor-parallel-size out"),
    ("passes: recompute_granularity", JOINT | {"recompute_granularity": "full"}, 1, "nothing may be computed again; set --draft-pass auto"),
    ("passes: transformer_impl", JOINT | ENGINE, 1, "--transformer-impl transformer_engine: one backward of two passes joins"),
    ("passes: moe_token_dispatcher_type", JOINT | {"moe_token_dispatcher_type": "allgather"}, 1, "or --moe-token-dispatcher-type alltoall"),
    ("passes: moe_grouped_gemm", JOINT | {"moe_grouped_gemm": False}, 1, "set --draft-pass auto, or --moe-grouped-gemm"),
    ("passes: layer_types", JOINT | {"layer_types": LINEAR}, 1, "or make all of --layer-types sliding or full"),
    ("passes: moe_router_topk", JOINT | {"moe_router_topk": 1}, 1, "or --moe-router-topk above 1"),
    ("passes: moe_z_loss_coeff", JOINT | {"moe_z_loss_coeff": 0.01}, 1, "the router's logits keeps is not joined; set --draft-pass auto"),
    ("passes: lora_dropout", JOINT | LORA | {"lora_dropout": 0.5}, 1, "what dropout keeps is not joined"),
    ("passes: lora_targets", JOINT | LORA | {"lora_targets": ("mlp", "experts")}, 1, "take experts out of --lora-targets"),
    ("linear_gradients_can_be_fused", {"gradient_accumulation_fusion": True}, 1, "in fp32 torch adds every gradient to its buffer"),
    ("linear_gradients_can_be_fused", ENGINE | {"gradient_accumulation_fusion": True}, 1, "hand their gradients to autograd; set"),
    ("linear_gradients_can_be_fused", LORA | {"gradient_accumulation_fusion": True, "bf16": True}, 1, "linear layers are frozen; leave"),
    ("sliding_heads", {"num_query_groups": 3}, 1, "3 key heads evenly in sliding layers; set --num-query-groups to one of 1, 2, 4"),
    ("full_heads", {"num_global_query_groups": 8}, 1, "do not share 8 key heads evenly in full layers; set --num-global-query-groups"),
    ("sliding_head_is_even", {"kv_channels": 15}, 1, "--kv-channels 15: rotary embedding turns pairs of channels; set --kv-channels to 16"),
    ("full_head_is_even", {"global_kv_channels": 1}, 1, "set --global-kv-channels to 2"),
    ("layer_types_fit", {"num_layers": 5}, 1, "--layer-types sliding*5,full: the pattern has 6 layers; set --num-layers to 6"),
    ("last_layer_is_full", {"layer_types": ("full",) * 5 + ("sliding",)}, 1, "the last layer must be full; set --layer-types to full."),
    ("enough_experts", {"moe_router_topk": 9}, 1, "a token cannot go to 9 of 8 experts; set --moe-router-topk to at most 8"),
    ("tokens_in_vocabulary", {"eos_token_id": (1, 512)}, 1, "token 512 is outside a vocabulary of 512; set --vocab-size to at least 513"),
    ("some_end_token", {"eos_token_id": ()}, 1, "--eos-token-id none: a canvas is filled with the first end token"),
    ("positions_suffice", {"seq_length": 4097}, 1, "the model is meant for 4096 positions; set --seq-length to at most 4096"),
    ("canvas_fits", {"seq_length": 15}, 1, "a row of 15 tokens has no room for a canvas of 16; set --seq-length to at least 16"),
    ("schedule_fits", {"canvas_length_schedule": "0:16,5:4000"}, 1, "no room for a canvas of 4000; set --seq-length to at least 4000"),
    ("schedule_fits", {"canvas_length_schedule": "5:16"}, 1, "'5:16': the first entry must start at iteration 0"),
    ("layers_wait_when_called", {"overlap_param_gather": True, "use_distributed_optimizer": True, "pipeline_model_parallel_size": 2}, 2,
     "and a pipeline not in order; leave --overlap-param-gather out"),
    ("dense_grid", {"tensor_model_parallel_size": 4, "num_query_groups": 4}, 6, "6 processes do not divide into copies of 4 x 1 x 1 ranks"),
    ("expert_grid", {"expert_model_parallel_size": 8}, 4, "copies of 1 x 8 x 1 ranks of experts; start a multiple of 8"),
    ("heads_over_ranks", {"tensor_model_parallel_size": 8}, 8, "over 8 ranks; set --tensor-model-parallel-size to one of 1, 2, 4"),
    ("mlp_over_ranks", {"tensor_model_parallel_size": 2, "ffn_hidden_size": 9}, 2, "9 columns do not divide over 2 ranks"),
    ("expert_width_over_ranks", {"expert_tensor_parallel_size": 2, "moe_ffn_hidden_size": 9}, 2, "9 columns of an expert do not"),
    ("experts_over_ranks", {"expert_model_parallel_size": 3}, 3, "8 experts do not divide over 3 ranks; set --expert-model"),
    ("sliding_key_heads_over_ranks", {"tensor_model_parallel_size": 3, "num_attention_heads": 6}, 3, "2 key heads of sliding"),
    ("full_key_heads_over_ranks", {"tensor_model_parallel_size": 2, "num_attention_heads": 6, "num_global_query_groups": 3}, 2, "3 key"),
    ("canvas_over_ranks", {"context_parallel_size": 3}, 3, "16 tokens does not divide over 3 ranks; set --context-parallel-size "
     "to one of 1, 2, 4, 8, 16, or the canvas length to a multiple of 3"),
    ("canvas_over_ranks", {"context_parallel_size": 4, "canvas_length_schedule": "0:6,9:8"}, 4, "of 6 tokens does not divide over 4 ranks"),
    ("full_heads_for_tokens", A2A | {"context_parallel_size": 8}, 8, "4 query heads and 1 key heads of a full layer"),
    ("sliding_heads_for_tokens", {"context_parallel_size": 8, "cp_comm_type_sliding": "a2a"}, 8, "heads and 2 key heads of a sliding"),
    ("package_computes_in_bf16_on_cuda", PACKAGE | {"bf16": False}, 2, "is for bf16 on CUDA devices; set --bf16 and a CUDA --device, or"),
    ("package_computes_in_bf16_on_cuda", PACKAGE | {"device": "cpu"}, 2, "or --context-parallel-impl local"),
    ("package_shares_canvases", PACKAGE | {"canvases_scored": "all"}, 2, "dealt out whole have no bias"),
    ("package_takes_some_layers", PACKAGE | {"kv_channels": 512, "global_kv_channels": 512}, 2, "up to 256: no layer is its; set"),
    ("package_windows", PACKAGE | {"cp_comm_type_sliding": "halo"}, 2, "set --cp-comm-type-sliding to all_gather or a2a"),
    ("package_full_heads", PACKAGE | A2A, 2, "cannot deal 1 key heads over 2 ranks in exchange for tokens; set --cp-comm-type to"),
    ("package_sliding_heads", PACKAGE | {"cp_comm_type_sliding": "a2a", "num_query_groups": 1}, 2, "set --cp-comm-type-sliding to all"),
    ("batch_divides", {"micro_batch_size": 4}, 4, "of 4 on 4 data-parallel ranks; set --global-batch-size to a multiple of 16"),
    ("batch_divides", {"micro_batch_size": 25}, 1, "set --global-batch-size to a multiple of 25, such as 25."),
    ("one_duration", {"train_iters": None}, 1, "nothing says how long to train; set --train-iters, --train-samples or --num-epochs"),
    ("one_duration", {"num_epochs": 2}, 1, "2 flags say how long to train; keep one of them, such as --train-iters"),
    ("one_duration", {"train_iters": None, "train_samples": 24, "num_epochs": 2}, 1, "such as --train-samples"),
    ("samples_fill_a_batch", {"train_iters": None, "train_samples": 23}, 1, "set --train-samples to at least 24"),
    ("reweighting_is_bounded", {"diffusion_loss": "reweighted-loo", "noise_min": 0.5}, 1, "leaves no range; set --noise-min below 0.5"),
    ("answers_need_canvases_and_whole_models", {"eval_generations": 4, "eval_interval": 1, "objective": "ar"}, 1, "has no canvases"),
    ("answers_need_canvases_and_whole_models", {"eval_generations": 4, "eval_interval": 1, "pipeline_model_parallel_size": 2}, 2,
     "no rank of a pipeline"),
    ("antithetic_needs_company", {"noise_sampling": "antithetic", "global_batch_size": 1}, 1, "no others to be spread against"),
    ("graphs_need_cuda", GRAPHS | {"device": "cpu"}, 1, "a graph is of CUDA work; set --device cuda, or --cuda-graph-impl none"),
    ("graphs_need_grouped_products", GRAPHS | {"bf16": False}, 1, "reads on the host how many rows each has"),
    ("graphs_need_grouped_products", GRAPHS | {"moe_grouped_gemm": False}, 1, "set --bf16 and --moe-grouped-gemm, or --cuda-graph"),
    ("graphs_need_known_rooms", GRAPHS | {"moe_token_dispatcher_type": "allgather"}, 1, "its dispatch reads numbers of rows on the host"),
    ("graphs_need_bounded_dispatch", DEEPEP | GRAPHS, 2, "set --moe-max-tokens-per-rank, or --cuda-graph"),
    ("one_form_keeps_passes", ONE_FORM | {"moe_aux_loss_coeff": 0.1}, 1, "set --moe-aux-loss-coeff 0, or leave"),
    ("passes: cuda_graph_canvas_multiple", ONE_FORM | APART, 1, "or leave --cuda-graph-canvas-multiple out"),
    ("one_form_is_of_whole_rows", ONE_FORM | {"context_parallel_size": 2}, 2, "leave --cuda-graph-canvas-multiple out"),
    ("one_form_is_of_whole_rows", ONE_FORM | {"objective": "ar"}, 1, "there are no canvases"),
    ("graphs_need_attention", GRAPHS | {"layer_types": LINEAR}, 1, "linear layers are not recorded yet"),
    ("graphs_need_attention_kernels", GRAPHS | {"kv_channels": 24}, 1, "powers of two from 16 to 512 is recorded"),
    ("engine_computes_in_bf16", ENGINE | {"bf16": False}, 1, "used for bf16 alone: float32 and float64 are the oracle's; set --bf16, or"),
    ("engine_runs_on_cuda", ENGINE | {"device": "cpu"}, 1, "its kernels run on CUDA devices; set --device cuda, or --transformer-impl"),
    ("engine_is_not_recorded", ENGINE | {"cuda_graph_impl": "local"}, 1, "set --cuda-graph-impl none, or --transformer-impl local"),
    ("engine_over_ranks_is_not_recorded", PACKAGE | GRAPHS, 2, "set --cuda-graph-impl none, or --context-parallel-impl local"),
    ("engine_attends_in_some_layers", ENGINE_ATTENTION | {"kv_channels": 512, "global_kv_channels": 512}, 1, "up to 256, and no layer has"),
    ("engine_attends_on_one_rank", ENGINE_ATTENTION | {"context_parallel_size": 2}, 2, "--context-parallel-impl transformer_engine has"),
    ("engine_attends_in_no_fixed_order", ENGINE_ATTENTION | {"deterministic_mode": True}, 1, "for them cuDNN asks for room that grows"),
    ("engine_groups_experts", ENGINE_EXPERTS | {"moe_grouped_gemm": False}, 1, "there is a loop over experts; set --moe-grouped-gemm, or"),
    ("engine_reads_numbers_of_rows", ENGINE_EXPERTS | {"moe_max_tokens_per_rank": 9}, 1, "leave --moe-max-tokens-per-rank out, or set"),
    ("fp8_takes_linear_widths", ENGINE | {"fp8_format": "hybrid", "ffn_hidden_size": 48, "tensor_model_parallel_size": 2}, 2,
     "multiples of 16; a rank has of --ffn-hidden-size 24; change these widths"),
    ("fp8_takes_expert_widths", ENGINE_EXPERTS | {"fp8_format": "e4m3", "moe_ffn_hidden_size": 40}, 1, "has of --moe-ffn-hidden-size 40"),
    ("some_data", {"data_path": ()}, 1, "there is nothing to train on; give --data-path, or set --data-source to sudoku"),
    ("blend_alternates", {"data_path": ("0.5", "a", "b")}, 1, "weights and paths must alternate"),
    ("columns_are_pairs", {"data_columns": ("messages=x", "prompt")}, 1, "prompt is not OURS=THEIRS"),
    ("split_is_three_shares", {"split": "90,10"}, 1, "write three numbers, none negative and the first positive, such as 969,30,1"),
    ("evaluation_has_data", {"split": "99,0,1", "eval_interval": 5}, 1, "no share of the data is for validation; set --split to 969,30,1"),
    ("tokenizer_is_named", {"tokenizer_type": "HuggingFaceTokenizer"}, 1, "files are not named; give --tokenizer-model DIR"),
    ("lr_falls", {"min_lr": 1.0}, 1, "the learning rate cannot decay upwards; set --min-lr to at most 0.0001"),
    ("one_warmup", {"lr_warmup_iters": 5, "lr_warmup_fraction": 0.1}, 1, "both say how long the warm-up is"),
    ("wsd_has_a_decay", {"lr_decay_style": "WSD"}, 1, "nothing says how long the decay at the end is; set --lr-wsd-decay-iters"),
    ("course_fits", {"lr_warmup_iters": 100}, 1, "a warm-up of 100 steps leaves less than 1 of 100 for the decay; set --lr"),
    ("course_fits", {"lr_warmup_iters": 5, "lr_decay_iters": 4}, 1, "a warm-up of 5 steps leaves less than 1 of 4"),
    ("course_fits", WSD | {"lr_warmup_iters": 41}, 1, "leaves less than 60 of 100 for the decay; set --lr-warmup-iters to at most 40"),
    ("course_fits", WSD | {"lr_warmup_fraction": 0.402}, 1, "a warm-up of 41 steps leaves less than 60"),
    ("course_fits", WSD | {"lr_wsd_decay_iters": 101}, 1, "a decay of 101 steps does not fit into 100; set --lr-wsd-decay-iters below 100"),
    ("kernels_need_ranks", DEEPEP | {"expert_model_parallel_size": 1}, 1, "there is one; set --expert-model-parallel-size above 1"),
    ("kernels_send_whole_experts", DEEPEP | {"expert_tensor_parallel_size": 2}, 4, "set --expert-tensor-parallel-size 1, or --moe-token"),
    ("kernels_move_bf16", DEEPEP | {"bf16": False}, 2, "its kernels move bf16 rows; set --bf16, or --moe-token-dispatcher-type alltoall"),
    ("kernels_move_aligned_rows", DEEPEP | {"hidden_size": 60}, 2, "pieces of 16 bytes, 8 numbers; set --hidden-size to a multiple of 8"),
    ("kernels_run_on_cuda", DEEPEP | {"device": "cpu"}, 2, "run on CUDA devices; set --device cuda, or --moe-token"),
    ("hybridep_cannot_repeat", DEEPEP | {"moe_token_dispatcher_type": "hybridep", "recompute_granularity": "full",
     "moe_recompute_replay": False}, 2, "set --moe-recompute-replay, or leave --recompute-granularity out"),
    ("hybridep_cannot_repeat", DEEPEP | {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep",
     "recompute_granularity": "full", "moe_recompute_replay": False}, 2, "set --moe-recompute-replay, or leave --recompute-granularity"),
    ("max_tokens_is_for_some_dispatchers", DEEPEP | {"moe_token_dispatcher_type": "hybridep", "moe_max_tokens_per_rank": 9}, 2,
     "numbers of rows in any case; leave the bound out, or set --moe-token-dispatcher-type to alltoall or deepep"),
    ("max_tokens_needs_grouped_products", {"moe_max_tokens_per_rank": 9}, 1, "leave it out, or set --bf16 and --moe-grouped-gemm"),
    ("streams_to_recompute", {"recompute_granularity": "selective", "recompute_modules": ("mhc",)}, 1, "set --enable-mhc-connections, or"),
    ("linear_heads", {"linear_num_key_heads": 5, "layer_types": LINEAR}, 1, "32 value heads do not share 5 key heads evenly"),
    ("linear_heads_over_ranks", {"layer_types": LINEAR, "linear_num_key_heads": 1, "tensor_model_parallel_size": 2}, 2, "1 key heads of"),
    ("export_is_expressible", {"enable_mhc_connections": True, "save_hf": "h"}, 1,
     "the residual streams of mHC, or layers of an extension; leave --save-hf out"),
    ("export_is_expressible", {"layer_types": LINEAR, "save_hf": "h"}, 1, "with linear layers"),
    ("gated_delta_kernels", {"gdn_kernel_backend": "fla"}, 1, "compute in bf16; set --gdn-kernel-backend torch"),
    ("gated_delta_kernels", {"gdn_kernel_backend": "fla", "bf16": True, "device": "cpu"}, 1, "need a CUDA device"),
    ("gated_delta_kernels", {"gdn_kernel_backend": "fla", "bf16": True, "deterministic_mode": True}, 1, "another order from run to run"),
    ("expert_bias_is_not_exported", {"moe_router_enable_expert_bias": True, "save_hf": "h"}, 1, "has no place for the bias"),
    ("selective_names_modules", {"recompute_granularity": "selective"}, 1, "nothing is named to compute again; set --recompute-modules"),
    ("snapshot_needs_cuda", {"device": "cpu", "memory_snapshot_path": "m"}, 1, "leave out --memory-snapshot-path"),
    ("profile_has_steps", {"profile": True, "run_dir": "r", "profile_step_start": 12}, 1, "set --profile-step-end to at least 13"),
    ("profile_is_reached", {"profile": True, "run_dir": "r", "train_iters": 10}, 1, "set --profile-step-start below 10"),
    ("profile_has_a_folder", {"profile": True}, 1, "and there is none; give --run-dir or --save"),
    ("stages_hold_the_layers", PP2 | {"pipeline_model_parallel_size": 4}, 4, "6 layers do not divide over 4 pipeline ranks; use"),
    ("stages_hold_the_layers", PP2 | {"pipeline_model_parallel_layout": "Et*6|tL"}, 2, "this is one more; take it out, or raise"),
    ("groups_fill_the_stages", PP2 | {"num_layers_per_virtual_pipeline_stage": 1, "global_batch_size": 1}, 2, "1 microbatches in groups"),
    ("groups_fill_the_stages", PP2 | {"num_layers_per_virtual_pipeline_stage": 1, "microbatch_group_size_per_virtual_pipeline_stage": 23},
     2, "the last group has only 1. Every group"),
    ("exports_need_a_whole_model", PP2 | {"save_hf": "s"}, 2, "no rank of a pipeline has the whole model to export; leave --save-hf out"),
    ("best_is_measured", {"save": "s", "save_best": True}, 1, "without evaluation no checkpoint is the best; set --eval-interval"),
    ("adapters_go_somewhere", LORA | {"lora_targets": ()}, 1, "nothing is named that adapters are put beside; set --lora-targets"),
    ("adapters_go_somewhere", LORA | {"lora_targets": ("mlp", "mlp")}, 1, "a target is named twice; set --lora-targets mlp"),
    ("adapted_parts_run", LORA | {"lora_targets": ("mlp", "self_conditioning"), "self_conditioning_prob": 0.0}, 1, "is never run"),
    ("dropout_has_a_place", LORA | {"lora_targets": ("mlp", "experts"), "lora_dropout": 0.1}, 1, "what reaches experts has no dropout"),
    ("adapters_without_mtp", LORA | {"mtp_num_layers": 1}, 1, "leave out --mtp-num-layers or --lora-rank"),
    ("adapters_without_moving_bias", LORA | {"moe_router_enable_expert_bias": True}, 1, "a model that stays as it is"),
    ("temperature_falls", {"t_min": 0.9}, 1, "the temperature cannot rise over the steps; set --t-min to at most 0.8"),
]  # fmt: skip


def test_every_rule_has_a_case():
    assert {entry.name for entry in CHECKS} == {name for name, *_ in CASES}


@pytest.mark.parametrize(("name", "changes", "world_size", "text"), CASES, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(CASES)])
def test_rule(name, changes, world_size, text):
    run = GOOD.with_values(**changes)
    problems = validate(run, world_size=world_size)
    assert len(problems) == 1, format_problems(problems)
    (problem,) = problems
    assert text in str(problem)
    (fields,) = {entry.fields for entry in CHECKS if entry.name == name}
    assert list(problem.flags) == [flag_of(f) if f in FLAGS else "world size" for f in fields]
    if problem.fix:
        assert validate(run.with_values(**problem.fix), world_size=world_size) == []


class TestRanges:
    def test_every_number_has_one(self):
        numbers = {f for f, (group, item) in FLAGS.items() if group != "source" and item.kind in (int, float) and not item.choices}
        assert set(RANGES) == numbers

    @pytest.mark.parametrize("name", RANGES)
    def test_below_and_outside(self, name):
        allowed, several = RANGES[name], FLAGS[name][1].several
        outside = [allowed.low - 1] + [allowed.low] * allowed.low_open + [allowed.high + 1, allowed.high] * allowed.high_open
        for value in [*outside, float("nan"), float("inf")]:
            run = GOOD.with_values(**{name: (3, value) if several else value})
            (problem,) = [p for p in validate(run) if str(allowed) in p.why]
            assert problem.flags.keys() == {flag_of(name)}
            mended = validate(run.with_values(**problem.fix))
            assert not [p for p in mended if str(allowed) in p.why and flag_of(name) in p.flags]

    def test_prints_its_ends(self):
        run = GOOD.with_values(adam_beta2=1.0, lr=0.0, train_iters=0)
        assert [str(problem) for problem in validate(run)] == [
            "--train-iters 0: must be at least 1; leave it out.",
            "--lr 0.0: must be above 0; set --lr to 0.0001, for example.",
            "--adam-beta2 1.0: must be at least 0 and below 1; set --adam-beta2 to 0.999, for example.",
        ]

    def test_zero_does_not_reach_the_rules(self):
        zeros = {f: 0 for f in RANGES if FLAGS[f][1].kind is int and not FLAGS[f][1].several}
        assert len(validate(GOOD.with_values(**zeros))) >= sum(RANGES[f].low == 1 for f in zeros)


# Condition -> settings under which it does not hold, and under which it does.
CONDITIONS = {
    "--objective block-diffusion": ({"objective": "ar"}, {"objective": "block-diffusion"}),
    "--encoder-loss-weight above 0": ({"encoder_loss_weight": 0.0}, {"encoder_loss_weight": 1.0}),
    "--self-conditioning-prob below 1": ({"self_conditioning_prob": 1.0}, {"self_conditioning_prob": 0.9}),
    "--data-source auto, chat or indexed": ({"data_source": "sudoku"}, {"data_source": "indexed"}),
    "--data-source auto or chat": ({"data_source": "indexed"}, {"data_source": "chat"}),
    "--data-source auto, chat or sudoku": ({"data_source": "indexed"}, {"data_source": "chat"}),
    "--data-source sudoku": ({}, {"data_source": "sudoku"}),
    "--tokenizer-type HuggingFaceTokenizer": ({}, {"tokenizer_type": "HuggingFaceTokenizer"}),
    "--packing": ({}, {"packing": True}),
    "--cuda-graph-impl local": ({}, GRAPHS),
    "--eval-interval": ({}, {"eval_interval": 10}),
    "--eval-generations": ({}, {"eval_generations": 4}),
    "a router that is trained": ({"freeze_router": True}, {"freeze_router": False}),
    "--moe-token-dispatcher-type flex": ({}, DEEPEP | {"moe_token_dispatcher_type": "flex"}),
    "--lora-rank": ({}, {"lora_rank": 4}),
    "weights that are trained (--lora-rank freezes all)": ({"lora_rank": 4}, {"lora_rank": None}),
    "--moe-router-enable-expert-bias": ({}, {"moe_router_enable_expert_bias": True}),
    "--bf16": ({}, {"bf16": True}),
    "--transformer-impl transformer_engine": ({}, ENGINE),
    "--fp8-format": (ENGINE, {"fp8_format": "hybrid"}),
    "--recompute-granularity": ({}, {"recompute_granularity": "full"}),
    "--recompute-granularity selective": ({"recompute_granularity": "full"}, {"recompute_granularity": "selective"}),
    "a linear layer in --layer-types": ({}, {"layer_types": LINEAR}),
    "--mtp-num-layers": ({}, {"mtp_num_layers": 1}),
    "--enable-mhc-connections": ({}, {"enable_mhc_connections": True}),
    "mhc among --recompute-modules": ({}, {"recompute_modules": ("mhc",)}),
    "--profile": ({}, {"profile": True}),
    "canvases that are decoded twice (--self-conditioning-prob)": ({"self_conditioning_prob": 0.0}, {"self_conditioning_prob": 0.5}),
    "an --lr-decay-style that decays": ({"lr_decay_style": "constant"}, {"lr_decay_style": "linear"}),
    "--lr-decay-style WSD": ({}, {"lr_decay_style": "WSD"}),
    "--use-distributed-optimizer": ({}, {"use_distributed_optimizer": True}),
    "--tensor-model-parallel-size above 1": ({}, {"tensor_model_parallel_size": 2}),
    "--pipeline-model-parallel-size above 1": ({}, {"pipeline_model_parallel_size": 2}),
    "stages of equal size (--pipeline-model-parallel-layout says what they are)":
        ({"pipeline_model_parallel_layout": "E"}, {"pipeline_model_parallel_layout": None}),
    "--context-parallel-size above 1": ({}, {"context_parallel_size": 2}),
    "--log-throughput": ({}, {"log_throughput": True}),
    "--wandb-project": ({}, {"wandb_project": "p"}),
    "--load": ({}, {"load": "l"}),
    "--save": ({}, {"save": "s"}),
    "--save-hf": ({}, {"save_hf": "h"}),
}


def other_value(name: str) -> typing.Any:
    """Some value of the field that is not its default."""
    item = FLAGS[name][1]
    if item.choices:
        value = next((choice for choice in item.choices if choice != item.default), "that of an extension")
    elif item.kind is bool:
        return not item.default
    elif item.kind is str:
        value = "a=b"
    else:
        value = (item.default or 0) + item.kind(1 if item.kind is int else 1e-5)
    return (value,) if item.several else value


@pytest.mark.parametrize(("needs", "name"), [(needs, name) for needs in NEEDS for name in needs.fields], ids=lambda value: str(value)[:30])
def test_a_setting_without_effect_is_a_problem(needs, name):
    broken, mended = CONDITIONS[needs.condition]
    run = GOOD.with_values(**(broken | {name: other_value(name)}))
    why = f"has no effect without {needs.condition}"
    (problem,) = [p for p in validate(run) if p.why == why and flag_of(name) in p.flags]
    assert problem.remedy == "add that, or leave the flag out"
    for fix in (mended, problem.fix):
        assert not [p for p in validate(run.with_values(**fix)) if p.why == why and flag_of(name) in p.flags]


def test_validate_reports_everything_at_once():
    run = GOOD.with_values(micro_batch_size=5, moe_router_topk=9, save_interval=3, lr=-1.0)
    text = format_problems(validate(run))
    assert text.startswith("4 settings cannot work:\n  --lr -1.0: must be above 0")
    for part in ("--save-interval 3: has no effect without --save", "9 of 8 experts", "microbatches of 5"):
        assert part in text
    assert len(text.splitlines()) == 5


def test_format_problems_of_one():
    assert format_problems([Problem({"--a": 1, "--b": 2}, "a rule", "set --a to 2")]) == (
        "1 setting cannot work:\n  --a 1, --b 2: a rule; set --a to 2."
    )


class TestDerivedValues:
    def test_canvas_length_at(self):
        config = ObjectiveConfig(canvas_length_schedule="0:64,10:128, 30:256")
        assert [config.canvas_length_at(n, 7) for n in (0, 9, 10, 29, 30, 999)] == [64, 64, 128, 128, 256, 256]
        assert ObjectiveConfig().canvas_length_at(5, 7) == 7
        assert (config.longest_canvas(7), ObjectiveConfig().longest_canvas(7)) == (256, 7)
        causal = ObjectiveConfig(objective="ar", canvas_length_schedule="0:64", canvases_scored="all")
        assert (causal.canvas_length_at(5, 7), causal.longest_canvas(7), causal.scores_all_canvases) == (1, 1, False)

    @pytest.mark.parametrize("schedule", ["0", "0:", "0:0", "0:8,0:9", "0:8,5:9,4:1", "1:8", "a:8", "0:-8", "0:8,"])
    def test_canvas_lengths_refuses(self, schedule):
        with pytest.raises(ValueError):
            ObjectiveConfig(canvas_length_schedule=schedule).canvas_lengths()

    def test_blend(self):
        assert DataConfig(data_path=("a", "b")).blend() == ((1.0, "a"), (1.0, "b"))
        assert DataConfig(data_path=("0.3", "a", "7", "b")).blend() == ((0.3, "a"), (7.0, "b"))
        assert DataConfig().blend() == ()

    @pytest.mark.parametrize("path", [("0.3",), ("0.3", "a", "b"), ("a", "0.3"), ("0.3", "0.7"), ("0", "a"), ("-1", "a")])
    def test_blend_refuses(self, path):
        with pytest.raises(ValueError):
            DataConfig(data_path=path).blend()

    def test_split_shares(self):
        assert DataConfig(split="3,1,0").split_shares() == (0.75, 0.25, 0.0)

    @pytest.mark.parametrize("split", ["", "1,2", "1,2,3,4", "a,b,c", "0,1,1", "1,-1,1"])
    def test_split_shares_refuses(self, split):
        with pytest.raises(ValueError):
            DataConfig(split=split).split_shares()

    def test_data_parallel_size(self):
        run = GOOD.with_values(tensor_model_parallel_size=2, context_parallel_size=3, pipeline_model_parallel_size=4)
        assert run.parallel.model_parallel_size == 24
        assert run.parallel.data_parallel_size(48) == 2

    def test_numbers_to_choose_from(self):
        assert divisors(12) == [1, 2, 3, 4, 6, 12]
        assert listed(list(range(1, 12))) == "1, 2, 3, 4, ..., 9, 10, 11"


def test_with_values_refuses_a_field_that_is_not_there():
    with pytest.raises(KeyError):
        GOOD.with_values(learning_rate=1.0)
    assert isinstance(GOOD.with_values(lr=1.0), RunConfig)
