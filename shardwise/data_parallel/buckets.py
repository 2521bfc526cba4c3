"""The sharding engine's memory: the parameters of one model chunk, their gradients and their optimizer state in flat
buckets.

Gradients land in a bucket as they are computed (`shardwise.gradient`), and its sum over the data-parallel ranks starts
as soon as the last microbatch's backward has filled it (Li et al., arXiv 2006.15704), in an order that is the same on
every rank.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.collectives import sum_of_squares
from shardwise.data_parallel.reducer import Pending, Reducer
from shardwise.gradient import Slot
from shardwise.layout import Layout, share
from shardwise.optimizers.optimizer import Optimizer

# Small enough that the first sum starts early and the last one is short, large enough that a sum is not all latency.
BUCKET_BYTES = 8 << 20


@dataclass
class Entry:
    """One trainable parameter of a chunk.

    Args:
        name: its canonical name in the whole model.
        layout: where its pieces live.
        shape: of this rank's piece.
        decay: whether weight decay applies.
        direct: whether the module that owns it writes its gradient itself (`shardwise.gradient.is_direct`).
        counted: whether this rank counts it in the gradient norm (one of the ranks that hold the same piece does).
        extra: a further reduction that its sum must go through, for a parameter that several stages hold.
    """

    name: str
    layout: Layout
    shape: tuple[int, ...]
    decay: bool
    direct: bool
    counted: bool = True
    extra: str = ""
    value: Tensor = field(default_factory=lambda: torch.empty(0))  # the view into the bucket
    slot: Slot = field(init=False)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass
class Run:
    """A stretch of a bucket that the optimizer treats alike."""

    start: int
    stop: int
    decay: bool
    state: dict[str, Tensor]


class Bucket:
    """Parameters that are stored, summed and updated together."""

    def __init__(self, entries: list[Entry], dtype: torch.dtype, device: torch.device, reducers: list[Reducer]) -> None:
        # Those with weight decay first: two runs at most.
        self.entries = sorted(entries, key=lambda entry: not entry.decay)
        self.counted = entries[0].counted
        self.reducers = reducers
        numel = sum(entry.numel for entry in entries)
        self.values = torch.empty(numel, dtype=dtype, device=device)
        self.gradient, self.memory = reducers[0].allocate(numel, dtype, device)
        self.runs: list[Run] = []
        self.offsets: dict[str, int] = {}
        offset = 0
        for entry in self.entries:
            stop = offset + entry.numel
            entry.value = self.values[offset:stop].view(entry.shape)
            self.offsets[entry.name] = offset
            if self.runs and self.runs[-1].decay == entry.decay:
                self.runs[-1].stop = stop
            else:
                self.runs.append(Run(offset, stop, entry.decay, {}))
            offset = stop
        self.waiting = 0
        self.pending: Pending | None = None
        self.scale = 1.0  # what the last update multiplied the gradient by

    def view(self, flat: Tensor, entry: Entry) -> Tensor:
        """The part of a flat tensor as long as this bucket that belongs to `entry`, in its shape."""
        start = self.offsets[entry.name]
        return flat[start : start + entry.numel].view(entry.shape)

    def moments(self, entry: Entry) -> dict[str, Tensor]:
        """The optimizer's state of one parameter, as views in its shape."""
        start = self.offsets[entry.name]
        run = next(run for run in self.runs if run.start <= start < max(run.stop, run.start + 1))
        first = start - run.start
        return {name: flat[first : first + entry.numel].view(entry.shape) for name, flat in run.state.items()}


