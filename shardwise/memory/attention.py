"""Attention whose backward computes the scores again (arXiv 2205.05198, section 5), the same bits as torch's own.

Without dropout that is torch's fused attention, split in a forward and a backward of which the first can be left out
when its result is known. With dropout torch's attention on CPUs keeps scores, weights and masks; here one head is
computed at a time, and a bit for each weight is all that is kept of them.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten
# What torch's attention chooses between: its plain form keeps everything.
_PLAIN, _FUSED = 0, 1
# Bytes to a multiple of which torch aligns a tensor's memory on CPUs: a head is computed as far behind one as in a
# tensor of all heads.
ALIGNMENT = 64


class Given:
    """The arguments of one call of attention.

    Args:
        q: (B, N, S, D).
        k, v: (B, K, T, D); K divides N.
        mask: (B or 1, 1, S, T), added to the scores; None for none.
        causal: whether a query sees only keys up to its own position, S = T.
        dropout: of the attention weights.
    """

    __slots__ = ("causal", "dropout", "k", "mask", "q", "v")

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float) -> None:
        self.q, self.k, self.v, self.mask, self.causal, self.dropout = q, k, v, mask, causal, dropout

    def plainly(self) -> Tensor:
        """What torch computes."""
        grouped = self.q.shape[1] != self.k.shape[1]
        return F.scaled_dot_product_attention(
            self.q, self.k, self.v, self.mask, self.dropout, self.causal, enable_gqa=grouped
        )

    def method(self) -> Callable[..., Any] | None:
        """What computes the same here; None if nothing does."""
        if self.q.device.type != "cpu" or type(self.q) is not Tensor or min(self.q.shape) == 0:
            return None
        grouped = self.q.shape[1] != self.k.shape[1]
        chosen = _aten._fused_sdp_choice(
            self.q, self.k, self.v, self.mask, self.dropout, self.causal, enable_gqa=grouped
        )
        if chosen == _FUSED:
            return _Fused.apply
        if chosen == _PLAIN and self.dropout and self.q.dtype in (torch.float32, torch.float64):
            return _Dropped.apply
        return None


def spared(given: Given) -> int:
    """Bytes that torch's attention would keep for backward beyond what `attention` does: with dropout the weights
    before and after it, and what they are multiplied by."""
    if given.method() is None or not given.dropout:
        return 0
    weights = given.q[..., 0].numel() * given.k.shape[2]
    return 3 * weights * given.q.element_size() - weights // 8


def beside(given: Given) -> int:
    """Bytes that `keep` keeps beside the result: a sum of each query's scores, or a bit of each weight."""
    if given.method() is None:
        return 0
    rows = given.q[..., 0].numel()
    if given.dropout:
        return rows // given.q.shape[2] * -(-given.q.shape[2] * given.k.shape[2] // 8) + torch.get_rng_state().numel()
    return rows * torch.promote_types(given.q.dtype, torch.float32).itemsize


def keep(given: Given) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Attention without a graph, and what `known` needs of it (nothing: it must be computed again)."""
    method = given.method()
    if method is None:
        return given.plainly(), ()
    kept: list[Tensor] = []
    out = method(given.q, given.k, given.v, given, kept)
    return out, tuple(kept)


def known(kept: tuple[Tensor, ...], given: Given) -> Tensor:
    """Attention with its graph, its result being there; draws the random numbers that the first run drew."""
    method = given.method()
    if method is None or not kept:
        return given.plainly()
    out: Tensor = method(given.q, given.k, given.v, given, list(kept))
    return out


def attention(given: Given) -> Tensor:
    """Attention, with dropout one head at a time."""
    method = given.method()
    if method is None or not given.dropout:
        return given.plainly()
    out: Tensor = method(given.q, given.k, given.v, given, [])
    return out


class _Fused(torch.autograd.Function):
    """`kept` is the result (out, log-sum-exp of the scores), filled in if it is empty."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, given: Given, kept: list[Tensor]) -> Tensor:
        if not kept:
            kept += _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, given.causal, attn_mask=given.mask)
        out, total = kept
        ctx.save_for_backward(q, k, v, out, total, given.mask)
        ctx.causal = given.causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total, mask = ctx.saved_tensors
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, total, 0.0, ctx.causal, attn_mask=mask
        )
        return *found, None, None


