"""Decoder transformers in plain PyTorch: GPT-2's kind and LLaMA's kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.initial import Initial
from shardwise.models.attention import Attention, KeyValueCache
from shardwise.models.config import ModelConfig


def _embedding(num: int, hidden: int) -> nn.Embedding:
    # With a weight given, none is drawn: on the meta device torch does that through its compiler, whose import takes
    # longer than all else a rank does before its first step.
    found: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(num, hidden), freeze=False)
    return found


class Embedding(nn.Module):
    """Token vectors, and learned position vectors where the family has them."""

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__()
        self.tokens = _embedding(vocabulary, config.hidden)
        self.positions = None if config.rotary else _embedding(config.sequence, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """(B, S) token ids [, (B, S) positions] -> (B, S, H).

        Raises:
            ValueError: more tokens than there are learned positions.
        """
        x = self.tokens(tokens)
        if self.positions is not None:
            if positions is None:
                length, longest = tokens.shape[1], self.positions.num_embeddings
                if length > longest:
                    raise ValueError(
                        f"a sequence has {length} tokens and model.sequence = {longest}; raise model.sequence"
                    )
                positions = torch.arange(length, device=tokens.device)
            x = x + self.positions(positions)
        out: Tensor = self.dropout(x)
        return out


class FeedForward(nn.Module):
    """Two layers with GELU between, in its tanh form (arXiv 1606.08415, section 2), as GPT-2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.intermediate, bias=config.bias)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class GatedFeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202, section 2): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.intermediate, bias=config.bias)
        self.up = nn.Linear(config.hidden, config.intermediate, bias=config.bias)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def _norm(config: ModelConfig) -> nn.Module:
    if config.rotary:
        return nn.RMSNorm(config.hidden, config.norm_eps)
    return nn.LayerNorm(config.hidden, config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """Attention, then the feed-forward part, each of the normalised stream and added back to it."""

    # Where each residual branch begins and ends.
    branches = (("attention_norm", "attention"), ("feed_forward_norm", "feed_forward"))

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = _norm(config)
        self.feed_forward = GatedFeedForward(config) if config.rotary else FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """One block.

        Args:
            x: (B, S, H).
            positions: (B, S) int; None: 0, 1, ... after those in the cache. Read for rotary positions only.
            documents: (B, S) int; attention stays among equal ids. None: one document. Not together with a cache.
            cache: keys and values of earlier positions; takes those of these S.

        Returns:
            (B, S, H).
        """
        x = x + self.dropout(self.attention(self.attention_norm(x), positions, documents, cache))
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out


class Head(nn.Module):
    """The last norm and the output matrix."""

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__()
        self.norm = _norm(config)
        self.output = nn.Linear(config.hidden, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) -> logits (B, S, V)."""
        out: Tensor = self.output(self.norm(x))
        return out


class Transformer(nn.Module):
    """A decoder transformer: embedding, blocks, head, in this order and nothing between.

    Args:
        config: family and sizes.
        vocabulary: token ids, V.
    """

    # Where a pipeline may cut: submodules in the order of their calls, `*` all children.
    stages = ("embedding", "blocks.*", "head")

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = vocabulary
        self.embedding = Embedding(config, vocabulary)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config, vocabulary)
        self._tie()

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits of the next token at every position.

        Args:
            tokens: (B, S) int64.
            positions: (B, S) int; None: 0 to S - 1.
            documents: (B, S) int; attention stays among equal ids. None: one document a row.

        Returns:
            (B, S, V) of the parameters' dtype.
        """
        x = self.embedding(tokens, positions)
        for block in self.blocks:
            x = block(x, positions, documents)
        out: Tensor = self.head(x)
        return out

    def initial_value(self, name: str) -> Initial:
        """How parameter `name` starts, as in GPT-2 (Radford et al. 2019, section 2.3): biases 0, norms 1, the rest
        normal with deviation 0.02, over sqrt(2 layers) for the matrices that write to the stream."""
        if name.endswith(".bias"):
            return Initial("constant", 0.0)
        if name.rpartition(".")[0].endswith("norm"):
            return Initial("constant", 1.0)
        if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
            return Initial("normal", 0.02 / math.sqrt(2 * self.config.layers))
        return Initial("normal", 0.02)

    def _tie(self) -> None:
        if self.config.tied:
            self.head.output.weight = self.embedding.tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Moving from the meta device makes a new parameter for each module that has one, which would part tied ones.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        return self


def build(
    config: ModelConfig,
    vocabulary: int,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """A transformer, without values on the meta device, else with initial values drawn from torch's global generator.

    Args:
        config: family and sizes.
        vocabulary: token ids, V; at least 1.
        device, dtype: of the parameters.
    """
    if vocabulary < 1:
        raise ValueError(f"vocabulary = {vocabulary}: a model needs at least one token; give the tokenizer's size")
    with torch.device("meta"):
        model = Transformer(config, vocabulary).to(dtype)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            initial = model.initial_value(name)
            if initial.kind == "constant":
                parameter.fill_(initial.value)
            else:
                parameter.normal_(0.0, initial.value)
    return model
