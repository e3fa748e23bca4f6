"""A transformers config.json of DiffusionGemma as a ModelConfig, and back.

The defaults of the transformers class are those of no released model, so nothing is taken from them: what the model's shape depends on
must stand in the file. Full layers differ from sliding ones in head size and key heads; the released file says so by `global_head_dim`
and `num_global_key_value_heads`, newer versions of transformers by a `per_layer_config` for each full layer. Both are read.
"""

import copy
from typing import Any

from megatron_dllm.config.model import ModelConfig

MODEL_TYPE = "diffusion_gemma"
ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"
LAYER_NAMES = {"sliding": "sliding_attention", "full": "full_attention"}

# ModelConfig field -> key of text_config.
TEXT_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "window_size": "sliding_window",
    "num_experts": "num_experts",
    "moe_router_topk": "top_k_experts",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "vocab_size": "vocab_size",
    "norm_epsilon": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "init_method_std": "initializer_range",
    "bos_token_id": "bos_token_id",
    "pad_token_id": "pad_token_id",
}
# Settings of text_config that this model has in one form only.
FIXED = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "attention_dropout": (0, None),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": ("vision", None),
    "attention_k_eq_v": (True,),
}
# transformers builds a vision tower in any case; a model that never had one is given the smallest.
SMALLEST_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "position_embedding_size": 16,
}


def read_config(source: dict[str, Any]) -> ModelConfig:
    """The model that `source`, the content of a config.json, describes.

    ValueError names the key: one that is missing, has a value that this model cannot have, or contradicts another.
    """
    text = source.get("text_config")
    if source.get("model_type", MODEL_TYPE) != MODEL_TYPE or not isinstance(text, dict):
        raise ValueError(
            f"config.json: model_type is {source.get('model_type')!r} and text_config "
            f"{'is there' if isinstance(text, dict) else 'is missing'}; take a DiffusionGemma "
            f"configuration, which has model_type {MODEL_TYPE!r} and a text_config"
        )
    _check_fixed(source, text)
    values = {field: text.get(key) for field, key in TEXT_KEYS.items()}
    missing = [f"text_config.{TEXT_KEYS[field]}" for field, value in values.items() if value is None]
    eos = source.get("eos_token_id", text.get("eos_token_id"))
    missing += [f"text_config.{key}" for key in ("layer_types", "rope_parameters") if not text.get(key)]
    missing += ["canvas_length"] if source.get("canvas_length") is None else []
    missing += ["eos_token_id"] if eos in (None, []) else []
    # A constant of the transformers class, which its to_dict leaves out.
    softcapping = text.get("final_logit_softcapping", 30.0)
    missing += ["text_config.final_logit_softcapping"] if softcapping is None else []
    if missing:
        raise ValueError(f"config.json: {', '.join(missing)} missing; add them (the defaults of transformers are another model's, so none "
                         "is assumed)")
    wrong = [f"text_config.{TEXT_KEYS[f]} is {v!r}" for f, v in values.items() if isinstance(v, bool) or not isinstance(v, int | float)]
    if wrong:
        raise ValueError(f"config.json: {', '.join(wrong)}; write numbers")
    values["layer_types"] = _read_layer_types(text["layer_types"], values["num_layers"])
    values["global_kv_channels"] = _full_layer_value(text, values["layer_types"], "head_dim", "global_head_dim")
    values["num_global_query_groups"] = _full_layer_value(text, values["layer_types"], "num_key_value_heads", "num_global_key_value_heads")
    return ModelConfig(
        **values,
        **_read_rope(text["rope_parameters"]),
        canvas_length=source["canvas_length"],
        final_logit_softcapping=softcapping,
        eos_token_id=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
    )


def _check_fixed(source: dict[str, Any], text: dict[str, Any]) -> None:
    found = [(f"text_config.{key}", text[key], allowed) for key, allowed in FIXED.items() if key in text]
    found.append(("tie_word_embeddings", source.get("tie_word_embeddings", True), (True,)))
    wrong = [f"{name} is {value!r}, must be {' or '.join(map(repr, allowed))}" for name, value, allowed in found if value not in allowed]
    if wrong:
        raise ValueError(f"config.json: {'; '.join(wrong)}; this model has no other form: take another model")


def _read_layer_types(names: list[str], num_layers: int) -> tuple[str, ...]:
    ours = {theirs: name for name, theirs in LAYER_NAMES.items()}
    if unknown := sorted(set(names) - set(ours)):
        raise ValueError(f"config.json: text_config.layer_types has {', '.join(unknown)}; choose from {', '.join(ours)}")
    if len(names) != num_layers:
        raise ValueError(f"config.json: text_config.layer_types has {len(names)} entries for num_hidden_layers {num_layers}; give each "
                         "layer one")
    return tuple(ours[name] for name in names)