class _Dropped(torch.autograd.Function):
    """`kept` is the result (out, a bit for each weight that stays, the generator's state behind it), filled in if it is
    empty."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, given: Given, kept: list[Tensor]) -> Tensor:
        if kept:
            out, bits, state = kept
            torch.set_rng_state(state)
        else:
            stays = torch.empty((*q.shape[:3], k.shape[2]), dtype=torch.uint8).bernoulli_(1 - given.dropout)
            bits = torch.from_numpy(np.packbits(stays.view(q.shape[0] * q.shape[1], -1).numpy(), axis=1))
            heads = _Heads(q, k, v, given.mask, given.causal, given.dropout, bits)
            out = heads.forward()
            kept += [out, bits, torch.get_rng_state()]
        ctx.save_for_backward(q, k, v, given.mask, bits)
        ctx.settings = given.causal, given.dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, bits = ctx.saved_tensors
        causal, dropout = ctx.settings
        return *_Heads(q, k, v, mask, causal, dropout, bits).backward(grad), None, None


class _Heads:
    """Attention with dropout, head by head, in the operations of torch's plain attention, their order, and the layouts
    and places of what they multiply: a product's rounding depends on all of them, with some processors also on where
    in a vector's width its matrices begin."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float, bits: Tensor
    ) -> None:
        self.shape, self.num_shared, self.bits = q.shape, k.shape[1], bits
        batch, heads, queries, size = q.shape
        keys = k.shape[2]
        self.num = batch * heads
        self.group = heads // self.num_shared
        if self.group > 1:
            k, v = k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1)
        self.factor = math.sqrt(1 / math.sqrt(size))
        self.q = (q * self.factor).reshape(self.num, queries, size)
        self.k = (k * self.factor).transpose(2, 3).reshape(self.num, size, keys)
        self.v = v.reshape(self.num, keys, v.shape[3])
        if causal:
            hidden = torch.ones(queries, keys, dtype=torch.bool).triu_(1)
            mask = torch.zeros(1, 1, queries, keys, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
        self.mask = mask
        self.scale = float(torch.ones((), dtype=q.dtype).div_(1 - dropout))
        spare = ALIGNMENT // q.element_size()
        self._rooms = [q.new_empty(queries * keys + spare) for _ in range(3)]

    def _weights(self, head: slice) -> Tensor:
        """The softmax of a head's scores, before dropout; fills `noise` with what it is multiplied by."""
        shape = (1, self.shape[2], self.k.shape[2])
        begin = head.start * shape[1] * shape[2] % (ALIGNMENT // self.q.element_size())
        self.scores, self.noise, weights = (
            room[begin : begin + shape[1] * shape[2]].view(shape) for room in self._rooms
        )
        torch.bmm(self.q[head], self.k[head], out=self.scores)
        if self.mask is not None:
            row = head.start // self.shape[1] if self.mask.shape[0] > 1 else 0
            self.scores.add_(self.mask[row])
        stays = np.unpackbits(self.bits[head.start].numpy(), count=self.noise.numel())
        self.noise.view(-1).copy_(torch.from_numpy(stays)).mul_(self.scale)
        return torch.softmax(self.scores, -1, out=weights)

    def forward(self) -> Tensor:
        """(B, N, S, E)."""
        out = self.v.new_empty(self.num, self.shape[2], self.v.shape[2])
        for head in self._heads():
            weights = self._weights(head).mul_(self.noise)
            torch.bmm(weights, self.v[head], out=out[head])
        return out.view(*self.shape[:3], -1)

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""
        grad = grad.reshape(self.num, self.shape[2], -1)
        dq, dk, dv = (part.new_empty(part.shape) for part in (self.q, self.k, self.v))
        for head in self._heads():
            weights = self._weights(head)
            torch.bmm(torch.mul(weights, self.noise, out=self.scores).transpose(1, 2), grad[head], out=dv[head])
            torch.bmm(grad[head], self.v[head].transpose(1, 2), out=self.scores)
            grads, slopes = self.scores.mul_(self.noise), self.noise
            _aten._softmax_backward_data.out(grads, weights, -1, weights.dtype, grad_input=slopes)
            torch.bmm(slopes, self.k[head].transpose(1, 2), out=dq[head])
            torch.bmm(self.q[head].transpose(1, 2), slopes, out=dk[head])

        def shared(part: Tensor) -> Tensor:
            """Summed over the queries' heads that share one of keys and values."""
            heads = part.view(self.shape[0], self.num_shared, self.group, *part.shape[1:])
            return heads.sum(2) if self.group > 1 else heads[:, :, 0]

        return (dq * self.factor).view(self.shape), shared(dk.mul_(self.factor)).transpose(2, 3), shared(dv)

    def _heads(self) -> Iterator[slice]:
        return (slice(head, head + 1) for head in range(self.num))
