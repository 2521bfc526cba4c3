"""Parameters and floating-point operations of a model, from its config alone."""

from __future__ import annotations

from typing import Literal

from shardwise.models.config import ModelConfig


def _widths(config: ModelConfig) -> tuple[int, int]:
    """Widths of all query heads and of all key (or value) heads."""
    return config.heads * config.head_size, config.kv_heads * config.head_size


def _block_matrices(config: ModelConfig) -> int:
    """Elements of the matrices of one block."""
    query, key = _widths(config)
    num_feed_forward = 3 if config.rotary else 2
    return config.hidden * (2 * query + 2 * key + num_feed_forward * config.intermediate)


def count_parameters(config: ModelConfig, vocabulary: int) -> int:
    """Parameters of `build(config, vocabulary)`; a tied matrix counts once."""
    hidden = config.hidden
    query, key = _widths(config)
    norm = hidden * (2 if config.bias and not config.rotary else 1)
    num_wide = 2 if config.rotary else 1  # feed-forward layers that are `intermediate` wide at their output
    block = _block_matrices(config) + 2 * norm
    block += (query + 2 * key) * config.qkv_bias
    block += (2 * hidden + num_wide * config.intermediate) * config.bias
    block += 2 * config.head_size * config.query_key_norm
    embedding = hidden * (vocabulary + (0 if config.rotary else config.sequence))
    head = norm + (0 if config.tied else hidden * vocabulary)
    return embedding + config.layers * block + head


def flops_per_token(
    config: ModelConfig, vocabulary: int, sequence: int, attention: Literal["full", "causal"] = "full"
) -> int:
    """Model FLOPs of forward and backward per token: 6 for a matrix element, 12 for a score and head dimension.

    With "full" attention every token counts as attending to the whole sequence (or window), which is what a dense
    kernel computes and what Megatron-LM publishes (arXiv 2104.04473, appendix): for GPT-2's kind 72 L h^2 (1 + s/(6h) +
    V/(12 L h)). "causal" counts only the keys that a token sees, about half. Norms, activations, embeddings and
    recomputation do not count.

    Args:
        config: family and sizes.
        vocabulary: token ids, V.
        sequence: tokens in each sequence, s.
        attention: which keys count.
    """
    query, _ = _widths(config)
    reach = min(sequence, config.window or sequence)
    # Keys over all tokens of a sequence: all in the window, or 1 + 2 + ... until the window is full.
    num_keys = sequence * reach if attention == "full" else reach * (reach + 1) // 2 + (sequence - reach) * reach
    matrices = config.layers * _block_matrices(config) + config.hidden * vocabulary
    return 6 * matrices + round(12 * config.layers * query * num_keys / sequence)