def _full_layer_value(text: dict[str, Any], layer_types: tuple[str, ...], key: str, global_key: str) -> int:
    """`key` as full layers have it: from `global_key`, per_layer_config, or both if they agree."""
    named = text.get(global_key)
    if "per_layer_config" not in text:
        if named is None and key == "head_dim":
            raise ValueError(f"config.json: text_config has neither {global_key} nor per_layer_config; give the {key} of full layers")
        return text[key] if named is None else named
    per_layer = _read_per_layer_config(text, layer_types)
    found = {per_layer[layer].get(key, text[key]) for layer, kind in enumerate(layer_types) if kind == "full"}
    wrong = [layer for layer, kind in enumerate(layer_types) if kind == "sliding" and per_layer[layer].get(key, text[key]) != text[key]]
    if wrong:
        raise ValueError(f"config.json: text_config.per_layer_config changes {key} in sliding layers {wrong}; leave it as it is there")
    if len(found) > 1:
        raise ValueError(f"config.json: text_config.per_layer_config gives full layers different {key}: {sorted(found)}; give them one")
    value = found.pop() if found else text[key]
    if named not in (None, value):
        raise ValueError(
            f"config.json: text_config.{global_key} is {named} and text_config.per_layer_config gives full layers {key} {value}; "
            "make them agree, or remove one"
        )
    return value


def _read_per_layer_config(text: dict[str, Any], layer_types: tuple[str, ...]) -> list[dict[str, Any]]:
    """The overrides of each layer; ValueError for a layer that is not there and for a setting that cannot differ by layer here."""
    overrides: list[dict[str, Any]] = [{} for _ in layer_types]
    for index, changes in (text["per_layer_config"] or {}).items():
        if not str(index).isdecimal() or int(index) >= len(layer_types):
            raise ValueError(f"config.json: text_config.per_layer_config has a layer {index!r}; remove it (layers are 0 to "
                             f"{len(layer_types) - 1})")
        others = [key for key in changes if key not in ("head_dim", "num_key_value_heads") and changes[key] != text.get(key)]
        if others:
            raise ValueError(f"config.json: text_config.per_layer_config changes {', '.join(others)} in layer {int(index)}; leave it as "
                             "in the others")
        overrides[int(index)] = changes
    return overrides


def _read_rope(parameters: dict[str, Any]) -> dict[str, float]:
    sliding, full = (parameters.get(name) or {} for name in LAYER_NAMES.values())
    forms = sliding.get("rope_type"), sliding.get("partial_rotary_factor", 1.0), full.get("rope_type")
    if forms != ("default", 1.0, "proportional"):
        raise ValueError(
            f"config.json: text_config.rope_parameters: sliding layers have rope_type {forms[0]!r} with partial_rotary_factor {forms[1]}, "
            f"full layers rope_type {forms[2]!r}; use 'default' with 1.0 and 'proportional'"
        )
    missing = [
        f"{name}.{key}"
        for name, found, key in (
            ("sliding_attention", sliding, "rope_theta"),
            ("full_attention", full, "rope_theta"),
            ("full_attention", full, "partial_rotary_factor"),
        )
        if found.get(key) is None
    ]
    if missing:
        raise ValueError(f"config.json: text_config.rope_parameters: {', '.join(missing)} missing; add them")
    return {
        "rotary_base": sliding["rope_theta"],
        "rotary_base_global": full["rope_theta"],
        "rotary_percent_global": full["partial_rotary_factor"],
    }


def check_expressible(model: ModelConfig) -> None:
    """ValueError that names what of `model` transformers' DiffusionGemma does not have."""
    lacking = ["the residual streams of --enable-mhc-connections"] if model.enable_mhc_connections else []
    lacking += [f"linear layers ({', '.join(map(str, linear))})"] if (linear := model.linear_layers) else []
    if lacking:
        raise ValueError(
            f"transformers has no DiffusionGemma with {' and '.join(lacking)}, so this model cannot be written in its format; keep its "
            "checkpoints as they are, and leave out --save-hf")


def write_config(model: ModelConfig, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of `model`. Every key of `base` that says nothing of the model is kept, and `base` itself where it is this model.

    Full layers are described in the form that `base` has, and as in the released file without one.
    """
    check_expressible(model)
    if base is not None and read_config(base) == model:
        return copy.deepcopy(base)
    config = copy.deepcopy(base) if base else {"architectures": [ARCHITECTURE], "vision_config": dict(SMALLEST_VISION)}
    config["model_type"] = MODEL_TYPE
    config["canvas_length"] = model.canvas_length
    config["tie_word_embeddings"] = True
    config["eos_token_id"] = list(model.eos_token_id)
    text = config.setdefault("text_config", {"model_type": f"{MODEL_TYPE}_text", "hidden_activation": "gelu_pytorch_tanh"})
    text.update({key: getattr(model, field) for field, key in TEXT_KEYS.items()})
    text["eos_token_id"] = list(model.eos_token_id)
    text["layer_types"] = [LAYER_NAMES[kind] for kind in model.layer_types]
    text["final_logit_softcapping"] = model.final_logit_softcapping
    text["tie_word_embeddings"] = True
    text["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": model.rotary_base},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": model.rotary_percent_global,
            "rope_theta": model.rotary_base_global,
        },
    }
    full = {"head_dim": model.global_kv_channels, "num_key_value_heads": model.num_global_query_groups}
    if "per_layer_config" in text:
        text["per_layer_config"] = {str(layer): dict(full) for layer in range(model.num_layers) if model.is_full(layer)}
    if "per_layer_config" not in text or "global_head_dim" in text:
        text["global_head_dim"] = full["head_dim"]
    if "per_layer_config" not in text or "num_global_key_value_heads" in text:
        text["num_global_key_value_heads"] = full["num_key_value_heads"]
    return config
