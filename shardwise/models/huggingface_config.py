"""The config.json of Hugging Face models and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise.models.config import ModelConfig
from shardwise.models.rotary import RopeScaling

_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}

# Our names of what their rope_scaling holds.
_SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_sequence",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
}


def config_from_huggingface(hf: Mapping[str, Any]) -> ModelConfig:
    """Our config, vocabulary included, from the content of a config.json.

    Raises:
        ValueError: a kind of model, or an option of one, that ours do not have.
    """
    kind = hf.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ValueError(f"model_type {kind!r} is not one of ours; it can be {', '.join(_ARCHITECTURES)}")
    return _from_gpt2(hf) if kind == "gpt2" else _from_llama(hf, str(kind))


def _needed(hf: Mapping[str, Any], name: str) -> Any:
    if hf.get(name) is None:
        raise ValueError(f"config.json has no {name}; add it")
    return hf[name]


def _require(hf: Mapping[str, Any], name: str, default: object, *possible: object) -> None:
    value = hf.get(name, default)
    if value not in possible:
        raise ValueError(f"config.json has {name} = {value!r}, which our models do not have; it can be {possible[0]!r}")


def _from_gpt2(hf: Mapping[str, Any]) -> ModelConfig:
    _require(hf, "activation_function", "gelu_new", "gelu_new", "gelu_pytorch_tanh")
    _require(hf, "scale_attn_weights", True, True)
    _require(hf, "scale_attn_by_inverse_layer_idx", False, False)
    _require(hf, "add_cross_attention", False, False)
    dropout = float(hf.get("resid_pdrop", 0.1))
    for name in ("embd_pdrop", "attn_pdrop"):
        _require(hf, name, 0.1, dropout)
    return ModelConfig(
        family="gpt2",
        layers=_needed(hf, "n_layer"),
        hidden=_needed(hf, "n_embd"),
        heads=_needed(hf, "n_head"),
        intermediate=hf.get("n_inner") or 0,
        sequence=_needed(hf, "n_positions"),
        vocabulary=_needed(hf, "vocab_size"),
        tied=hf.get("tie_word_embeddings", True),
        dropout=dropout,
        norm_eps=float(hf.get("layer_norm_epsilon", 1e-5)),
    )


def _from_llama(hf: Mapping[str, Any], kind: str) -> ModelConfig:
    _require(hf, "hidden_act", "silu", "silu")
    bias = bool(hf.get("mlp_bias", False))
    if kind in ("llama", "qwen3"):
        _require(hf, "attention_bias", False, bias)
    scaling, theta, sequence = _from_rope(hf)
    return ModelConfig(
        family="qwen" if kind in ("qwen2", "qwen3") else "mistral" if kind == "mistral" else "llama",
        layers=_needed(hf, "num_hidden_layers"),
        hidden=_needed(hf, "hidden_size"),
        heads=_needed(hf, "num_attention_heads"),
        head_size=hf.get("head_dim") or (128 if kind == "qwen3" else 0),
        kv_heads=hf.get("num_key_value_heads") or 0,
        intermediate=_needed(hf, "intermediate_size"),
        sequence=sequence,
        vocabulary=_needed(hf, "vocab_size"),
        tied=hf.get("tie_word_embeddings", False),
        bias=bias,
        qkv_bias=bias or kind == "qwen2",
        query_key_norm=kind == "qwen3",
        window=_from_window(hf, kind),
        dropout=float(hf.get("attention_dropout") or 0.0),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def _from_window(hf: Mapping[str, Any], kind: str) -> int:
    if kind == "mistral":
        return hf.get("sliding_window", 4096) or 0
    if kind == "llama" or not hf.get("use_sliding_window"):
        return 0
    if hf.get("max_window_layers", 28) >= _needed(hf, "num_hidden_layers"):
        return 0
    _require(hf, "max_window_layers", 28, 0)  # a window in some layers only
    return int(_needed(hf, "sliding_window"))


def _from_rope(hf: Mapping[str, Any]) -> tuple[RopeScaling, float, int]:
    """(scaling, theta, longest sequence), from rope_parameters (transformers 5) or rope_scaling and rope_theta."""
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 1e4)
    longest = int(_needed(hf, "max_position_embeddings"))
    _require({**hf, **rope}, "partial_rotary_factor", 1.0, 1.0, None)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeScaling(), theta, longest
    _require({"rope_type": kind}, "rope_type", kind, "default", "linear", "dynamic", "yarn", "llama3")
    _require(rope, "truncate", True, True, None)
    _require(rope, "mscale_all_dim", None, None, 0)
    values: dict[str, Any] = {ours: rope[name] for name, ours in _SCALING.items() if rope.get(name) is not None}
    if kind == "linear":
        values = {"factor": values.get("factor", 0)}
    elif kind == "dynamic":
        # Their limit is that before the extension.
        values = {"factor": values.get("factor", 0), "original_sequence": longest}
        longest = round(longest * values["factor"])
    else:
        values.setdefault("original_sequence", longest)
        longest = max(longest, values["original_sequence"])
    return RopeScaling(kind=kind, **values), theta, longest


def config_to_huggingface(
    config: ModelConfig, vocabulary: int, *, end: int | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """The content of a config.json under which transformers builds the same model.

    Dropout of the rotary families becomes `attention_dropout`, the only one that those have.

    Args:
        config: of the model.
        vocabulary: token ids, V.
        end: the token id that ends a text.
        dtype: of the stored parameters.

    Raises:
        ValueError: no architecture of transformers is the same model.
    """
    kind = _model_type(config)
    common = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": vocabulary,
        "tie_word_embeddings": config.tied,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": end,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    return common | (_to_gpt2(config) if kind == "gpt2" else _to_llama(config, kind))


def _model_type(config: ModelConfig) -> str:
    """Whose code computes the same, whatever the family is called."""
    if config.family == "gpt2":
        plain = config.heads * config.head_size == config.hidden and config.kv_heads == config.heads
        if plain and not config.window and not config.query_key_norm:
            return "gpt2"
        reason = "GPT-2 in transformers has heads of hidden / heads, no shared key heads, no window, no query_key_norm"
        raise ValueError(f"this gpt2 model cannot be written for transformers: {reason}")
    if config.query_key_norm:
        if config.qkv_bias:
            raise ValueError(
                "a model with qkv_bias and query_key_norm cannot be written for transformers: Qwen3 has one of them"
            )
        return "qwen3"
    if config.bias and config.window:
        raise ValueError(
            "a model with bias and window cannot be written for transformers: Llama has no window, Mistral no bias"
        )
    if config.qkv_bias and not config.bias:
        return "qwen2"
    return "mistral" if config.window else "llama"


def _to_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": config.layers,
        "n_embd": config.hidden,
        "n_head": config.heads,
        "n_inner": config.intermediate,
        "n_positions": config.sequence,
        "n_ctx": config.sequence,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }


def _to_llama(config: ModelConfig, kind: str) -> dict[str, Any]:
    scaling = config.rope_scaling
    values: dict[str, Any] = {
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": scaling.original_sequence if scaling.kind == "dynamic" else config.sequence,
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.dropout,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
    }
    if scaling.kind != "none":
        read = {name: getattr(scaling, ours) for name, ours in _SCALING.items() if getattr(scaling, ours)}
        if scaling.kind == "dynamic":
            del read["original_max_position_embeddings"]
        values["rope_scaling"] = {"rope_type": scaling.kind, **read}
    if kind == "llama":
        values |= {"attention_bias": config.bias, "mlp_bias": config.bias}
    elif kind == "qwen3":
        values |= {"attention_bias": False}
    if kind == "mistral":
        values |= {"sliding_window": config.window or None}
    elif kind in ("qwen2", "qwen3"):
        values |= {
            "use_sliding_window": config.window > 0,
            "sliding_window": config.window or None,
            "max_window_layers": 0,
        }
    return values
