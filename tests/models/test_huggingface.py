import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardwise.models import ModelConfig, RopeScaling, Transformer, build, load_pretrained, save_pretrained
from shardwise.models.huggingface import from_huggingface, to_huggingface
from shardwise.models.huggingface_config import config_from_huggingface, config_to_huggingface
from shardwise.models.rotary import frequencies
from tests.models import naive
from tests.models.cases import CONFIGS, SCALINGS, VOCABULARY, random_model, random_tokens, scaled

transformers = pytest.importorskip("transformers", reason="the extra hf")

ROTARY: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 24}
ROTARY |= {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": None,
}


def rope(kind: str, **values: object) -> dict[str, Any]:
    return ROTARY | {"hidden_size": 48, "rope_parameters": {"rope_type": kind, "rope_theta": 50.0, **values}}


# Their models by our own reading of their options.
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_layer": 2, "n_head": 5, "n_embd": 20, "n_positions": 24, "vocab_size": VOCABULARY}),
    "gpt2-untied": (
        "GPT2",
        {"n_layer": 1, "n_head": 2, "n_embd": 12, "n_positions": 24, "n_inner": 7, "vocab_size": VOCABULARY}
        | {"tie_word_embeddings": False},
    ),
    "llama": ("Llama", ROTARY | {"tie_word_embeddings": False, "rms_norm_eps": 1e-3}),
    "llama-tied": ("Llama", ROTARY | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", ROTARY | {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", ROTARY | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}),
    "qwen3": ("Qwen3", ROTARY | {"head_dim": 10}),
    "mistral": ("Mistral", ROTARY | {"sliding_window": 4}),
    "linear": ("Llama", rope("linear", factor=3.0)),
    "dynamic": ("Llama", rope("dynamic", factor=2.0) | {"max_position_embeddings": 8}),
    "yarn": ("Llama", rope("yarn", factor=2.0, original_max_position_embeddings=12, beta_fast=2.0, beta_slow=0.1)),
    "llama3": (
        "Llama",
        rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=2.5, original_max_position_embeddings=16),
    ),
}


def their_model(name: str, dtype: torch.dtype) -> nn.Module:
    """With every parameter far from its initial value."""
    kind, values = THEIRS[name]
    config = getattr(transformers, f"{kind}Config")(**values, attn_implementation="sdpa")
    model: nn.Module = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in key or ".ln_" in key else 0.3 * noise)
    return model.to(dtype).eval()


