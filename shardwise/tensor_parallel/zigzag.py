"""How a sequence lies on the ranks of the context axis, such that causal attention is the same work for all.

A query at position i has i + 1 keys, so consecutive shares would leave the last rank with most of the work. Of 2R
pieces in order, rank r has pieces r and 2R - 1 - r (Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from shardwise.layout import share
from shardwise.mesh import Axis

Range = tuple[int, int]


@dataclass(frozen=True)
class Zigzag:
    """A sequence of `length` positions on `size` ranks. Pieces differ by one position at most, and may be empty."""

    length: int
    size: int

    def pieces(self, rank: int) -> tuple[Range, Range]:
        """The half-open ranges of positions that `rank` has, in order."""
        last = 2 * self.size - 1
        return share(self.length, rank, last + 1), share(self.length, last - rank, last + 1)

    def count(self, rank: int) -> int:
        """How many positions `rank` has."""
        return sum(stop - start for start, stop in self.pieces(rank))

    def take(self, whole: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The part of `whole` that `rank` has, along `dim`."""
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in self.pieces(rank)], dim)

    def join(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole of the ranks' `parts`, in order of position along `dim`."""
        early, late = [], []
        for rank, part in enumerate(parts):
            (start, stop), _ = self.pieces(rank)
            early.append(part.narrow(dim, 0, stop - start))
            late.append(part.narrow(dim, stop - start, part.shape[dim] - (stop - start)))
        return torch.cat([*early, *reversed(late)], dim)

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """The positions that `rank` has, (S of the rank,) int64."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.pieces(rank)])


@dataclass(frozen=True, eq=False)
class Spread:
    """One microbatch's sequences on the ranks of the context axis.

    Args:
        zigzag: which rank has which positions.
        documents: (B, S) int ids of the whole sequences; attention stays among equal ids. None: one document.
    """

    zigzag: Zigzag
    documents: Tensor | None = None

    def undivided(self) -> "Spread":
        """The same sequences as one document each."""
        return replace(self, documents=None)

    @cached_property
    def _extremes(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest document id of each piece, (B, 2R) on the CPU."""
        assert self.documents is not None
        kept = self.documents.cpu()
        low = torch.full((len(kept), 2 * self.zigzag.size), torch.iinfo(torch.int64).max)
        high = torch.full_like(low, torch.iinfo(torch.int64).min)
        for number in range(2 * self.zigzag.size):
            start, stop = share(self.zigzag.length, number, 2 * self.zigzag.size)
            if stop > start and len(kept):
                low[:, number], high[:, number] = kept[:, start:stop].amin(1), kept[:, start:stop].amax(1)
        return low, high

    def documents_meet(self, some: Sequence[int], others: Sequence[int]) -> tuple[bool, bool]:
        """Whether any row may have a document in both sets of pieces (by number); whether all rows have one alone."""
        if self.documents is None:
            return True, True
        low, high = self._extremes
        first = low[:, some].amin(1), high[:, some].amax(1)
        second = low[:, others].amin(1), high[:, others].amax(1)
        meet = (first[0] <= second[1]) & (second[0] <= first[1])
        alone = (first[0] == first[1]) & (second[0] == second[1]) & (first[0] == second[0])
        return bool(meet.any()), bool(alone.all())


def check_lengths(spread: Spread, axis: Axis, q: Tensor, k: Tensor) -> None:
    """Check that (B, N, S, D) queries and keys are those of this rank's part of the sequence.

    Raises:
        ValueError: their lengths are others.
    """
    expected = spread.zigzag.count(axis.rank)
    if q.shape[2] != expected or k.shape[2] != expected:
        raise ValueError(
            f"plan.context: attention was called with {q.shape[2]} queries and {k.shape[2]} keys where this rank has "
            f"{expected} of {spread.zigzag.length} positions; the model must keep the sequence's length, or set "
            "plan.context = 1"
        )
