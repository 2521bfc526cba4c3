import pytest
from pydantic import TypeAdapter

from shardwise.models import ModelConfig, RopeScaling
from shardwise.models.config import default_intermediate


def refusal(**values: object) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is what is tested
        ModelConfig(**values)
    return str(caught.value)


def test_families_fill_in_what_is_left_out() -> None:
    gpt2, llama, qwen, mistral = (ModelConfig(family=family) for family in ("gpt2", "llama", "qwen", "mistral"))
    assert (gpt2.tied, gpt2.bias, gpt2.qkv_bias, gpt2.rotary) == (True, True, True, False)
    assert (llama.tied, llama.bias, llama.qkv_bias, llama.rotary) == (False, False, False, True)
    assert (qwen.bias, qwen.qkv_bias, qwen.norm_eps, qwen.rope_theta) == (False, True, 1e-6, 1e6)
    assert ModelConfig(family="qwen", query_key_norm=True).qkv_bias is False
    assert ModelConfig(family="llama", bias=True).qkv_bias is True
    assert ModelConfig(family="gpt2", bias=False).qkv_bias is False
    assert (mistral.window, llama.window) == (4096, 0)
    assert (llama.head_size, llama.kv_heads) == (llama.hidden // llama.heads, llama.heads)


def test_what_the_user_says_comes_before_the_family() -> None:
    config = ModelConfig(family="gpt2", tied=False, intermediate=7, kv_heads=2, head_size=3, norm_eps=0.1)
    assert (config.tied, config.intermediate, config.kv_heads, config.head_size, config.norm_eps) == (
        False,
        7,
        2,
        3,
        0.1,
    )
    assert ModelConfig(family="mistral", window=0).window == 0


def test_default_width_of_the_feed_forward_part() -> None:
    assert default_intermediate("gpt2", 768) == 3072
    assert [default_intermediate("llama", hidden) for hidden in (4096, 5120, 8192)] == [11008, 13824, 22016]  # LLaMA
    assert default_intermediate("llama", 96) == 256
    assert default_intermediate("llama", 97) == 288


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"heads": 5}, "model.heads: 5 does not divide hidden = 256; choose a divisor of 256, or give model.head_size"),
        ({"heads": 4, "kv_heads": 3}, "model.kv_heads: 3 does not divide heads = 4; choose a divisor of 4"),
        (
            {"family": "llama", "hidden": 36},
            "model.head_size: 9 is odd and rotation needs pairs; choose an even one",
        ),
        ({"layers": 0}, "model.layers: 0 is not possible; give at least 1"),
        ({"layer": 3}, "model.layer: no such key; did you mean model.layers?"),
        ({"family": "lama"}, "model.family: 'lama' is not known; did you mean llama?"),
        ({"dropout": 1.0}, "model.dropout: 1.0 is not possible; give less than 1"),
        ({"rope_theta": 5e5}, "model.rope_theta: 500000.0: family 'gpt2' has learned positions"),
        (
            {"rope_scaling": {"kind": "linear", "factor": 2.0}},
            "model.rope_scaling: family 'gpt2' has learned positions",
        ),
        (
            {"family": "llama", "rope_scaling": {"kind": "yarn", "factor": 2.0}},
            "model.rope_scaling.original_sequence: 0 stands for a default, and kind = 'yarn' has none; give a value",
        ),
        (
            {"family": "llama", "rope_scaling": {"kind": "linear", "factor": 2.0, "beta_fast": 3.0}},
            "model.rope_scaling.beta_fast: 3.0 is not read by kind = 'linear'; leave it out",
        ),
        (
            {"family": "llama", "rope_scaling": {"kind": "linear", "factor": 0.5}},
            "model.rope_scaling.factor: 0.5 would shorten sequences; give at least 1",
        ),
        (
            {"family": "llama", "rope_scaling": {"kind": "llama3", "low_frequency_factor": 4.0}},
            "is not above low_frequency_factor = 4.0; give more",
        ),
        (
            {
                "family": "llama",
                "sequence": 100,
                "rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_sequence": 200},
            },
            "model.sequence: 100 is shorter than rope_scaling.original_sequence = 200",
        ),
        ({"family": "llama", "bias": True, "qkv_bias": False}, "model.qkv_bias: false: contradicts bias = true"),
    ],
)
def test_impossible_sizes_are_one_clear_line(values: dict[str, object], line: str) -> None:
    message = refusal(**values)
    assert line in message
    assert "\n" not in message


def test_all_problems_come_at_once() -> None:
    assert len(refusal(family="llama", hidden=36, heads=4, kv_heads=3).splitlines()) == 2
    assert len(refusal(layers=0, heads="x").splitlines()) == 2


def test_a_resolved_config_reads_back_as_itself() -> None:
    config = ModelConfig(family="llama", rope_scaling=RopeScaling(kind="yarn", factor=4, original_sequence=256))
    assert config.rope_scaling.attention_factor == pytest.approx(1.138629436)
    assert ModelConfig(**config.model_dump()) == config
    assert TypeAdapter(ModelConfig).validate_python(config.model_dump()) == config
