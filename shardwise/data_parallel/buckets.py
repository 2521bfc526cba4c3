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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.collectives import sum_of_squares
from shardwise.data_parallel.reducer import Flat, Pending, Reducer
from shardwise.gradient import Slot
from shardwise.layout import Layout, Place, share
from shardwise.memory.offload import Shelves, Tier, standing_in
from shardwise.memory.precision import Precision
from shardwise.memory.rounding import round_into
from shardwise.mesh import Axis
from shardwise.optimizers.optimizer import Fragment, Optimizer, Packed, override_of
from shardwise.pieces import Away, Pieces, pieces_of

# Small enough that the first sum starts early and the last one is short, large enough that a sum is not all latency.
BUCKET_BYTES = 8 << 20
# Whole gradient buckets that exist at a time from stage 2 on: one lands while another is summed.
LANDING_BUFFERS = 2
# What an update needs of a bucket, of what may live elsewhere.
KINDS = ("parameters", "master", "gradients", "optimizer")


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
        unit: which unit of the chunk it is gathered with at ZeRO stage 3; -1 with the whole chunk.
        block: the number of its own loss scale, where every residual block has one.
        extra: names further sums that its gradient must go through, for a parameter whose gradient is partial elsewhere
            too.
    """

    name: str
    layout: Layout
    shape: tuple[int, ...]
    decay: bool
    direct: bool
    counted: bool = True
    unit: int = -1
    block: int = 0
    extra: str = ""
    value: Tensor = field(default_factory=lambda: torch.empty(0))  # the view into the bucket's first values
    slot: Slot = field(init=False)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Scale(NamedTuple):
    """What an update multiplies gradients by: the clipping factor, over the factor their loss was multiplied by.

    Where every block has a factor of its own, `blocks` has them, None for one that is left out of this update.
    """

    clip: float = 1.0
    loss: float = 1.0
    blocks: tuple[float | None, ...] = ()


class Bucket:
    """Parameters that are stored, summed and updated together.

    Attributes:
        values: all of them, (N,), N padded so that the ranks of the zero axis divide it; at stage 3 without memory
        unless gathered. Where the ranks of the zero axis share memory it holds one copy for all of them, of which each
        updates its fragment: nothing is gathered.
        stored: what is kept of them between steps: `values`, or, where stage 3 gathers them, `own`.
        source: the version of `stored` that stage 3 gathers.
        own: this rank's fragment of them.
        master: the fragment that the optimizer updates: `own` itself, or, in mixed precision, its copy in the master
        format.
        own_gradient: the fragment of the summed gradients.
    """

    def __init__(
        self,
        entries: list[Entry],
        stage: int,
        precision: Precision,
        device: torch.device,
        reducer: Reducer,
        further: Sequence[Axis],
        optimizer: Optimizer | None,
        tiers: dict[str, Tier],
        seed: int,
    ) -> None:
        # Those that the optimizer treats alike side by side.
        self.entries = sorted(entries, key=lambda entry: _treatment(entry, optimizer)) if optimizer else entries
        self.counted = entries[0].counted
        self.unit = entries[0].unit
        self.block = entries[0].block
        self.stage = stage
        self.reducer = reducer
        self.further = further
        self.offsets: dict[str, int] = {}
        offset = 0
        for entry in self.entries:
            self.offsets[entry.name] = offset
            offset += entry.numel
        self.used = offset
        parts = reducer.zero.size if stage else 1
        length = -(-offset // parts)
        self.numel = length * parts
        self.start = (reducer.zero.rank if stage else 0) * length
        self.stop = self.start + length
        self.precision = precision
        self.seed = seed
        self.device = device
        self.fragments: list[Fragment] = []
        self._spans: list[tuple[int, int]] = []  # of the fragments, in `own`
        self._members: list[set[str]] = []  # the names of each fragment's parameters
        self._unpacked: dict[int, dict[str, Tensor]] = {}  # by fragment, moments of an optimizer that packs its state
        self.shelves = Shelves(tiers)
        away = stage == 3 and self.shelves.put("parameters", [_like(length, precision.compute)], self._take_own)
        self.common = bool(stage) and not away and reducer.link is not None
        self.gathers = stage == 3 and not self.common
        if self.gathers:
            self.values = torch.empty(self.numel, dtype=precision.compute, device=device)
        if not away:
            self._store_in(self.allocate())
            self.source = self.stored
        if not precision.mixed:
            self.master = self.own
        elif not self.shelves.put("master", [_like(length, precision.master)], self._take_master):
            self.master = torch.zeros(length, dtype=precision.master, device=device)
        self.landing: Flat | None = reducer.allocate(self.numel, precision.master, device) if stage < 2 else None
        if self.landing is not None:
            self.own_gradient = self.landing.tensor[self.start : self.stop]
        elif not self.shelves.put("gradients", [_like(length, precision.master)], self._take_gradient):
            self.own_gradient = torch.zeros(length, dtype=precision.master, device=device)
        for entry in self.entries:
            entry.value = self.view(self.values, entry)
        if self.gathers:
            self.values.untyped_storage().resize_(0)
        self.users = 0  # who needs the whole values now
        self.there = False  # whether values that are gathered are, or will be once what is on its way has come
        self._coming: Pending | None = None
        self.waiting = 0  # contributions that have yet to land
        self.pending: Pending | None = None
        self.scale = 1.0  # by which the last update clipped the gradient

    def allocate(self) -> Flat:
        """Memory for a version of `stored`. Collective over the gradient axis from stage 1 on."""
        dtype = self.precision.compute
        if not self.stage:
            return Flat(torch.zeros(self.numel, dtype=dtype, device=self.device), None)
        if self.common:
            return Flat(self.reducer.allocate_common(self.numel, dtype), None)
        return self.reducer.allocate(self.stop - self.start if self.gathers else self.numel, dtype, self.device)

    def _store_in(self, stored: Flat) -> None:
        self.stored = stored
        if not self.gathers:
            self.values = stored.tensor
        self.own = stored.tensor if self.gathers else self.values[self.start : self.stop]

    def move(self, stored: Flat, updated: bool) -> None:
        """Keep the values in other memory from now on, the newest weight version's.

        Args:
            updated: whether an update, and what follows it on all ranks, writes what this rank does not update itself.
        """
        before, own = self.stored, self.own
        self._store_in(stored)
        if not (updated or self.common):
            self.stored.tensor.copy_(before.tensor)
        elif not (updated and self.precision.mixed):
            self.own.copy_(own)
        if not self.precision.mixed:
            self.master = self.own

    def view(self, flat: Tensor, entry: Entry) -> Tensor:
        """The part of a flat tensor as long as this bucket that belongs to `entry`, in its shape."""
        start = self.offsets[entry.name]
        return flat[start : start + entry.numel].view(entry.shape)

    def overlap(self, start: int, stop: int) -> tuple[int, int]:
        """The part of elements `start` to `stop` that lies in this rank's fragment; empty ranges lie at `start`."""
        low, high = max(start, self.start), min(stop, self.stop)
        return (low, high) if low < high else (start, start)

    def make_fragments(self, optimizer: Optimizer) -> None:
        """Divide the rank's fragment into what the optimizer treats one by one: parameters, or, if it is elementwise,
        runs of parameters that it treats alike."""
        members = [[entry] for entry in self.entries]
        if optimizer.elementwise:
            runs = itertools.groupby(self.entries, lambda entry: _treatment(entry, optimizer))
            members = [list(run) for _, run in runs]
        for run in members:
            entry, alone = run[0], not optimizer.elementwise
            first, numel = self.offsets[entry.name], sum(other.numel for other in run)
            low, high = self.overlap(first, first + numel)
            span = (low - self.start, high - self.start) if low < high else (0, 0)
            override = override_of(optimizer.overrides, entry.name)
            fragment = Fragment(
                name=entry.name if alone else "",
                shape=entry.shape if alone else (numel,),
                start=low - first,
                stop=high - first,
                parameter=self._updated(span),
                gradient=self.own_gradient[slice(*span)],
                decay=entry.decay,
                split=next((split.dim for split in entry.layout.splits), None) if alone else None,
                global_shape=entry.layout.shape if alone else (numel,),
                lr_scale=override.lr_scale,
                weight_decay=override.weight_decay,
            )
            self.fragments.append(fragment)
            self._spans.append(span)
            self._members.append({other.name for other in run})
        self.shelves.put_states(self.fragments, optimizer, self.device)

    def _updated(self, span: tuple[int, int]) -> Tensor:
        """What an update changes of a fragment's parameters; without values where it is there only then."""
        if self.precision.rounds:
            return _like(span[1] - span[0], self.precision.master)
        return self.master[slice(*span)]

    @contextlib.contextmanager
    def ready(self, step: int, splits: Mapping[str, Place]) -> Iterator[list[Fragment]]:
        """The fragments, for an update inside, in the memory that their state is in; afterwards the values are the new
        ones."""
        with self.shelves.here(*KINDS):
            masters = self.own.to(self.precision.master) if self.precision.rounds else self.master
            with self.shelves.beside(masters, self.own_gradient) as (parameters, gradients):
                for fragment, span in zip(self.fragments, self._spans, strict=True):
                    fragment.parameter, fragment.gradient = parameters[slice(*span)], gradients[slice(*span)]
                yield self.fragments
            if self.precision.rounds:
                self._round(masters, step, splits)
            self.store()
        self._let_go()

    def _round(self, updated: Tensor, step: int, splits: Mapping[str, Place]) -> None:
        for entry in self.entries:
            first = self.offsets[entry.name]
            low, high = self.overlap(first, first + entry.numel)
            part = slice(low - self.start, high - self.start)
            if low < high:
                own, values = self.own[part], updated[part]
                round_into(own, values, entry.name, entry.layout, splits, low - first, self.seed, step)

    def _let_go(self) -> None:
        """What is not there is referred to by nobody, so that its memory is free."""
        for fragment, span in zip(self.fragments, self._spans, strict=True):
            fragment.parameter, fragment.gradient = self._updated(span), self.own_gradient[slice(*span)]

    def _take_own(self, tensors: list[Tensor]) -> None:
        (self.own,) = tensors
        self.stored = self.source = Flat(self.own, None)
        if not self.precision.mixed:
            self.master = self.own

    def _take_master(self, tensors: list[Tensor]) -> None:
        (self.master,) = tensors

    def _take_gradient(self, tensors: list[Tensor]) -> None:
        (self.own_gradient,) = tensors

    def squares(self) -> float:
        """This rank's part of the squared norm of the summed gradients; the parts of the gradient axis add up to it."""
        if not self.counted:
            return 0.0
        between = self.reducer.replicas if self.stage else self.reducer.axis
        with self.shelves.here("gradients", changed=False):
            return sum_of_squares(
                self.own_gradient[slice(*share(self.own_gradient.numel(), between.rank, between.size))]
            )

    def faulty(self) -> list[str]:
        """The parameters whose summed gradient is not finite in this rank's part of it."""
        if math.isfinite(self.squares()):
            return []
        found = []
        with self.shelves.here("gradients", changed=False):
            for entry in self.entries:
                low, high = self.overlap(self.offsets[entry.name], self.offsets[entry.name] + entry.numel)
                if not bool(self.own_gradient[low - self.start : high - self.start].isfinite().all()):
                    found.append(entry.name)
        return found

    def memory(self) -> dict[str, int]:
        """Bytes held between steps, by kind."""
        found = {
            "parameters": [self.values if self.stage < 3 else self.own],
            "gradients": [self.landing.tensor if self.landing is not None else self.own_gradient],
            "optimizer": [moment for fragment in self.fragments for moment in fragment.state.values()],
        }
        found["optimizer"] += [self.master] if self.precision.mixed else []
        # What is on disk is not held.
        return {kind: sum(held.nbytes for held in tensors if not held.is_meta) for kind, tensors in found.items()}

    # Values at stage 3

    def gather_from(self, source: Flat) -> None:
        """Gather another version from now on."""
        if source is not self.source:
            self.forget()
            self.source = source

    def prefetch(self) -> None:
        """Begin to make the whole values be there; they stay until `release` or `forget`."""
        if self.gathers and not self.there:
            self._make_room()
            with self.shelves.here("parameters", changed=False):
                # Through .data: what autograd has saved sees the same values again, so it need not know.
                self._coming = self.reducer.gather(self.source, self.values.data)

    def acquire(self, fill: bool = True) -> None:
        """Make the whole values be there until `release`."""
        self.users += 1
        if not self.gathers:
            return
        if fill:
            self.prefetch()
        elif not self.there:
            self._make_room()
            self.values.zero_()
        if self._coming is not None:
            self._coming.wait()
            self._coming = None

    def release(self, keep: bool = False) -> None:
        """One user fewer; without any the memory is given back, unless it is to be kept for the next."""
        self.users -= 1
        if not keep:
            self.forget()

    def forget(self) -> None:
        """Give the memory of gathered values back if nobody uses them: they are old, or memory is short."""
        if not self.there or self.users:
            return
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        self.values.untyped_storage().resize_(0)
        self.there = False

    def _make_room(self) -> None:
        self.there = True
        storage = self.values.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.numel * self.values.element_size())

    def begin_values(self) -> Tensor:
        """Memory for the first values of all parameters, (N,), in the master format; to be filled and given to
        `keep_values`."""
        return (
            torch.zeros(self.numel, dtype=self.precision.master, device=self.device)
            if self.precision.converts
            else self.values
        )

    def keep_values(self, whole: Tensor) -> None:
        """Take this rank's part of the first values."""
        if self.precision.converts:
            self.values.copy_(whole)
        if self.stage == 3 or self.precision.mixed:
            with self.shelves.here("parameters", "master"):
                self.master.copy_(whole[self.start : self.stop])
                self.store()

    def store(self) -> None:
        """Take over the masters after an update, or after they were loaded."""
        if self.precision.mixed:
            with self.shelves.here("parameters", "master"):
                self.own.copy_(self.master)

    def whole(self, own: Tensor) -> Tensor:
        """All ranks' fragments `own` of something as long as this bucket. Collective over the zero axis."""
        if not self.stage:
            return own
        found = torch.empty(self.numel, dtype=own.dtype, device=own.device)
        collectives.all_gather(own, found, self.reducer.zero)
        return found

    # State by name

    def value_pieces(self, entry: Entry, values: Tensor, places: dict[str, Place]) -> Pieces | Tensor:
        """One parameter's values for a checkpoint; a view in its shape where this rank holds all of it."""
        first = self.offsets[entry.name]
        if self.stage < 3 and not self.precision.mixed:
            low, high = first, first + entry.numel
            own = values[low:high]
        else:
            low, high = self.overlap(first, first + entry.numel)

            def of(master: Tensor) -> Pieces:
                part = master[low - self.start : high - self.start] if low < high else master[:0]
                return pieces_of(entry.layout, places, part, low - first, high - first)

            if self.master.is_meta:
                return self._away(of, "master" if self.precision.mixed else "parameters", 0)
            own = self.master[low - self.start : high - self.start] if low < high else self.master[:0]
        if own.numel() == entry.numel and not entry.layout.splits:
            return own.view(entry.shape)
        return pieces_of(entry.layout, places, own, low - first, high - first)

    def moment_pieces(self, entry: Entry, optimizer: Optimizer, places: dict[str, Place]) -> dict[str, Pieces | Tensor]:
        """One parameter's optimizer state for a checkpoint, by moment. After loading in place `take_moments` is due."""
        first = self.offsets[entry.name]
        low, high = self.overlap(first, first + entry.numel)
        number = next(index for index, names in enumerate(self._members) if entry.name in names)
        fragment, span = self.fragments[number], self._spans[number]
        moments = fragment.state
        if isinstance(optimizer, Packed):
            if number not in self._unpacked:
                with self.shelves.here("optimizer", changed=False):
                    near = self.device if self.shelves.of("optimizer") is None else torch.device("cpu")
                    self._unpacked[number] = optimizer.moments(standing_in(fragment, near))
            moments = self._unpacked[number]
        begin = low - self.start - span[0] if low < high else 0
        origin = sum(len(other.state) for other in self.fragments[:number])
        found: dict[str, Pieces | Tensor] = {}
        for index, (name, moment) in enumerate(moments.items()):
            kept = optimizer.factored.get(name)

            def of(moment: Tensor, kept: tuple[int, ...] | None = kept) -> Pieces:
                if kept is not None:
                    return pieces_of(_reduced(entry.layout, kept), places, moment.reshape(-1), 0, moment.numel())
                return pieces_of(entry.layout, places, moment[begin : begin + (high - low)], low - first, high - first)

            if moment.is_meta:
                found[name] = self._away(of, "optimizer", origin + index)
            elif kept is None and high - low == entry.numel and not entry.layout.splits:
                found[name] = moment[begin : begin + (high - low)].view(entry.shape)
            else:
                found[name] = of(moment)
        return found

    def _away(self, of: Callable[[Tensor], Pieces], kind: str, index: int) -> Pieces:
        """Pieces of a tensor on a shelf, brought when they are asked for."""
        shelf = self.shelves.of(kind)
        assert shelf is not None
        return Away.of(of(shelf.away[index]), lambda: of(shelf.peek(index)))

    def begin_state(self) -> None:
        """`moment_pieces` is about to be called anew: state that is kept packed has changed since."""
        self._unpacked.clear()

    def take_moments(self, optimizer: Optimizer) -> None:
        """Take what was loaded in place into what `moment_pieces` gave."""
        if isinstance(optimizer, Packed):
            with self.shelves.here("optimizer"):
                for number, moments in self._unpacked.items():
                    optimizer.pack(self.fragments[number], moments)
        self._unpacked.clear()


