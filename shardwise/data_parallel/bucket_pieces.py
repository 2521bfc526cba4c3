"""What a checkpoint saves of a bucket, and loads in place: pieces of its parameters and of their optimizer state."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.data_parallel.bucket import Bucket
from shardwise.data_parallel.entry import Entry
from shardwise.layout import Layout, Place
from shardwise.memory.offload import standing_in
from shardwise.optimizers.optimizer import Optimizer, Packed
from shardwise.pieces import Away, Pieces, pieces_of


class BucketPieces:
    """The pieces of a bucket as it is now; to be made anew after an update.

    Args:
        bucket: what to save or load.
        optimizer: whose state it holds; None if it holds none.
        places: this rank's place on the axes that layouts divide parameters over.
    """

    def __init__(self, bucket: Bucket, optimizer: Optimizer | None, places: dict[str, Place]) -> None:
        self._bucket, self._optimizer, self._places = bucket, optimizer, places
        self._packed = optimizer if optimizer is not None and isinstance(optimizer, Packed) else None
        self._unpacked: dict[int, dict[str, Tensor]] = {}  # by fragment, moments of an optimizer that packs its state

    def values(self, entry: Entry) -> Pieces | Tensor:
        """One parameter's values; a view in its shape where this rank holds all of it."""
        bucket = self._bucket
        first = bucket.offsets[entry.name]
        if bucket.stage < 3 and not bucket.precision.mixed:
            low, high = first, first + entry.numel
            own = bucket.values[low:high]
        else:
            low, high = bucket.overlap(first, first + entry.numel)
            part = slice(low - bucket.start, high - bucket.start) if low < high else slice(0)

            def of(master: Tensor) -> Pieces:
                return pieces_of(entry.layout, self._places, master[part], low - first, high - first)

            if bucket.master.is_meta:
                return self._away(of, "master" if bucket.precision.mixed else "parameters", 0)
            own = bucket.master[part]
        if own.numel() == entry.numel and not entry.layout.splits:
            return own.view(entry.shape)
        return pieces_of(entry.layout, self._places, own, low - first, high - first)

    def moments(self, entry: Entry) -> dict[str, Pieces | Tensor]:
        """One parameter's optimizer state, by moment. After loading in place `loaded` is due."""
        if self._optimizer is None:
            return {}
        bucket = self._bucket
        first = bucket.offsets[entry.name]
        low, high = bucket.overlap(first, first + entry.numel)
        number = next(index for index, names in enumerate(bucket.members) if entry.name in names)
        begin = low - bucket.start - bucket.spans[number][0] if low < high else 0
        part = slice(begin, begin + high - low)
        origin = sum(len(other.state) for other in bucket.fragments[:number])
        found: dict[str, Pieces | Tensor] = {}
        for index, (name, moment) in enumerate(self._state(number).items()):
            kept = self._optimizer.factored.get(name)

            def of(moment: Tensor, kept: tuple[int, ...] | None = kept) -> Pieces:
                if kept is not None:
                    layout = _reduced(entry.layout, kept)
                    return pieces_of(layout, self._places, moment.reshape(-1), 0, moment.numel())
                return pieces_of(entry.layout, self._places, moment[part], low - first, high - first)

            if moment.is_meta:
                found[name] = self._away(of, "optimizer", origin + index)
            elif kept is None and high - low == entry.numel and not entry.layout.splits:
                found[name] = moment[part].view(entry.shape)
            else:
                found[name] = of(moment)
        return found

    def loaded(self) -> None:
        """Call after what `moments` gave was overwritten in place: packs it again."""
        if self._packed is None:
            return
        with self._bucket.shelves.here("optimizer"):
            for number, moments in self._unpacked.items():
                self._packed.pack(self._bucket.fragments[number], moments)

    def _state(self, number: int) -> dict[str, Tensor]:
        """A fragment's state by moment, unpacked."""
        fragment = self._bucket.fragments[number]
        if self._packed is None:
            return fragment.state
        if number not in self._unpacked:
            shelves = self._bucket.shelves
            with shelves.here("optimizer", changed=False):
                near = self._bucket.device if shelves.of("optimizer") is None else torch.device("cpu")
                self._unpacked[number] = self._packed.moments(standing_in(fragment, near))
        return self._unpacked[number]

    def _away(self, of: Callable[[Tensor], Pieces], kind: str, index: int) -> Pieces:
        """Pieces of a tensor on a shelf, brought when they are asked for."""
        shelf = self._bucket.shelves.of(kind)
        assert shelf is not None
        return Away.of(of(shelf.away[index]), lambda: of(shelf.peek(index)))


def _reduced(layout: Layout, kept: tuple[int, ...]) -> Layout:
    """The layout of a statistic that keeps some of a parameter's dimensions."""
    splits = tuple(replace(split, dim=kept.index(split.dim)) for split in layout.splits if split.dim in kept)
    return Layout(tuple(layout.shape[dim] for dim in kept), splits)
