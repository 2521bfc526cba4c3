"""The sharding engine: the parameters of one model chunk, their gradients and their optimizer state in flat buckets.

ZeRO (Rajbhandari et al., arXiv 1910.02054) says which of these are divided over the shard x context ranks between
steps: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too. A rank's part of a bucket is its fragment.
Gradients land in a bucket as they are computed (`shardwise.gradient`), and its sum over ranks starts as soon as the
last microbatch's backward has filled it (Li et al., arXiv 2006.15704), in an order that is the same on every rank. From
stage 2 on whole gradients exist only while they land: every microbatch's are summed and added to the fragments at once.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.data_parallel.bucket import KINDS, Bucket, Storage
from shardwise.data_parallel.entry import Entry
from shardwise.data_parallel.reducer import Flat, Pending
from shardwise.gradient import Slot
from shardwise.mesh import Axis
from shardwise.optimizers.optimizer import Optimizer

# Small enough that the first sum starts early and the last one is short, large enough that a sum is not all latency.
BUCKET_BYTES = 8 << 20
# Whole gradient buckets that exist at a time from stage 2 on: one lands while another is summed.
LANDING_BUFFERS = 2


class Scale(NamedTuple):
    """What an update multiplies gradients by: the clipping factor, over the factor their loss was multiplied by.

    Where every block has a factor of its own, `blocks` has them, None for one that is left out of this update.
    """

    clip: float = 1.0
    loss: float = 1.0
    blocks: tuple[float | None, ...] = ()


class Buckets:
    """All buckets of one model chunk.

    Args:
        entries: the chunk's trainable parameters, in the order the model registers them.
        storage: how they are kept.
        further: by an entry's `extra`, the axes its gradient is summed over after the gradient axis.
        bucket_bytes: a bucket is closed once it is at least so large.
        puts_off: whether a schedule computes weight gradients apart from input gradients.
    """

    def __init__(
        self,
        entries: list[Entry],
        storage: Storage,
        further: Mapping[str, Sequence[Axis]],
        bucket_bytes: int,
        puts_off: bool,
    ) -> None:
        stage, precision, reducer = storage.stage, storage.precision, storage.reducer
        self.stage = stage
        self.reducer = reducer
        # Backward fills the last layers first.
        self.buckets = [
            Bucket(group, storage, further[group[0].extra])
            for group in _groups(reversed(entries), precision.master.itemsize, bucket_bytes, by_unit=stage == 3)
        ]
        self._brings = bool(storage.tiers) or precision.rounds
        self._home: dict[str, tuple[int, Bucket]] = {}
        for index, bucket in enumerate(self.buckets):
            for entry in bucket.entries:
                self._home[entry.name] = (index, bucket)
                view = bucket.view(bucket.landing.tensor, entry) if bucket.landing is not None else None
                find = self._open if view is None else None
                entry.slot = Slot(entry.name, entry.direct, self._landed, view, find, precision.converts)
        self._pool: list[Flat] = []
        self._busy: list[Pending | None] = []
        if stage >= 2 and self.buckets:
            largest = max(bucket.numel for bucket in self.buckets)
            count = min(LANDING_BUFFERS, len(self.buckets))
            self._pool = [reducer.allocate(largest, precision.master, storage.device) for _ in range(count)]
            self._busy = [None] * count
        # By bucket, where gradients land while its buffer of the pool may be another's.
        self._private: dict[int, Tensor] = {}
        self.puts_off = puts_off
        self.spent = False  # the gradients have been used: the next backward begins anew
        self._learning = True
        self._late: set[int] = set()  # buckets that got gradients after their sum had begun
        self._last_backward = False
        self._last_weights = False
        self._next = 0
        self.begin()
        self.spent = True  # what lands before the first step does not count

    def __iter__(self) -> Iterator[tuple[Bucket, Entry]]:
        for bucket in self.buckets:
            for entry in bucket.entries:
                yield bucket, entry

    @property
    def landing_bytes(self) -> int:
        """Bytes of the buffers that whole gradients land in from stage 2 on."""
        return sum(flat.tensor.numel() * flat.tensor.element_size() for flat in self._pool)

    @property
    def every_microbatch(self) -> bool:
        """Whether the gradients of every microbatch are summed by themselves, since whole ones are not kept."""
        return self.stage >= 2

    def begin(self) -> None:
        """A new sum of gradients: nothing has landed."""
        self.spent = False
        for bucket in self.buckets:
            bucket.pending = None
            if bucket.landing is None:
                bucket.clear_gradients()
        self._begin_pass()

    def abandon(self) -> None:
        """Forget what has landed, once the sums under way, which would add to what comes next, are done."""
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
        self.begin()

    def _begin_pass(self) -> None:
        self._last_backward = self._last_weights = False
        self._next = 0
        for bucket in self.buckets:
            bucket.waiting = 0
            for entry in bucket.entries:
                entry.slot.begin()
                entry.slot.landed = 0
                # One that has never had a gradient may get one at any time: its bucket waits for the end.
                bucket.waiting += max(1, entry.slot.expected)

    def last(self, backward: bool, weights: bool) -> None:
        """The last backward of a sum begins, the half that makes input gradients (`backward`), weight gradients
        (`weights`) or both."""
        for _, entry in self:
            if (backward and not entry.direct) or (weights and entry.direct):
                entry.slot.landed = 0
        self._last_backward |= backward
        self._last_weights |= weights

    def _landed(self, slot: Slot) -> None:
        if self.spent or not (self._last_weights if slot.direct else self._last_backward):
            return
        slot.landed += 1
        index, bucket = self._home[slot.name]
        if index < self._next and self._summing_early:
            self._late.add(index)
            return
        if index < self._next:
            raise RuntimeError(
                f"parameter {slot.name!r} got a gradient after its sum over ranks had begun: it is used more often in "
                "this step than in the first; use it equally often in every step, or build with parallelize(..., "
                "overlap=False)"
            )
        bucket.waiting -= 1
        if not self._learning or self._summing_early:
            while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
                self._launch(self._next)

    # Whole gradients from stage 2 on

    def _open(self, slot: Slot) -> None:
        """Find memory for all gradients of a slot's bucket: its buffer of the pool, or, where another bucket's may
        still be there when the sums' turn comes, memory of its own."""
        index, bucket = self._home[slot.name]
        if self.puts_off or index < self._next or index - len(self._pool) >= self._next:
            flat = torch.empty(bucket.numel, dtype=bucket.precision.master, device=bucket.device)
            self._private[index] = flat
        else:
            flat = self._buffer(index).tensor[: bucket.numel]
        for entry in bucket.entries:
            entry.slot.view = bucket.view(flat, entry)
            entry.slot.fresh = True

    def _buffer(self, index: int) -> Flat:
        place = index % len(self._pool)
        busy = self._busy[place]
        if busy is not None:
            busy.wait()
            self._busy[place] = None
        return self._pool[place]

    def _launch(self, index: int, again: bool = False) -> None:
        bucket = self.buckets[index]
        self._next = index + 1
        for entry in bucket.entries:
            entry.slot.complete()
        if bucket.landing is not None:
            bucket.pending = (
                bucket.reducer.reduce_scatter(bucket.landing)
                if self.stage
                else bucket.reducer.all_reduce(bucket.landing)
            )
            return
        flat = self._buffer(index) if again or index in self._private else self._pool[index % len(self._pool)]
        if index in self._private:
            flat.tensor[: bucket.numel].copy_(self._private.pop(index))
        elif again:  # other ranks have more to add
            flat.tensor[: bucket.numel].zero_()
        flat.tensor[bucket.used : bucket.numel].zero_()
        for entry in bucket.entries:
            entry.slot.view = None
        bucket.pending = bucket.sum_gradients(_head(flat, bucket.numel))
        self._busy[index % len(self._pool)] = bucket.pending

    def flush(self, overlap: bool) -> None:
        """The last backward of a sum is over: start what has not started. Learns in the first what to wait for in the
        next."""
        while self._next < len(self.buckets):
            self._launch(self._next)
        if self._summing_early:
            self._launch_late()
        if self._learning and overlap and not (self.every_microbatch and self.puts_off):
            for _, entry in self:
                entry.slot.expected = entry.slot.landed
            self._learning = False
        if self.every_microbatch:
            self._begin_pass()
        if self._brings and self.buckets:
            self.buckets[0].shelves.prefetch("optimizer", "master")

    @property
    def _summing_early(self) -> bool:
        """Whether a bucket whose parameters have all had a gradient is summed before it is known how many they get, for
        there is no room for all; what comes later is summed again."""
        return self._learning and self.every_microbatch and not self.puts_off

    def _launch_late(self) -> None:
        """Sum once more the buckets that on any rank got gradients after their sum had begun."""
        if not self.buckets:
            return
        late = torch.zeros(len(self.buckets), dtype=torch.int32, device=self.buckets[0].device)
        late[sorted(self._late)] = 1
        self._late.clear()
        collectives.all_reduce(late, self.reducer.axis, "max")
        for index in late.nonzero().flatten().tolist():
            self._launch(index, again=True)

    def wait(self) -> None:
        """Wait for the sums."""
        for bucket in self.buckets:
            assert bucket.pending is not None, "wait before flush"
            bucket.pending.wait()
            with bucket.shelves.here(*(("gradients",) if bucket.further else ())):
                for axis in bucket.further:
                    collectives.all_reduce(bucket.own_gradient, axis)

    def squares(self) -> float:
        """This rank's part of the squared gradient norm; the parts of all ranks add up to the square."""
        return math.fsum(bucket.squares() for bucket in self.buckets)

    def update(self, optimizer: Optimizer, lr: float, step: int, scale: Scale, splits: dict[str, Axis]) -> None:
        """Apply the optimizer to this rank's fragments.

        Args:
            scale: what the gradients are multiplied by.
            splits: by the axes that layouts divide parameters over ("tensor"), this rank's place on them.
        """
        with torch.no_grad():
            axes = [self.reducer.zero] if self.stage else []
            # One by one what must be brought or made for the update, all together what is there.
            groups = [[bucket] for bucket in self.buckets] if self._brings else [self.buckets]
            if scale.blocks:
                taken = [bucket for bucket in self.buckets if scale.blocks[bucket.block] is not None]
                groups = [list(run) for _, run in itertools.groupby(taken, lambda bucket: bucket.block)]
                groups = [[bucket] for bucket in taken] if self._brings else groups
            for number, group in enumerate(groups):
                for bucket in itertools.chain(*groups[number + 1 : number + 2]):
                    bucket.shelves.prefetch(*KINDS)
                of_loss = (scale.blocks[group[0].block] or 1.0) if scale.blocks else scale.loss
                with contextlib.ExitStack() as stack:
                    fragments = [part for bucket in group for part in stack.enter_context(bucket.ready(step, splits))]
                    for sums in optimizer.update(fragments, lr=lr, step=step, scale=scale.clip / of_loss):
                        for split in (False, True):
                            chosen = [request.tensor for request in sums if request.split == split]
                            _sum_together(chosen, [*axes, *splits.values()] if split else axes)
                    for bucket in group:
                        bucket.scale = of_loss if bucket.keeps_gradients else scale.clip

    def refresh(self) -> None:
        """Take the other ranks' updated fragments, once all have met after their updates."""
        for bucket in self.buckets:
            bucket.forget()
            if self.stage in (1, 2) and not bucket.common:
                self.reducer.refresh(bucket.stored)

    def of_unit(self, unit: int) -> list[Bucket]:
        """The buckets of one unit."""
        return [bucket for bucket in self.buckets if bucket.unit == unit]