def _treatment(entry: Entry, optimizer: Optimizer) -> tuple[bool, float, float]:
    """What two parameters must have in common to be updated in one run, in the order in which a bucket holds them."""
    override = override_of(optimizer.overrides, entry.name)
    return not entry.decay, override.lr_scale, -1.0 if override.weight_decay is None else override.weight_decay


def _like(length: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(length, dtype=dtype, device="meta")


def _reduced(layout: Layout, kept: tuple[int, ...]) -> Layout:
    """The layout of a statistic that keeps some of a parameter's dimensions."""
    splits = tuple(
        type(split)(split.axis, kept.index(split.dim), split.sections) for split in layout.splits if split.dim in kept
    )
    return Layout(tuple(layout.shape[dim] for dim in kept), splits)


class Buckets:
    """All buckets of one model chunk.

    Args:
        entries: the chunk's trainable parameters, in the order the model registers them.
        stage: of ZeRO.
        precision, device: of values, gradients and state.
        reducer: for the sums over the gradient axis.
        further: by an entry's `extra`, the axes its gradient is summed over after that.
        optimizer: whose state to hold; None holds none.
        bucket_bytes: a bucket is closed once it is at least so large.
        puts_off: whether a schedule computes weight gradients apart from input gradients.
        tiers: what lives elsewhere, by key of `plan.offload`.
        seed: of stochastic rounding.
    """

    def __init__(
        self,
        entries: list[Entry],
        stage: int,
        precision: Precision,
        device: torch.device,
        reducer: Reducer,
        further: dict[str, Sequence[Axis]],
        optimizer: Optimizer | None,
        bucket_bytes: int = BUCKET_BYTES,
        puts_off: bool = False,
        tiers: dict[str, Tier] | None = None,
        seed: int = 0,
    ) -> None:
        self.stage = stage
        self.reducer = reducer
        # Backward fills the last layers first.
        self.buckets = [
            Bucket(group, stage, precision, device, reducer, further[group[0].extra], optimizer, tiers or {}, seed)
            for group in _groups(reversed(entries), precision.master.itemsize, bucket_bytes, by_unit=stage == 3)
        ]
        self._brings = bool(tiers) or precision.rounds
        self._home: dict[str, tuple[int, Bucket]] = {}
        for index, bucket in enumerate(self.buckets):
            for entry in bucket.entries:
                self._home[entry.name] = (index, bucket)
                view = bucket.view(bucket.landing.tensor, entry) if bucket.landing is not None else None
                find = self._open if view is None else None
                entry.slot = Slot(entry.name, entry.direct, self._landed, view, find, precision.converts)
            if optimizer is not None:
                bucket.make_fragments(optimizer)
        self._pool: list[Flat] = []
        self._busy: list[Pending | None] = []
        if stage >= 2 and self.buckets:
            largest = max(bucket.numel for bucket in self.buckets)
            count = min(LANDING_BUFFERS, len(self.buckets))
            self._pool = [reducer.allocate(largest, precision.master, device) for _ in range(count)]
            self._busy = [None] * count
        self._private: dict[
            int, Tensor
        ] = {}  # by bucket, where gradients land while its buffer of the pool may be another's
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
                with bucket.shelves.here("gradients"):
                    bucket.own_gradient.zero_()
        self._begin_pass()

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
        with bucket.shelves.here("gradients"):  # the sum itself holds on to them until it is done
            bucket.pending = bucket.reducer.reduce_scatter(_head(flat, bucket.numel), bucket.own_gradient)
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

    def update(
        self,
        optimizer: Optimizer,
        lr: float,
        step: int,
        scale: "Scale",
        splits: dict[str, Axis],
    ) -> None:
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
            for group, following in zip(groups, [*groups[1:], []], strict=True):
                for bucket in following:
                    bucket.shelves.prefetch(*KINDS)
                of_loss = (scale.blocks[group[0].block] or 1.0) if scale.blocks else scale.loss
                with contextlib.ExitStack() as stack:
                    fragments = [part for bucket in group for part in stack.enter_context(bucket.ready(step, splits))]
                    for sums in optimizer.update(fragments, lr=lr, step=step, scale=scale.clip / of_loss):
                        for split in (False, True):
                            chosen = [request.tensor for request in sums if request.split == split]
                            _sum_together(chosen, [*axes, *splits.values()] if split else axes)
                    for bucket in group:
                        bucket.scale = of_loss if bucket.shelves.keeps_gradients else scale.clip

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
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):  # type: ignore[no-untyped-call]
        tensor.copy_(part.view_as(tensor))


def _groups(entries: Iterable[Entry], itemsize: int, bucket_bytes: int, by_unit: bool) -> Iterator[list[Entry]]:
    """Consecutive entries of at least `bucket_bytes`; those that need further sums, are counted elsewhere, have
    another loss scale or, `by_unit`, are gathered with another unit, apart from the others."""
    open_groups: dict[tuple[str, bool, int, int], list[Entry]] = {}
    for entry in entries:
        key = (entry.extra, entry.counted, entry.unit if by_unit else 0, entry.block)
        group = open_groups.setdefault(key, [])
        group.append(entry)
        if not by_unit and sum(other.numel for other in group) * itemsize >= bucket_bytes:
            yield open_groups.pop(key)
    yield from (group for group in open_groups.values() if group)
