"""Small models of every kind, with odd sizes."""

import torch

from shardwise.models import ModelConfig, RopeScaling, Transformer, build

VOCABULARY = 29

CONFIGS = {
    "gpt2": ModelConfig(family="gpt2", layers=2, hidden=20, heads=5, sequence=24),
    "gpt2-plain": ModelConfig(
        family="gpt2", layers=1, hidden=18, heads=3, kv_heads=1, sequence=24, bias=False, tied=False
    ),
    "llama": ModelConfig(family="llama", layers=2, hidden=24, heads=4, kv_heads=2, sequence=24),
    "llama-tied": ModelConfig(
        family="llama", layers=1, hidden=12, heads=3, kv_heads=1, sequence=24, tied=True, bias=True
    ),
    "qwen2": ModelConfig(family="qwen", layers=2, hidden=16, heads=4, kv_heads=2, sequence=24),
    "qwen3": ModelConfig(
        family="qwen", layers=2, hidden=16, heads=2, kv_heads=1, head_size=12, sequence=24, query_key_norm=True
    ),
    "mistral": ModelConfig(family="mistral", layers=2, hidden=16, heads=4, kv_heads=2, sequence=24, window=4),
}

SCALINGS = {
    "linear": RopeScaling(kind="linear", factor=3.0),
    "dynamic": RopeScaling(kind="dynamic", factor=2.0, original_sequence=8),
    "yarn": RopeScaling(kind="yarn", factor=4.0, original_sequence=16, beta_fast=2.0, beta_slow=0.1),
    "llama3": RopeScaling(kind="llama3", factor=4.0, original_sequence=16, high_frequency_factor=2.5),
}


def scaled(kind: str) -> ModelConfig:
    return ModelConfig(
        family="llama",
        layers=2,
        hidden=36,
        heads=3,
        kv_heads=1,
        sequence=24,
        rope_theta=50.0,
        rope_scaling=SCALINGS[kind],
    )


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> Transformer:
    """With every parameter far from its initial value, so that a mistake in any of them shows."""
    model = build(config, VOCABULARY, "cpu", dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=dtype)
            parameter.copy_(1 + 0.3 * noise if "norm.weight" in name else 0.3 * noise)
    return model.eval()


def random_tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
