"""Sampling from a model, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwise.models.attention import KeyValueCache
from shardwise.models.rotary import rescales
from shardwise.models.transformer import Transformer


def generate(
    model: Transformer,
    prompt: Sequence[int],
    *,
    max_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    end: int | None = None,
) -> Iterator[int]:
    """Yields the tokens that follow `prompt`, each as soon as it is drawn; the same ones for the same arguments.

    Past `model.config.sequence` tokens the context slides: the oldest are forgotten and the newest half is read again
    from position 0. A longer prompt starts with its newest `sequence` tokens. The model is in evaluation mode until the
    iterator ends or is closed.

    Args:
        model: with its parameters on one device.
        prompt: at least one token id.
        max_tokens: how many to draw at most.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among the k likeliest only; 0: all.
        top_p: draw among the fewest tokens that together have this probability (arXiv 1904.09751, section 3.1).
        seed: of the draws. They are made on the CPU, so a seed means the same on every device.
        end: the token that ends the text; it is not yielded.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens; start a new text with the tokenizer's end-of-document token")
    outside = next((token for token in prompt if not 0 <= token < model.vocabulary), None)
    if outside is not None:
        raise ValueError(
            f"the prompt has token {outside} and the model knows 0 to {model.vocabulary - 1}; "
            "use the tokenizer it was trained with"
        )
    if max_tokens < 0:
        raise ValueError(f"max_tokens = {max_tokens} is negative; give 0 or more")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature = {temperature} is not possible; give 0 (the likeliest token) or more")
    if top_k < 0:
        raise ValueError(f"top_k = {top_k} is negative; give 0 (all tokens) or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p} is not a probability; give more than 0 and at most 1")
    return _generate(model, list(prompt), max_tokens, temperature, top_k, top_p, seed, end)


@torch.inference_mode()
def _generate(
    model: Transformer,
    context: list[int],
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    end: int | None,
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    longest = model.config.sequence
    context = context[-longest:]
    caches: list[KeyValueCache] = []
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_tokens):
            if len(context) > longest:
                context, caches = context[-max(1, longest // 2) :], []
            if not caches:
                caches = _empty_caches(model, min(longest, len(context) + max_tokens))
            logits = _next_logits(model, context, caches)
            token = draw(logits, temperature, top_k, top_p, generator)
            if token == end:
                return
            yield token
            context.append(token)
    finally:
        model.train(was_training)


def _empty_caches(model: Transformer, capacity: int) -> list[KeyValueCache]:
    config = model.config
    weight = model.embedding.tokens.weight
    shape = (1, config.kv_heads, capacity, config.head_size)
    return [KeyValueCache(shape, weight.device, weight.dtype) for _ in model.blocks]


def _next_logits(model: Transformer, context: list[int], caches: list[KeyValueCache]) -> Tensor:
    """Logits after `context`, (V,); reads only the tokens that the caches lack."""
    rope = model.config.rope
    if rope is not None and rescales(rope, len(context)):
        # Every new token turns all earlier keys by other angles, and with them what later layers saw: nothing can be
        # kept.
        for cache in caches:
            cache.length = 0
    start = caches[0].length
    device = model.embedding.tokens.weight.device
    tokens = torch.tensor([context[start:]], device=device)  # (1, S)
    positions = torch.arange(start, len(context), device=device)[None]
    x = model.embedding(tokens, positions)
    for block, cache in zip(model.blocks, caches, strict=True):
        x = block(x, cache=cache)
    logits: Tensor = model.head(x[:, -1:])[0, 0]
    return logits


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """One token from logits (V,); the arguments are those of `generate`."""
    if not logits.max().isfinite():  # NaN anywhere, or infinity; -inf only rules a token out
        raise ValueError(
            "the model's logits are not finite, so there is nothing to draw from; take an earlier checkpoint"
        )
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.to("cpu", torch.float64)
    logits = (logits - logits.max()) / temperature
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = logits.softmax(-1)
    if top_p < 1:
        sorted_probabilities, order = probabilities.sort(descending=True, stable=True)
        before = sorted_probabilities.cumsum(-1) - sorted_probabilities
        probabilities = probabilities.clone()
        probabilities[order[before >= top_p]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))