class Buckets:
    """All buckets of one model chunk.

    Args:
        entries: the chunk's trainable parameters, in the order the model registers them.
        dtype, device: of values, gradients and state.
        reducers: by an entry's `extra`, the sums a bucket goes through, in order; "" is the data-parallel one alone.
        optimizer: whose state to hold; None holds none.
        bucket_bytes: a bucket is closed once it is at least so large.
    """

    def __init__(
        self,
        entries: list[Entry],
        dtype: torch.dtype,
        device: torch.device,
        reducers: dict[str, list[Reducer]],
        optimizer: Optimizer | None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.buckets: list[Bucket] = []
        # Backward fills the last layers first.
        for group in _groups(reversed(entries), dtype.itemsize, bucket_bytes):
            self.buckets.append(Bucket(group, dtype, device, reducers[group[0].extra]))
        self._home: dict[str, Bucket] = {}
        for bucket in self.buckets:
            for entry in bucket.entries:
                self._home[entry.name] = bucket
                entry.slot = Slot(entry.name, bucket.view(bucket.gradient, entry), entry.direct, self._landed)
            if optimizer is not None:
                for run in bucket.runs:
                    run.state = optimizer.state(bucket.values[run.start : run.stop])
        self.spent = False  # the gradients have been used: the next backward begins anew
        self._learning = True
        self._last_backward = False
        self._last_weights = False
        self._next = 0
        self.begin()

    def __iter__(self) -> Iterator[tuple[Bucket, Entry]]:
        for bucket in self.buckets:
            for entry in bucket.entries:
                yield bucket, entry

    def begin(self) -> None:
        """A new sum of gradients: nothing has landed."""
        self.spent = False
        self._last_backward = self._last_weights = False
        self._next = 0
        for bucket in self.buckets:
            bucket.pending = None
            bucket.waiting = 0
            for entry in bucket.entries:
                slot = entry.slot
                slot.begin()
                slot.landed = 0
                # One that has never had a gradient may get one at any time: its bucket waits for the end.
                bucket.waiting += max(1, slot.expected)

    def last(self, backward: bool, weights: bool) -> None:
        """The chunk's last backward begins, the half that makes input gradients (`backward`), weight gradients
        (`weights`) or both."""
        for _, entry in self:
            if (backward and not entry.direct) or (weights and entry.direct):
                entry.slot.landed = 0
        self._last_backward |= backward
        self._last_weights |= weights

    def _landed(self, slot: Slot) -> None:
        if not (self._last_weights if slot.direct else self._last_backward):
            return
        slot.landed += 1
        bucket = self._home[slot.name]
        if bucket.pending is not None:
            raise RuntimeError(
                f"parameter {slot.name!r} got a gradient after its sum over ranks had begun: it is used more often in "
                "this step than in the first; use it equally often in every step, or build with parallelize(..., "
                "overlap=False)"
            )
        bucket.waiting -= 1
        if not self._learning:
            self._launch_ready()

    def _launch_ready(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
            self._launch(self.buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        for entry in bucket.entries:
            entry.slot.complete()
        self._next += 1
        bucket.pending = bucket.reducers[0].start(bucket.gradient, bucket.memory)

    def flush(self, overlap: bool) -> None:
        """The chunk's last backward is over: start every sum that has not started. Learns in the first step what to
        wait for in the next."""
        while self._next < len(self.buckets):
            self._launch(self.buckets[self._next])
        if self._learning and overlap:
            for _, entry in self:
                entry.slot.expected = entry.slot.landed
            self._learning = False

    def wait(self) -> float:
        """Wait for the sums. Returns this rank's part of the squared gradient norm; the parts of all ranks add up to
        the square."""
        total = 0.0
        for bucket in self.buckets:
            assert bucket.pending is not None, "wait before flush"
            bucket.pending.wait()
            square = bucket.pending.square
            for reducer in bucket.reducers[1:]:
                reducer.start(bucket.gradient, None).wait()
            if len(bucket.reducers) > 1:
                axis = bucket.reducers[0].axis
                start, stop = share(bucket.gradient.numel(), axis.rank, axis.size)
                square = sum_of_squares(bucket.gradient[start:stop])
            total += square if bucket.counted else 0.0
        return total

    def update(
        self, optimizer: Optimizer, lr: float, step: int, scale: float, values: Callable[[Bucket], Tensor]
    ) -> None:
        """Apply the optimizer to every bucket; `values` says which copy of the parameters a bucket updates."""
        with torch.no_grad():
            for bucket in self.buckets:
                flat = values(bucket)
                bucket.scale = scale
                for run in bucket.runs:
                    if run.stop > run.start:
                        optimizer.update(
                            flat[run.start : run.stop],
                            bucket.gradient[run.start : run.stop],
                            run.state,
                            lr=lr,
                            step=step,
                            decay=run.decay,
                            scale=scale,
                        )


def _groups(entries: Iterable[Entry], itemsize: int, bucket_bytes: int) -> Iterator[list[Entry]]:
    """Consecutive entries of at least `bucket_bytes`; those that need further sums, or are counted elsewhere, apart
    from the others."""
    open_groups: dict[tuple[str, bool], list[Entry]] = {}
    for entry in entries:
        key = (entry.extra, entry.counted)
        group = open_groups.setdefault(key, [])
        group.append(entry)
        if sum(other.numel for other in group) * itemsize >= bucket_bytes:
            yield open_groups.pop(key)
    yield from (group for group in open_groups.values() if group)