def in_float64(model: nn.Module, config: ModelConfig) -> None:
    """Their rotary models compute norms and angles in float32 whatever the parameters are; these compute in float64."""

    def rms(module: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: naive.rms(x, module.weight, module.variance_epsilon)

    def angles(x: Tensor, position_ids: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        length = int(position_ids.max()) + 1
        values = [
            naive.frequency(pair, config.head_size, config.rope_theta, config.rope_scaling, length)
            for pair in range(config.head_size // 2)
        ]
        turned = position_ids[..., None].double() * torch.tensor(values + values, dtype=torch.float64)
        scale = 0.1 * math.log(config.rope_scaling.factor) + 1 if config.rope_scaling.kind == "yarn" else 1.0
        return turned.cos() * scale, turned.sin() * scale

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = rms(module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = angles


def ours_from(theirs: nn.Module, dtype: torch.dtype) -> Transformer:
    config = config_from_huggingface(theirs.config.to_dict())
    model = build(config, config.vocabulary, "cpu", dtype)
    model.load_state_dict(from_huggingface(theirs.state_dict(), config))
    return model.eval()


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_logits_equal_theirs(name: str) -> None:
    tokens = random_tokens(2, 14)
    theirs = their_model(name, torch.float32)
    ours = ours_from(theirs, torch.float32)
    assert relative(ours(tokens), theirs(tokens).logits) < 1e-5

    theirs = their_model(name, torch.float64)
    ours = ours_from(theirs, torch.float64)
    in_float64(theirs, ours.config)
    assert relative(ours(tokens), theirs(tokens).logits) < 1e-10


@pytest.mark.parametrize("name", THEIRS)
def test_state_dicts_go_there_and_back_bitwise(name: str) -> None:
    theirs = their_model(name, torch.float32).state_dict()
    config = ours_from(their_model(name, torch.float32), torch.float32).config
    back = to_huggingface(from_huggingface(theirs, config), config)
    assert back.keys() == theirs.keys() - ({"lm_head.weight"} if config.tied else set())
    assert all(torch.equal(back[key], theirs[key]) for key in back)


@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_equal_theirs(kind: str) -> None:
    config = scaled(kind)
    hf = config_to_huggingface(config, VOCABULARY)
    theirs = transformers.LlamaConfig(**hf)
    length = config.sequence if kind == "dynamic" else None
    rule = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
    expected, scale = rule(theirs, "cpu", length)
    assert config.rope is not None
    torch.testing.assert_close(frequencies(config.rope, config.sequence).float(), expected, rtol=1e-6, atol=0)
    assert (config.rope_scaling.attention_factor or 1.0) == pytest.approx(scale)


WRITABLE = [name for name in CONFIGS if name != "gpt2-plain"]  # shared key heads, which their GPT-2 does not have


@pytest.mark.parametrize("name", WRITABLE)
@pytest.mark.parametrize("shard_bytes", [1 << 40, 2000])
@torch.no_grad()
def test_folders_go_there_and_back(name: str, shard_bytes: int, tmp_path: Path) -> None:
    model = random_model(CONFIGS[name], torch.float32)
    tokens = random_tokens(2, 14)
    save_pretrained(model, tmp_path / "a", end=7, shard_bytes=shard_bytes)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > (shard_bytes == 2000)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    assert relative(model(tokens), theirs(tokens).logits) < 1e-5
    assert theirs.config.eos_token_id == 7

    ours = load_pretrained(tmp_path / "a")
    assert torch.equal(ours(tokens), model(tokens))
    theirs.save_pretrained(tmp_path / "b")
    again = load_pretrained(tmp_path / "b", dtype=torch.float64)
    assert again.head.norm.weight.dtype is torch.float64
    assert all(torch.equal(a.float(), b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize("name", [*WRITABLE, *SCALINGS])
def test_configs_go_there_and_back(name: str) -> None:
    config = CONFIGS.get(name) or scaled(name)
    back = config_from_huggingface(json.loads(json.dumps(config_to_huggingface(config, VOCABULARY))))
    same = {"vocabulary": VOCABULARY, "sequence": back.sequence, "family": back.family}
    assert back == config.model_copy(update=same)
    assert back.sequence == (16 if name == "dynamic" else config.sequence)


def test_a_model_without_biases_is_written_with_zeros(tmp_path: Path) -> None:
    model = random_model(
        ModelConfig(family="gpt2", layers=1, hidden=12, heads=2, sequence=24, bias=False), torch.float32
    )
    save_pretrained(model, tmp_path)
    tokens = random_tokens(1, 9)
    again = load_pretrained(tmp_path)
    assert again.config.bias
    torch.testing.assert_close(again(tokens), model(tokens))


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"family": "gpt2", "kv_heads": 1}, "this gpt2 model cannot be written"),
        ({"family": "gpt2", "window": 4}, "this gpt2 model cannot be written"),
        ({"family": "qwen", "query_key_norm": True, "qkv_bias": True}, "qkv_bias and query_key_norm cannot be written"),
        ({"family": "llama", "bias": True, "window": 4}, "bias and window cannot be written"),
    ],
)
def test_what_they_do_not_have_is_refused(values: dict[str, Any], line: str, tmp_path: Path) -> None:
    model = build(ModelConfig(layers=1, hidden=16, heads=2, **values), VOCABULARY)
    with pytest.raises(ValueError, match=line):
        save_pretrained(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "values", "line"),
    [
        ("llama", {"model_type": "falcon"}, "model_type 'falcon' is not one of ours; it can be gpt2, llama"),
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu', which our models do not have"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ("gpt2", {"attn_pdrop": 0.5}, "attn_pdrop = 0.5, which our models do not have; it can be 0.1"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"num_hidden_layers": None}, "config.json has no num_hidden_layers; add it"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("qwen2-window", {"max_window_layers": 1}, "max_window_layers = 1"),
    ],
)
def test_options_that_ours_do_not_have_are_refused(name: str, values: dict[str, Any], line: str) -> None:
    kind, options = THEIRS[name]
    hf = getattr(transformers, f"{kind}Config")(**options).to_dict() | values
    with pytest.raises(ValueError, match=line):
        config_from_huggingface(hf)


def test_older_configs_are_read() -> None:
    old = {"model_type": "llama", **ROTARY, "rope_theta": 5e5}
    scaling = {"type": "linear", "factor": 2}
    config = config_from_huggingface(old | {"rope_scaling": scaling})
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(kind="linear", factor=2.0)
    assert config_from_huggingface({"model_type": "llama", **ROTARY}).rope_theta == 1e4


def test_checkpoints_of_the_bare_gpt2_are_read() -> None:
    theirs = their_model("gpt2", torch.float32)
    bare = {
        key.removeprefix("transformer."): value for key, value in theirs.state_dict().items() if key != "lm_head.weight"
    }
    bare["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    config = config_from_huggingface(theirs.config.to_dict())
    expected = from_huggingface(theirs.state_dict(), config)
    assert all(torch.equal(value, expected[key]) for key, value in from_huggingface(bare, config).items())


def test_what_does_not_fit_is_named() -> None:
    theirs = their_model("llama", torch.float32)
    config = config_from_huggingface(theirs.config.to_dict())
    state = theirs.state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"the checkpoint lacks {name}; "):
        from_huggingface({key: value for key, value in state.items() if key != name}, config)
    with pytest.raises(ValueError, match="the checkpoint has unknown model.layers.2.x; "):
        from_huggingface(state | {"model.layers.2.x": state[name]}, config)
    with pytest.raises(ValueError, match=rf"{name} has shape \[40, 1\] and the config asks for \[40, 24\]"):
        from_huggingface(state | {name: state[name][:, :1]}, config)


def test_faulty_folders_are_one_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(ValueError, match=r"config.json cannot be read; give a folder"):
        load_pretrained(folder)
    save_pretrained(random_model(CONFIGS["llama"], torch.float32), folder)
    with pytest.raises(ValueError, match=r"already has a config.json"):
        save_pretrained(random_model(CONFIGS["llama"], torch.float32), folder)
    weights = folder / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(weights).items()}  # not views of the damaged file
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read: .*; fetch it again"):
        load_pretrained(folder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"has no model.safetensors; save the model in that format"):
        load_pretrained(folder)
    del state["model.norm.weight"]
    save_file(state, weights)
    with pytest.raises(ValueError, match=r"the checkpoint lacks model.norm.weight"):
        load_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load_pretrained(folder)
