"""The model's configuration: layer patterns, presets, and the transformers format, held to transformers' own class."""

import copy
import json
import re
from dataclasses import replace
from importlib.metadata import version

import pytest

from megatron_dllm.config import PRESETS, ModelConfig
from megatron_dllm.config.model import read_layer_types, repeat_layer_types, write_layer_types

RELEASE, TOY = PRESETS["diffusiongemma-26b-a4b"], PRESETS["toy"]

# The released file's settings (docs/model.md section 1), among keys that say nothing of the text model.
RELEASED_JSON = {
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "boi_token_id": 255999,
    "canvas_length": 256,
    "dtype": "bfloat16",
    "eos_token_id": [1, 106],
    "initializer_range": 0.02,
    "model_type": "diffusion_gemma",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2816,
        "initializer_range": 0.02,
        "intermediate_size": 2112,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "max_position_embeddings": 262144,
        "model_type": "diffusion_gemma_text",
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "top_k_experts": 8,
        "use_bidirectional_attention": "vision",
        "vocab_size": 262144,
    },
    "tie_word_embeddings": True,
    "vision_config": {"model_type": "gemma4_vision", "hidden_size": 1152},
}
# A model of which no two settings are equal, so that none can stand for another.
DISTINCT = ModelConfig(
    num_layers=5,
    hidden_size=48,
    ffn_hidden_size=40,
    num_attention_heads=12,
    num_query_groups=6,
    kv_channels=14,
    num_global_query_groups=3,
    global_kv_channels=26,
    window_size=17,
    layer_types=("sliding", "full", "sliding", "full", "full"),
    num_experts=9,
    moe_router_topk=4,
    moe_ffn_hidden_size=22,
    vocab_size=101,
    canvas_length=11,
    final_logit_softcapping=21.0,
    norm_epsilon=3e-6,
    rotary_base=111.0,
    rotary_base_global=2222.0,
    rotary_percent_global=0.5,
    max_position_embeddings=333,
    init_method_std=0.07,
    bos_token_id=8,
    eos_token_id=(7, 10),
    pad_token_id=13,
)
oracle = pytest.mark.skipif(
    tuple(map(int, version("transformers").split(".")[:2])) < (5, 23), reason="DiffusionGemma needs transformers 5.23 or newer"
)


def with_text(source: dict, **changes) -> dict:
    """`source` with keys of its text_config set, or dropped where None is given as ..."""
    changed = copy.deepcopy(source)
    for key, value in changes.items():
        if value is ...:
            del changed["text_config"][key]
        else:
            changed["text_config"][key] = value
    return changed


class TestLayerTypes:
    @pytest.mark.parametrize(
        ("text", "types"),
        [
            ("full", ("full",)),
            ("sliding*2,full", ("sliding", "sliding", "full")),
            (" sliding , full * 2", ("sliding", "full", "full")),
        ],
    )
    def test_read(self, text, types):
        assert read_layer_types(text) == types

    @pytest.mark.parametrize("text", ["", "full*0", "full*", "slide", "full,,full", "full 2"])
    def test_read_refuses(self, text):
        with pytest.raises(ValueError, match="none of sliding, full, linear"):
            read_layer_types(text)

    @pytest.mark.parametrize(
        ("types", "text"),
        [
            (RELEASE.layer_types, "sliding*5,full"),
            (("full",) * 4, "full"),
            (("sliding", "full", "sliding", "full"), "sliding,full"),
            (("sliding", "full", "sliding"), "sliding,full,sliding"),
        ],
    )
    def test_write_is_the_shortest(self, types, text):
        assert write_layer_types(types) == text
        assert repeat_layer_types(read_layer_types(text), len(types)) == types

    def test_repeat_cuts_the_last_round_and_leaves_a_long_pattern(self):
        assert repeat_layer_types(("sliding", "full"), 3) == ("sliding", "full", "sliding")
        assert repeat_layer_types(("sliding", "full"), 1) == ("sliding", "full")


def test_layers_of_the_two_kinds_have_their_own_heads():
    assert [layer for layer in range(30) if RELEASE.is_full(layer)] == [5, 11, 17, 23, 29]
    assert (RELEASE.head_dim(4), RELEASE.kv_heads(4)) == (256, 8)
    assert (RELEASE.head_dim(5), RELEASE.kv_heads(5)) == (512, 2)
    assert RELEASE.fill_token_id == 1


