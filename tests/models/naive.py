"""A second implementation of the models, from the papers: loops over heads and positions, no shared code."""

import math

import torch
from torch import Tensor

from shardwise.models import ModelConfig, RopeScaling


def frequency(pair: int, size: int, theta: float, scaling: RopeScaling, length: int) -> float:
    """Radians per position of one pair of dimensions."""
    factor, original = scaling.factor, scaling.original_sequence
    if scaling.kind == "dynamic" and length > original:
        theta = theta * (factor * length / original - factor + 1) ** (size / (size - 2))
    plain = theta ** (-2 * pair / size)
    if scaling.kind == "linear":
        return plain / factor
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / plain
        if wavelength < original / scaling.high_frequency_factor:
            return plain
        if wavelength > original / scaling.low_frequency_factor:
            return plain / factor
        smooth = (original / wavelength - scaling.low_frequency_factor) / (
            scaling.high_frequency_factor - scaling.low_frequency_factor
        )
        return (1 - smooth) * plain / factor + smooth * plain
    if scaling.kind == "yarn":

        def bound(turns: float) -> float:
            return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(bound(scaling.beta_fast)), 0)
        high = min(math.ceil(bound(scaling.beta_slow)), size - 1)
        ramp = min(max((pair - low) / (high - low), 0), 1)
        return ramp * plain / factor + (1 - ramp) * plain
    return plain


def rotated(x: Tensor, position: int, config: ModelConfig, length: int) -> Tensor:
    """One head's vector (D,) turned to its position."""
    half = len(x) // 2
    out = torch.empty_like(x)
    for pair in range(half):
        angle = position * frequency(pair, len(x), config.rope_theta, config.rope_scaling, length)
        cos, sin = math.cos(angle), math.sin(angle)
        out[pair] = x[pair] * cos - x[pair + half] * sin
        out[pair + half] = x[pair + half] * cos + x[pair] * sin
    scale = 1.0
    if config.rope_scaling.kind == "yarn":
        scale = 0.1 * math.log(config.rope_scaling.factor) + 1
    return out * scale


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight


def norm(x: Tensor, state: dict[str, Tensor], name: str, config: ModelConfig) -> Tensor:
    weight = state[f"{name}.weight"]
    if config.family != "gpt2":
        return rms(x, weight, config.norm_eps)
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + config.norm_eps) * weight + state.get(f"{name}.bias", 0)


def linear(x: Tensor, state: dict[str, Tensor], name: str) -> Tensor:
    return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0)


def attention(
    x: Tensor, state: dict[str, Tensor], name: str, config: ModelConfig, positions: list[int], documents: list[int]
) -> Tensor:
    """(S, H) -> (S, H), one row of the batch."""
    size, length = config.head_size, len(x)
    q = linear(x, state, f"{name}.query").view(length, config.heads, size)
    k = linear(x, state, f"{name}.key").view(length, config.kv_heads, size)
    v = linear(x, state, f"{name}.value").view(length, config.kv_heads, size)
    if config.query_key_norm:
        q = rms(q, state[f"{name}.query_norm.weight"], config.norm_eps)
        k = rms(k, state[f"{name}.key_norm.weight"], config.norm_eps)
    rows = []
    for i in range(length):
        heads = []
        for head in range(config.heads):
            shared = head * config.kv_heads // config.heads
            seen = [
                j for j in range(i + 1) if documents[i] == documents[j] and (not config.window or i - j < config.window)
            ]
            query = q[i, head]
            keys = [k[j, shared] for j in seen]
            if config.family != "gpt2":
                reach = max(positions) + 1
                query = rotated(query, positions[i], config, reach)
                keys = [rotated(key, positions[j], config, reach) for key, j in zip(keys, seen, strict=True)]
            scores = torch.stack([query @ key for key in keys]) / math.sqrt(size)
            weights = scores.exp() / scores.exp().sum()
            heads.append(sum(weight * v[j, shared] for weight, j in zip(weights, seen, strict=True)))
        rows.append(torch.cat(heads))
    return linear(torch.stack(rows), state, f"{name}.output")


def feed_forward(x: Tensor, state: dict[str, Tensor], name: str, config: ModelConfig) -> Tensor:
    up = linear(x, state, f"{name}.up")
    if config.family == "gpt2":
        inner = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    else:
        gate = linear(x, state, f"{name}.gate")
        inner = gate / (1 + torch.exp(-gate)) * up
    return linear(inner, state, f"{name}.down")


def logits(
    state: dict[str, Tensor],
    config: ModelConfig,
    tokens: Tensor,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """(B, S) -> (B, S, V)."""
    out = []
    for row in range(len(tokens)):
        length = tokens.shape[1]
        places = list(range(length)) if positions is None else positions[row].tolist()
        ids = [0] * length if documents is None else documents[row].tolist()
        x = state["embedding.tokens.weight"][tokens[row]]
        if config.family == "gpt2":
            x = x + state["embedding.positions.weight"][places]
        for layer in range(config.layers):
            name = f"blocks.{layer}"
            x = x + attention(
                norm(x, state, f"{name}.attention_norm", config), state, f"{name}.attention", config, places, ids
            )
            x = x + feed_forward(
                norm(x, state, f"{name}.feed_forward_norm", config), state, f"{name}.feed_forward", config
            )
        x = norm(x, state, "head.norm", config)
        out.append(x @ state["embedding.tokens.weight" if config.tied else "head.output.weight"].T)
    return torch.stack(out)