def _head(flat: Flat, numel: int) -> Flat:
    return Flat(flat.tensor[:numel], flat.host)


def _sum_together(tensors: list[Tensor], axes: list[Axis]) -> None:
    """Sum tensors in place over axes, in one message an axis."""
    axes = [axis for axis in axes if axis.size > 1]
    if not tensors or not axes:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for axis in axes:
        collectives.all_reduce(flat, axis)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _groups(entries: Iterable[Entry], itemsize: int, bucket_bytes: int, by_unit: bool) -> Iterator[list[Entry]]:
    """Consecutive entries of at least `bucket_bytes`; those that need further sums, are counted elsewhere, have
    another loss scale or, `by_unit`, are gathered with another unit, apart from the others.

    An entry is as large as its largest piece on any rank, so that ranks whose pieces differ in size ask for the same
    sums, group by group.
    """
    open_groups: dict[tuple[str, bool, int, int], list[Entry]] = {}
    for entry in entries:
        key = (entry.extra, entry.counted, entry.unit if by_unit else 0, entry.block)
        group = open_groups.setdefault(key, [])
        group.append(entry)
        if not by_unit and sum(other.largest or other.numel for other in group) * itemsize >= bucket_bytes:
            yield open_groups.pop(key)
    yield from (group for group in open_groups.values() if group)