class TestFromTransformers:
    def test_reads_the_released_file(self):
        assert ModelConfig.from_transformers(RELEASED_JSON) == RELEASE

    def test_reads_a_config_for_each_layer(self):
        overrides = {"head_dim": 512, "num_key_value_heads": 2}
        per_layer = {f"{layer:02}": overrides for layer in (5, 11, 17, 23, 29)}
        newer = with_text(RELEASED_JSON, global_head_dim=..., num_global_key_value_heads=..., per_layer_config=per_layer)
        assert ModelConfig.from_transformers(newer) == RELEASE
        assert ModelConfig.from_transformers(with_text(RELEASED_JSON, per_layer_config=per_layer)) == RELEASE

    def test_full_layers_have_the_key_heads_of_sliding_ones_where_the_file_says_no_others(self):
        assert ModelConfig.from_transformers(with_text(RELEASED_JSON, num_global_key_value_heads=None)).num_global_query_groups == 8

    def test_takes_one_end_token_from_the_text_config(self):
        source = {key: value for key, value in RELEASED_JSON.items() if key != "eos_token_id"}
        assert ModelConfig.from_transformers(source).eos_token_id == (1,)

    @pytest.mark.parametrize(
        ("changes", "messages"),
        [
            ({"hidden_size": ..., "rope_parameters": ...}, ["text_config.hidden_size", "text_config.rope_parameters", "missing"]),
            ({"global_head_dim": ...}, ["global_head_dim", "per_layer_config", "head_dim of full layers"]),
            ({"num_experts": None}, ["text_config.num_experts missing"]),
            ({"final_logit_softcapping": None}, ["text_config.final_logit_softcapping missing"]),
            ({"hidden_size": "2816"}, ["text_config.hidden_size is '2816'", "number"]),
            ({"hidden_activation": "silu"}, ["hidden_activation is 'silu'", "gelu_pytorch_tanh"]),
            ({"use_bidirectional_attention": "all"}, ["use_bidirectional_attention is 'all'"]),
            ({"attention_bias": True}, ["attention_bias is True"]),
            ({"layer_types": ["full_attention"] * 29}, ["29 entries", "30"]),
            ({"layer_types": ["linear_attention"] * 30}, ["linear_attention", "sliding_attention"]),
            ({"per_layer_config": {"05": {"head_dim": 300}}}, ["full layers different head_dim: [256, 300]"]),
            (
                {"per_layer_config": {str(n): {"head_dim": 128, "num_key_value_heads": 2} for n in (5, 11, 17, 23, 29)}},
                ["global_head_dim is 512", "head_dim 128"],
            ),
            (
                {"per_layer_config": {str(n): {"head_dim": 512, "num_key_value_heads": 4} for n in (5, 11, 17, 23, 29)}},
                ["num_global_key_value_heads is 2", "num_key_value_heads 4"],
            ),
            ({"per_layer_config": {"4": {"head_dim": 512}}}, ["head_dim in sliding layers [4]"]),
            ({"per_layer_config": {"30": {"head_dim": 512}}}, ["layer '30'", "0 to 29"]),
            ({"per_layer_config": {"5": {"intermediate_size": 5}}}, ["intermediate_size in layer 5"]),
            (
                {"rope_parameters": {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "default"}}},
                ["'yarn'", "proportional"],
            ),
            (
                {"rope_parameters": {"full_attention": {"rope_type": "proportional"}, "sliding_attention": {"rope_type": "default"}}},
                ["sliding_attention.rope_theta, full_attention.rope_theta, full_attention.partial_rotary_factor missing"],
            ),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_refuses(self, changes, messages):
        with pytest.raises(ValueError) as raised:
            ModelConfig.from_transformers(with_text(RELEASED_JSON, **changes))
        for message in messages:
            assert message in str(raised.value)

    @pytest.mark.parametrize("source", [{}, {"model_type": "gemma4", "text_config": {}}, {"model_type": "diffusion_gemma"}])
    def test_refuses_other_models(self, source):
        with pytest.raises(ValueError, match="take a DiffusionGemma configuration, which has model_type 'diffusion_gemma'"):
            ModelConfig.from_transformers(source)

    def test_refuses_untied_embeddings(self):
        with pytest.raises(ValueError, match="tie_word_embeddings is False, must be True"):
            ModelConfig.from_transformers({**RELEASED_JSON, "tie_word_embeddings": False})


class TestToTransformers:
    def test_returns_the_base_where_it_is_this_model(self):
        written = RELEASE.to_transformers(RELEASED_JSON)
        assert written == RELEASED_JSON
        assert written["text_config"] is not RELEASED_JSON["text_config"]

    @pytest.mark.parametrize("form", ["global keys", "per layer", "both"])
    def test_keeps_what_else_the_base_holds_and_its_form(self, form):
        base = copy.deepcopy(RELEASED_JSON)
        if form != "global keys":
            overrides = {"head_dim": 512, "num_key_value_heads": 2}
            base["text_config"]["per_layer_config"] = {str(layer): overrides for layer in (5, 11, 17, 23, 29)}
        if form == "per layer":
            del base["text_config"]["global_head_dim"], base["text_config"]["num_global_key_value_heads"]
        before = copy.deepcopy(base)
        written = DISTINCT.to_transformers(base)
        assert base == before
        assert ModelConfig.from_transformers(written) == DISTINCT
        assert written.keys() == base.keys()
        assert written["text_config"].keys() == base["text_config"].keys()
        assert written["vision_config"] == base["vision_config"]
        assert written["boi_token_id"] == 255999
        assert written["text_config"]["dtype"] == "bfloat16"

    @pytest.mark.parametrize("model", [RELEASE, TOY, DISTINCT], ids=["release", "toy", "distinct"])
    def test_from_transformers_inverts_it(self, model):
        assert ModelConfig.from_transformers(json.loads(json.dumps(model.to_transformers()))) == model

    @pytest.mark.parametrize("field", [f for f in vars(DISTINCT) if not re.search("num_layers|layer_types|mhc|linear", f)])
    def test_writes_every_field(self, field):
        """A change of any one field survives the way there and back, over the file of the model before the change."""
        value = getattr(DISTINCT, field)
        changed = replace(DISTINCT, **{field: (*value, 1) if isinstance(value, tuple) else value * 2})
        assert ModelConfig.from_transformers(changed.to_transformers(DISTINCT.to_transformers())) == changed


@oracle
class TestAgainstTransformers:
    def settings(self, config) -> dict:
        """What transformers itself makes of a config, as it writes it."""
        return json.loads(json.dumps(config.to_dict()))

    @pytest.mark.parametrize("model", [RELEASE, TOY, DISTINCT], ids=["release", "toy", "distinct"])
    def test_transformers_reads_what_we_write(self, model):
        from transformers import DiffusionGemmaConfig

        config = DiffusionGemmaConfig(**model.to_transformers())
        text = config.text_config
        for layer in range(model.num_layers):
            heads = text.per_layer_config[layer].num_key_value_heads
            assert (text.per_layer_config[layer].head_dim, heads) == (model.head_dim(layer), model.kv_heads(layer))
        assert text.final_logit_softcapping == model.final_logit_softcapping
        assert text.rope_parameters["full_attention"]["partial_rotary_factor"] == model.rotary_percent_global
        assert (text.top_k_experts, text.moe_intermediate_size) == (model.moe_router_topk, model.moe_ffn_hidden_size)
        assert (text.sliding_window, config.canvas_length, config.eos_token_id) == (
            model.window_size,
            model.canvas_length,
            list(model.eos_token_id),
        )
        assert ModelConfig.from_transformers(self.settings(config)) == model

    def test_round_trip_of_what_transformers_writes(self):
        from transformers import DiffusionGemmaConfig

        original = DiffusionGemmaConfig(
            text_config={
                "vocab_size": 300, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 7, "num_attention_heads": 6,
                "num_key_value_heads": 3, "head_dim": 8, "global_head_dim": 10, "num_global_key_value_heads": 2, "sliding_window": 9,
                "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 12, "rms_norm_eps": 1e-5,
                "use_bidirectional_attention": "vision",
            },
            canvas_length=12,
        )  # fmt: skip
        written = self.settings(original)
        model = ModelConfig.from_transformers(written)
        assert model.layer_types == ("sliding",) * 5 + ("full",) * 2
        assert model.to_transformers(written) == written
        reloaded = self.settings(DiffusionGemmaConfig(**replace(model, window_size=9).to_transformers(written)))
        assert reloaded == written
        changed = self.settings(DiffusionGemmaConfig(**replace(model, hidden_size=36).to_transformers(written)))
        assert changed["text_config"]["hidden_size"] == 36
        assert changed["text_config"]["per_layer_config"] == written["text_config"]["per_layer_config"]
        assert changed["vision_config"] == written["vision_config"]
