"""Slices of a sequence in time (TeraPipe, arXiv 2102.07988): a rank computes a sequence slice by slice.

Forward goes from the first slice to the last; every attention keeps the keys and values it has seen. Backward goes from
the last slice to the first: the gradients that a slice finds for earlier slices' keys and values wait until the
backwards of those. So a slice is to a pipeline what a microbatch is, and one device can hold the activations of one
slice alone, with the keys and values of all.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise import batch as batches
from shardwise.batch import Batch
from shardwise.functions import apply
from shardwise.layout import share
from shardwise.tensor_parallel import block_attention, context
from shardwise.tensor_parallel.block_attention import Hidden


class Piece(NamedTuple):
    """Positions `start` to `stop` of a sequence of `length`."""

    start: int
    stop: int
    length: int


@dataclass
class Kept:
    """What one attention keeps of a sequence: keys and values (B, K, S, D and E), and the gradients that slices have
    found for those of earlier ones, in float32 at least."""

    keys: Tensor
    values: Tensor
    filled: int = 0
    key_gradients: Tensor | None = None
    value_gradients: Tensor | None = None

    def take(self, piece: Piece, k: Tensor, v: Tensor) -> None:
        """Keep a slice's keys and values."""
        self.keys[:, :, piece.start : piece.stop] = k
        self.values[:, :, piece.start : piece.stop] = v
        self.filled = piece.stop

    def gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Where gradients wait; zeros at first."""
        if self.key_gradients is None or self.value_gradients is None:
            self.key_gradients = torch.zeros_like(self.keys, dtype=dtype)
            self.value_gradients = torch.zeros_like(self.values, dtype=dtype)
        return self.key_gradients, self.value_gradients


@dataclass
class Sequences:
    """The sequences of one microbatch.

    Args:
        pieces: its slices.
        documents: (B, S) int ids; None: one document.
        parts: the same, slice by slice, as the model gets them.
    """

    pieces: list[Piece]
    documents: Tensor | None = None
    parts: list[Tensor] = field(default_factory=list)
    kept: dict[nn.Module, Kept] = field(default_factory=dict)
    unfinished: int = 0  # slices that are still to be used

    def __post_init__(self) -> None:
        self.unfinished = len(self.pieces)
        self._extremes: list[tuple[Tensor, Tensor] | None] | None = None

    def reach(self, index: int) -> tuple[int, bool]:
        """From which position on slice `index` may see keys, by its documents; and whether all it may see from there is
        one document in every row."""
        if self.documents is None:
            return 0, True
        if self._extremes is None:  # of each slice, the smallest and largest id of every row
            whole = self.documents.cpu()
            cuts = [whole[:, piece.start : piece.stop] for piece in self.pieces]
            self._extremes = [(cut.amin(1), cut.amax(1)) if cut.numel() else None for cut in cuts]
        mine = self._extremes[index]
        if mine is None:
            return 0, True
        before = range(index)
        earliest = next((number for number in before if _meet(self._extremes[number], mine)), index)
        seen = [extremes for extremes in self._extremes[earliest : index + 1] if extremes is not None]
        alone = all(bool(((low == mine[0]) & (high == mine[0])).all()) for low, high in seen)
        return self.pieces[earliest].start, alone


def _meet(one: tuple[Tensor, Tensor] | None, other: tuple[Tensor, Tensor]) -> bool:
    """Whether a document of any row may be in both of two slices, by their smallest and largest ids."""
    return one is not None and bool(((one[0] <= other[1]) & (other[0] <= one[1])).any())


class Slices:
    """The slices of this rank's microbatches. Made by `divide`.

    Args:
        num: slices a sequence is cut into.
        positions: by which name the model takes positions.
        only: the inputs that there may be; None: any.
    """

    def __init__(self, num: int, positions: str, only: frozenset[str] | None = None) -> None:
        self.num = num
        self._positions = positions
        self._only = only
        self._sequences: dict[int, Sequences] = {}  # by number of the microbatch
        self._current = (0, 0)
        self._again = False

    def cut(self, batch: Batch, number: int) -> list[Batch]:
        """The slices of microbatch `number`, with positions; slice i is what runs as microbatch number * num + i.

        Args:
            batch: inputs a dict; every tensor (B, S, ...). Of S < num tokens some slices are empty.

        Raises:
            ValueError: the inputs are not a dict, or tensors have no sequence or different ones.
        """
        length = context.length_of(batch, self._positions, self._only, "plan.slices")
        inputs, targets = batch
        if self._positions not in inputs:
            first = next(iter(batches.tensors(batch)))
            inputs = {**inputs, self._positions: torch.arange(length, device=first.device).expand(len(first), -1)}
        pieces = [Piece(*share(length, index, self.num), length) for index in range(self.num)]
        found = [_narrow((inputs, targets), piece) for piece in pieces]
        parts = [some["documents"] for some, _ in found] if "documents" in inputs else []
        self._sequences[number] = Sequences(pieces, inputs.get("documents"), parts)
        return found

    def enter(self, number: int, again: bool) -> None:
        """Slice `number` is about to be computed.

        Args:
            number: as a microbatch's.
            again: what was computed before is computed again, or its backward runs.
        """
        self._current, self._again = divmod(number, self.num), again

    def finished(self, number: int) -> None:
        """Slice `number` will not be used any more; the keys and values of a sequence go with its last one."""
        whole = number // self.num
        self._sequences[whole].unfinished -= 1
        if not self._sequences[whole].unfinished:
            del self._sequences[whole]

    def at(self, core: nn.Module, k: Tensor, v: Tensor, documents: Tensor | None) -> tuple[Kept, "View"]:
        """Keep the keys and values of the slice at hand.

        Args:
            core: the attention that asks.
            k, v: (B, K, S of the slice, D) and (B, K, S of the slice, E).
            documents: (B, S of the slice), those of the batch; None: one document.

        Returns:
            all that is kept of the sequence for this attention, and what the slice sees of it.

        Raises:
            ValueError: the slice has another length, the documents are not the batch's, or the attention is called more
                than once for a slice.
        """
        whole, index = self._current
        sequences = self._sequences[whole]
        piece = sequences.pieces[index]
        if k.shape[2] != piece.stop - piece.start:
            raise ValueError(
                f"plan.slices: attention was called with {k.shape[2]} keys for a slice of {piece.stop - piece.start} "
                "positions; the model must keep the sequence's length, or set plan.slices = 1"
            )
        if documents is not None and (not sequences.parts or documents is not sequences.parts[index]):
            raise ValueError(
                "plan.slices: attention was called with documents that are not the batch's, so those of earlier slices "
                'are not known; give them as the input "documents" (B, S), and pass them on as they are'
            )
        if core not in sequences.kept:
            keys, values = (t.new_empty((*t.shape[:2], piece.length, t.shape[3])) for t in (k, v))
            sequences.kept[core] = Kept(keys, values)
        kept = sequences.kept[core]
        if not self._again:
            if kept.filled != piece.start:
                raise ValueError(
                    "plan.slices: an attention module is called more than once for a sequence, so it is not clear "
                    "which keys and values are whose; give each layer a module of its own, or set plan.slices = 1"
                )
            kept.take(piece, k.detach(), v.detach())
        first, alone = (0, True) if documents is None else sequences.reach(index)
        return kept, View(piece, first, None if alone else sequences.documents)


def _narrow(batch: Batch, piece: Piece) -> Batch:
    def take(leaf: Any) -> Any:
        return leaf[:, piece.start : piece.stop] if isinstance(leaf, Tensor) else leaf

    inputs, targets = torch.utils._pytree.tree_map(take, batch)
    return inputs, targets


@dataclass(frozen=True)
class View:
    """What a slice may see: keys from `first` on, those of its own document where `documents` (B, S) are given."""

    piece: Piece
    first: int
    documents: Tensor | None

    def blocks(self, window: int, device: torch.device) -> list[tuple[slice, bool, Hidden | None]]:
        """The keys of the slice itself, then those before it, as (positions, causal, hidden).

        Args:
            window: positions that a query sees, its own included; 0: all before it.
            device: of masks.
        """
        start, stop, _ = self.piece
        first = max(self.first, start - window + 1) if window else self.first
        cut = 0 < window < stop - first
        own = slice(start, stop)
        hides = self.documents is not None or 0 < window < stop - start
        found: list[tuple[slice, bool, Hidden | None]] = [
            (own, not hides, self._hidden(own, window, device) if hides else None)
        ]
        if first < start:
            before = slice(first, start)
            hides = self.documents is not None or cut
            found.append((before, False, self._hidden(before, window, device) if hides else None))
        return found

    def _hidden(self, keys: slice, window: int, device: torch.device) -> Hidden:
        query = torch.arange(self.piece.start, self.piece.stop, device=device)
        key = torch.arange(keys.start, keys.stop, device=device)

        def hidden(rows: slice) -> Tensor:
            found = (key > query[rows, None])[None, None]  # (1, 1, S, T)
            if window:
                found = found | (key <= query[rows, None] - window)
            if self.documents is not None:
                ids = self.documents[:, self.piece.start : self.piece.stop]
                found = found | (ids[:, None, rows, None] != self.documents[:, None, None, keys])
            return found

        return hidden


class _SlicedAttention(torch.autograd.Function):
    """Attention of a slice to itself and to what is kept, whose backward leaves gradients for earlier slices there."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kept: Kept, view: View, window: int, scale: float) -> Tensor:
        out, total = attend(q, kept, view, window, scale)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, out, total)
        ctx.settings = kept, view, window, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, total = ctx.saved_tensors
        kept, view, window, scale = ctx.settings
        of_keys, of_values = kept.gradients(total.dtype)
        dq = torch.zeros(q.shape, dtype=total.dtype, device=q.device)
        for at, causal, hidden in view.blocks(window, q.device) if out.numel() else ():
            parts = block_attention.backward(
                grad, q, kept.keys[:, :, at], kept.values[:, :, at], out, total, scale, causal, hidden
            )
            for whole, part in zip((dq, of_keys[:, :, at], of_values[:, :, at]), parts, strict=True):
                whole += part
        own = slice(view.piece.start, view.piece.stop)
        dk, dv = of_keys[:, :, own], of_values[:, :, own]  # complete: later slices have been here
        return dq.to(q.dtype), dk.to(kept.keys.dtype), dv.to(kept.values.dtype), None, None, None, None


