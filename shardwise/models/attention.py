"""Causal self-attention with shared key and value heads, documents, a sliding window, and a cache for generation."""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.config import ModelConfig
from shardwise.models.rotary import rotate, tables


class KeyValueCache:
    """Keys and values of the positions one attention layer has seen, in memory set aside once.

    Args:
        shape: (B, K, C, D): batch, key/value heads, capacity in positions, head size.
        device, dtype: of the keys and values.
    """

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> None:
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps (B, K, S, D) keys and values of the next S positions; returns those of all positions (B, K, T, D)."""
        start, self.length = self.length, self.length + k.shape[2]
        self.keys[:, :, start : self.length] = k
        self.values[:, :, start : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class Core(nn.Module):
    """Softmax attention of given queries, keys and values: the one step of attention that mixes positions.

    A module of its own, without parameters, so that a technique can stand in for it.

    Args:
        window: positions that a query attends to, its own included; 0: all before it.
        dropout: of the attention weights.
    """

    def __init__(self, window: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.window = window
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Causal attention; the queries are the last S of the T key positions.

        Args:
            q: (B, N, S, D).
            k, v: (B, K, T, D); K divides N.
            documents: (B, T) int; a query attends only to keys of its own document. None: one document.

        Returns:
            (B, N, S, D).
        """
        k, v, mask, causal = self.reach(q, k, v, documents)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    def reach(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """Which keys the queries of `forward` attend to: keys and values, what is added to the scores, and whether they
        are causal beside it."""
        num_queries, num_keys = q.shape[2], k.shape[2]
        if num_queries == 1 and documents is None:
            if self.window:
                k, v = k[:, :, -self.window :], v[:, :, -self.window :]
            return k, v, None, False
        if num_queries == num_keys and documents is None and not 0 < self.window < num_keys:
            return k, v, None, True
        return k, v, _shared_mask(q, num_keys, self.window, documents), False


def attention_mask(
    num_queries: int,
    num_keys: int,
    window: int,
    documents: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """What is added to the scores of the last `num_queries` of `num_keys` positions: 0 where it attends, else -inf.

    Returns:
        (1, 1, S, T), or (B, 1, S, T) with documents. Every query attends at least to itself.
    """
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)
    hidden = key > query  # (S, T)
    if window:
        hidden = hidden | (key <= query - window)
    hidden = hidden[None, None]
    if documents is not None:
        hidden = hidden | (documents[:, None, -num_queries:, None] != documents[:, None, None, :])
    return torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, float("-inf"))


# The last mask made, so that the layers of a pass share one: each keeps its mask for backward, and a mask is as large
# as the attention weights of a head.
_last_mask: tuple[tuple[object, ...], weakref.ref[Tensor] | None, Tensor] | None = None


def _shared_mask(q: Tensor, num_keys: int, window: int, documents: Tensor | None) -> Tensor:
    global _last_mask
    asked = (q.shape[2], num_keys, window, documents, q.device, q.dtype)
    unfit = torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or type(q) is not Tensor
    # Tensors of inference mode count no versions, so a change of them in place would go unseen.
    if unfit or (documents is not None and documents.is_inference()):
        return attention_mask(*asked)
    key = (q.shape[2], num_keys, window, q.device, q.dtype, None if documents is None else documents._version)
    if _last_mask is not None:
        last_key, reference, mask = _last_mask
        if key == last_key and (reference() if reference else None) is documents:
            return mask
    mask = attention_mask(*asked)
    _last_mask = (key, None if documents is None else weakref.ref(documents), mask)
    return mask


class Attention(nn.Module):
    """Grouped-query causal self-attention (arXiv 1706.03762, 2305.13245) with optional rotary positions.

    The numbers of heads are read from the widths of the projections, so a projection that holds some of the heads works
    as well.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, size = config.hidden, config.head_size
        self.head_size = size
        self.rope = config.rope
        self.query = nn.Linear(hidden, config.heads * size, bias=config.qkv_bias)
        self.key = nn.Linear(hidden, config.kv_heads * size, bias=config.qkv_bias)
        self.value = nn.Linear(hidden, config.kv_heads * size, bias=config.qkv_bias)
        self.query_norm = nn.RMSNorm(size, config.norm_eps) if config.query_key_norm else None
        self.key_norm = nn.RMSNorm(size, config.norm_eps) if config.query_key_norm else None
        self.core = Core(config.window, config.dropout)
        self.output = nn.Linear(config.heads * size, hidden, bias=config.bias)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """(B, S, H) -> (B, S, H); the arguments are those of `Block.forward`."""
        q = self.query(x).unflatten(-1, (-1, self.head_size))  # (B, S, N, D)
        k = self.key(x).unflatten(-1, (-1, self.head_size))  # (B, S, K, D)
        v = self.value(x).unflatten(-1, (-1, self.head_size))  # (B, S, K, D)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rope is not None:
            start = 0 if cache is None else cache.length
            cos, sin = tables(self.rope, positions, start, q.shape[1], like=q)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.append(k, v)
        y: Tensor = self.core(q, k, v, documents)  # (B, N, S, D)
        out: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return out
