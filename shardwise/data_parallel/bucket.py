"""A bucket: parameters that are stored, summed and updated together, and this rank's fragment of them."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.collectives import sum_of_squares
from shardwise.data_parallel.entry import Entry
from shardwise.data_parallel.reducer import Flat, Pending, Reducer
from shardwise.layout import Place, share
from shardwise.memory.offload import Shelves
from shardwise.memory.offload_tier import Tier
from shardwise.memory.precision import Precision
from shardwise.memory.rounding import round_into
from shardwise.mesh import Axis
from shardwise.optimizers.optimizer import Fragment, Optimizer, override_of

# What an update needs of a bucket, of what may live elsewhere.
KINDS = ("parameters", "master", "gradients", "optimizer")


@dataclass(frozen=True)
class Storage:
    """How parameters, their gradients and their optimizer state are kept.

    Args:
        stage: of ZeRO.
        precision, device: of values, gradients and state.
        reducer: for the sums over the gradient axis.
        optimizer: whose state to hold; None holds none.
        tiers: what lives elsewhere, by key of `plan.offload`.
        seed: of stochastic rounding.
    """

    stage: int
    precision: Precision
    device: torch.device
    reducer: Reducer
    optimizer: Optimizer | None
    tiers: dict[str, Tier]
    seed: int

    def treatment(self, entry: Entry) -> tuple[bool, float, float]:
        """What two parameters must have in common to be updated in one run, in the order in which a bucket holds
        them."""
        if self.optimizer is None:
            return (False, 1.0, -1.0)
        override = override_of(self.optimizer.overrides, entry.name)
        return not entry.decay, override.lr_scale, -1.0 if override.weight_decay is None else override.weight_decay


class Bucket:
    """Parameters that are stored, summed and updated together.

    Args:
        entries: the parameters.
        storage: how they are kept.
        further: the axes that their gradients are summed over after the gradient axis.

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
        fragments: what the optimizer updates one by one: a parameter, or, if it is elementwise, a run of them.
        spans: by fragment, where in `own` it is.
        members: by fragment, the names of its parameters.
    """

    def __init__(self, entries: list[Entry], storage: Storage, further: Sequence[Axis]) -> None:
        stage, reducer, precision, device = storage.stage, storage.reducer, storage.precision, storage.device
        # Those that the optimizer treats alike side by side.
        self.entries = sorted(entries, key=storage.treatment)
        self.counted = entries[0].counted
        self.unit = entries[0].unit
        self.block = entries[0].block
        self.storage = storage
        self.stage = stage
        self.reducer = reducer
        self.precision = precision
        self.device = device
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
        self.fragments: list[Fragment] = []
        self.spans: list[tuple[int, int]] = []
        self.members: list[set[str]] = []
        self.shelves = Shelves(storage.tiers)
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
        # Whether the last update saw copies of the gradients, so that these stay as they were.
        self.keeps_gradients = False
        if storage.optimizer is not None:
            self._make_fragments(storage.optimizer)

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

    def _make_fragments(self, optimizer: Optimizer) -> None:
        alone = not optimizer.elementwise
        runs = itertools.groupby(self.entries, self.storage.treatment)
        for run in [[entry] for entry in self.entries] if alone else [list(run) for _, run in runs]:
            entry = run[0]
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
                counted=entry.first or not entry.layout.splits,
                largest=entry.largest if alone else 0,
                lr_scale=override.lr_scale,
                weight_decay=override.weight_decay,
            )
            self.fragments.append(fragment)
            self.spans.append(span)
            self.members.append({other.name for other in run})
        self.shelves.put_states(self.fragments, optimizer, self.device)

    def clear_gradients(self) -> None:
        """Begin a new sum in the fragment of the gradients."""
        copied = self.shelves.copied("gradients")
        if copied is not None:
            copied.clear()
            return
        with self.shelves.here("gradients"):
            self.own_gradient.zero_()

    def sum_gradients(self, landed: Flat) -> Pending:
        """Begin to add the sum of what has landed, as long as this bucket, to the fragment of the gradients."""
        copied = self.shelves.copied("gradients")
        if copied is not None:
            return self.reducer.reduce_scatter(landed, copied.adding)
        with self.shelves.here("gradients"):  # the sum itself holds on to them until it is done
            return self.reducer.reduce_scatter(landed, self.own_gradient)

    def _updated(self, span: tuple[int, int]) -> Tensor:
        """What an update changes of a fragment's parameters; without values where it is there only then."""
        if self.precision.rounds:
            return _like(span[1] - span[0], self.precision.master)
        return self.master[slice(*span)]

    @contextlib.contextmanager
    def ready(self, step: int, splits: Mapping[str, Place]) -> Iterator[list[Fragment]]:
        """The fragments, for an update inside, in the memory that their state is in; afterwards the values are the new
        ones."""
        host = self.shelves.updates_on_host
        # What is brought as a copy stays as it was, and is overwritten whole where there is a master.
        kept = () if host or self.shelves.copied("gradients") is None else ("gradients",)
        written = ("parameters",) if self.precision.mixed and self.shelves.copied("parameters") is not None else ()
        changed = [kind for kind in KINDS if kind not in (*kept, *written)]
        with self.shelves.here(*changed, host=host), self.shelves.here(*kept, changed=False):
            masters = self.own.to(self.precision.master) if self.precision.rounds else self.master
            with self.shelves.beside(masters, self.own_gradient) as (parameters, gradients):
                self.keeps_gradients = bool(kept) or gradients is not self.own_gradient
                for fragment, span in zip(self.fragments, self.spans, strict=True):
                    fragment.parameter, fragment.gradient = parameters[slice(*span)], gradients[slice(*span)]
                yield self.fragments
            if self.precision.rounds:
                self._round(masters, step, splits)
            self.store(host)
        self._let_go()

    def _round(self, updated: Tensor, step: int, splits: Mapping[str, Place]) -> None:
        for entry in self.entries:
            first = self.offsets[entry.name]
            low, high = self.overlap(first, first + entry.numel)
            part = slice(low - self.start, high - self.start)
            if low < high:
                own, values = self.own[part], updated[part]
                round_into(own, values, entry.name, entry.layout, splits, low - first, self.storage.seed, step)

    def _let_go(self) -> None:
        """What is not there is referred to by nobody, so that its memory is free."""
        for fragment, span in zip(self.fragments, self.spans, strict=True):
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
        with self.shelves.here("gradients", changed=False, host=True):
            return sum_of_squares(
                self.own_gradient[slice(*share(self.own_gradient.numel(), between.rank, between.size))]
            )

    def faulty(self) -> list[str]:
        """The parameters whose summed gradient is not finite in this rank's part of it."""
        if math.isfinite(self.squares()):
            return []
        found = []
        with self.shelves.here("gradients", changed=False, host=True):
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
        if not self.gathers or self.there:
            return
        self._make_room()
        # Through .data: what autograd has saved sees the same values again, so it need not know.
        values, copied = self.values.data, self.shelves.copied("parameters")
        if copied is not None:
            own = values[self.start : self.stop]
            with copied.filled([own]):
                self._coming = self.reducer.gather(Flat(own, None), values)
            return
        with self.shelves.here("parameters", changed=False):
            self._coming = self.reducer.gather(self.source, values)

    def read_ahead(self) -> None:
        """Begin to read what `prefetch` will copy to the device, if it is on disk."""
        copied = self.shelves.copied("parameters")
        if copied is not None and not self.there:
            copied.prefetch_near()

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
            copied = self.shelves.copied("parameters")
            if copied is not None:
                copied.need()
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
            with self.shelves.here("parameters", "master", host=True):
                self.master.copy_(whole[self.start : self.stop])
                self.store()

    def store(self, host: bool = True) -> None:
        """Take over the masters after an update, or after they were loaded.

        Args:
            host: whether those that live elsewhere are taken from host memory, or from copies on the device.
        """
        if not self.precision.mixed:
            return
        copied = self.shelves.copied("parameters")
        if copied is not None:
            with self.shelves.here("master", changed=False, host=host):
                copied.write([self.master])
            return
        with self.shelves.here("parameters", "master", host=host):
            self.own.copy_(self.master)

    def whole(self, own: Tensor) -> Tensor:
        """All ranks' fragments `own` of something as long as this bucket. Collective over the zero axis."""
        if not self.stage:
            return own
        found = torch.empty(self.numel, dtype=own.dtype, device=own.device)
        collectives.all_gather(own, found, self.reducer.zero)
        return found


def _like(length: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(length, dtype=dtype, device="meta")