def attend(q: Tensor, kept: Kept, view: View, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of a slice's queries (B, N, S, D) to what it may see: (B, N, S, E) and the logsumexp (B, N, S), both in
    float32 at least."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((*q.shape[:3], kept.values.shape[3]), dtype=dtype)
    total = q.new_zeros(q.shape[:3], dtype=dtype)
    if not out.numel():
        return out, total
    (own, causal, hidden), *before = view.blocks(window, q.device)
    found = block_attention.forward(q, kept.keys[:, :, own], kept.values[:, :, own], scale, causal, hidden)
    out, total = found[0].to(dtype), found[1]  # every query sees itself at least
    for at, causal, hidden in before:
        part = block_attention.forward(q, kept.keys[:, :, at], kept.values[:, :, at], scale, causal, hidden)
        block_attention.merge(out, total, *part)
    return out, total


class SlicedAttention(nn.Module):
    """Stands in for a module that computes causal attention (q, k, v, documents) -> y.

    Args:
        slices: which slice is at hand, and what is kept.
        window: positions that a query sees, its own included; 0: all before it.
        scale: of the scores; by default 1 / sqrt(D).
    """

    def __init__(self, slices: Slices, window: int = 0, scale: float | None = None) -> None:
        super().__init__()
        self.window = window
        self.scale = scale
        self._slices = slices

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Causal attention of a slice's queries to its own keys and those of the slices before.

        Args:
            q, k, v: (B, N, S of the slice, D), (B, K, S of the slice, D), (B, K, S of the slice, E); K divides N.
            documents: (B, S of the slice), those of the batch.

        Returns:
            (B, N, S of the slice, E).

        Raises:
            ValueError: as `Slices.at`.
        """
        kept, view = self._slices.at(self, k, v, documents)
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        return apply(_SlicedAttention, q, k, v, kept, view, self.window, scale)


def divide(model: nn.Module, num: int) -> Slices:
    """Replace a model's attention modules by ones that see a sequence slice by slice.

    Args:
        model: the whole model.
        num: slices.

    Raises:
        ValueError: attention is not causal, or the model looks across positions otherwise.
    """
    try:
        context.check(model, "slices")
    except ValueError as error:
        raise ValueError(f"plan.slices: {error}") from None
    slices = Slices(num, context.positions_name(model, "plan.slices = 1"), context.inputs_of(model))

    def sliced(core: nn.Module) -> nn.Module:
        return SlicedAttention(slices, int(getattr(core, "window", 0) or 0), getattr(core, "scale", None))

    context.replace_cores(model, sliced)
    return slices
