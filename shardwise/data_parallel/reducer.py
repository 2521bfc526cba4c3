"""Sums flat gradients over the data-parallel ranks, one after the other, beside the computation; and exchanges what
ZeRO divides."""

import copy
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.host_memory import HostLink, HostMemory, common_memory
from shardwise.layout import share
from shardwise.mesh import Axis, Mesh


class Pending:
    """Work under way. `wait` returns when it is done, and raises what went wrong."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._stream: torch.Stream | None = None

    def wait(self) -> None:
        """Return when it is done.

        Raises:
            RuntimeError: what went wrong, a peer that is gone for instance.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)

    def follow(self, stream: torch.Stream) -> None:
        """Have whoever waits, on an accelerator, wait for what this stream has been given by then."""
        self._stream = stream

    def settle(self, work: Callable[[], None]) -> None:
        """Do the work here and now; its error is kept for whoever waits."""
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            self._error = error
        self._done.set()


# Brings a tensor that is there inside.
Into = Callable[[], AbstractContextManager[Tensor]]


@dataclass(frozen=True)
class Flat:
    """A flat tensor, and the memory behind it if other ranks see it too."""

    tensor: Tensor
    host: HostMemory | None


class Lane:
    """Work that runs beside the computation, in the order in which it is started: on an accelerator's side stream, else
    on a thread."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        self._tasks: _Tasks = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if self._stream is None:
            self._thread = threading.Thread(target=_serve, args=(self._tasks,), name=name, daemon=True)
            self._thread.start()
            self._release = weakref.finalize(self, self._tasks.put, None)
            self._release.atexit = False

    def start(self, work: Callable[[], None]) -> Pending:
        """Begin the work, on an accelerator after what the current stream has been given so far."""
        pending = Pending()
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())
            pending.follow(self._stream)
            with self._stream:
                pending.settle(work)
        else:
            self._tasks.put((pending, work))
        return pending

    def close(self) -> None:
        """Stop once what was started is done."""
        if self._thread is not None:
            self._release()
            self._thread.join()
            self._thread = None


class Reducer:
    """Sums over the mesh's gradient axis (replicate x shard x context), whole or divided over its zero axis (shard x
    context), in the order in which they are started, which must be the same on all ranks; and gathers what is divided.

    Ranks of one machine without an accelerator add up memory they share; elsewhere torch.distributed does it. Either
    way beside the computation.

    Args:
        mesh: the job's mesh. Collective over the job.
        link: whether ranks of one machine may share memory.
        sent: the number format that gradients travel in to be summed; None leaves their own.

    Attributes:
        elements: what this rank would have sent by a ring, so far: n (R - 1) / R for a gather or a divided sum of n
            elements over R ranks, twice that for a whole sum. What is read in shared memory moves nothing.
        gradient_bytes: those that were gradients, in bytes.
        gathers: gathers so far.
    """

    def __init__(self, mesh: Mesh, link: bool = True, sent: torch.dtype | None = None) -> None:
        self.axis, self.zero, self.replicas = mesh.axis("gradient"), mesh.axis("zero"), mesh.axis("replicate")
        wanted = link and self.axis.size > 1 and mesh.device_type == "cpu"
        self.link = HostLink.connect(self.axis) if wanted else None
        self.sent = sent
        self.elements = 0.0
        self.gradient_bytes = 0.0
        self.gathers = 0
        # Groups of their own, since collectives of either lane run beside the main thread's.
        self._axis, self._zero, self._replicas, self._gathered = self.axis, self.zero, self.replicas, self.zero
        world = mesh.axis("world")
        if any(collectives.all_gather_object(self.axis.size > 1 and self.link is None, world)):
            axes = (self.axis, self.zero, self.replicas, self.zero)
            self._axis, self._zero, self._replicas, self._gathered = (
                replace(axis, group=mesh.private_group(axis)) for axis in axes
            )
        several = self.axis.size > 1
        self._sums = Lane(mesh.device(), "shardwise-reducer") if several else None
        apart = self.zero.size > 1 and self.link is None
        self._fetches = Lane(mesh.device(), "shardwise-gatherer") if apart else None
        # A reducer that nobody closes takes its sockets with it.
        self._release = weakref.finalize(self, _close, self.link)
        self._release.atexit = False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Flat:
        """A zeroed flat tensor, visible to the other ranks where they share memory. Collective over the gradient
        axis."""
        if self.link is None:
            return Flat(torch.zeros(numel, dtype=dtype, device=device), None)
        memory = HostMemory(self.link, numel, dtype)
        return Flat(memory.mine, memory)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat tensor that is one memory for all ranks of the zero axis: what one writes all have. Only where
        there is a `link`. Collective over the gradient axis."""
        assert self.link is not None
        return common_memory(self.link, self.replicas.rank * self.zero.size, numel, dtype)

    def all_reduce(self, flat: Flat) -> Pending:
        """Begin to sum `flat` over the gradient axis, in place on all ranks."""
        host = flat.host
        elements = _ring(flat.tensor.numel(), self.axis.size, 2)
        if self.axis.size == 1:
            return self._start(None)
        sent = self._count(elements, flat)
        if host is None and sent is not None:
            return self._start(lambda: collectives.all_reduce_in(flat.tensor, self._axis, sent), elements)
        if host is None:
            return self._start(lambda: _ignore(collectives.all_reduce(flat.tensor, self._axis)), elements)
        start, stop = share(flat.tensor.numel(), self.axis.rank, self.axis.size)
        through = () if sent is None else (sent, sent)
        return self._start(
            lambda: host.sum_into(start, stop, [tensor[start:stop] for tensor in host.tensors], through=through),
            elements,
        )

    def reduce_scatter(self, flat: Flat, into: Tensor | Into | None = None) -> Pending:
        """Begin to sum `flat` over the gradient axis; this rank gets its fragment of the zero axis alone: in place, or
        added to `into`, a tensor or what brings one when its turn has come."""
        bring = _given(into) if isinstance(into, Tensor) else into
        size, rank = self.zero.size, self.zero.rank
        length = flat.tensor.numel() // size
        start, stop = rank * length, (rank + 1) * length
        own = flat.tensor[start:stop]
        host = flat.host
        elements = _ring(flat.tensor.numel(), size) + _ring(length, self.replicas.size, 2)
        if self.axis.size == 1:
            return self._start(partial(_add, own, bring) if bring is not None else None)
        sent = self._count(elements, flat)
        through = () if sent is None else (sent,)
        if host is None:

            def exchange() -> None:
                if sent is None:
                    part = collectives.reduce_scatter(flat.tensor, self._zero)
                    collectives.all_reduce(part, self._replicas)
                else:
                    part = collectives.reduce_scatter_in(flat.tensor, self._zero, sent)
                    if self._replicas.size > 1:
                        collectives.all_reduce_in(part, self._replicas, sent)
                _ignore(own.copy_(part)) if bring is None else _add(part, bring)

            return self._start(exchange, elements)
        if bring is not None:

            def add() -> None:
                with bring() as target:
                    host.sum_into(start, stop, [target], add=True, through=through)

            return self._start(add, elements)
        # The replicas of a fragment share the work, and give each other the result.
        low, high = share(length, self.replicas.rank, self.replicas.size)
        low, high = start + low, start + high
        copies = [host.tensors[replica * size + rank][low:high] for replica in range(self.replicas.size)]
        return self._start(lambda: host.sum_into(low, high, copies, through=through), elements)

    def _count(self, elements: float, flat: Flat) -> torch.dtype | None:
        """Count elements of gradients that travel. Returns the format they travel in if it is not their own."""
        sent = None if self.sent == flat.tensor.dtype else self.sent
        self.gradient_bytes += elements * (sent or flat.tensor.dtype).itemsize
        return sent

    def meet(self) -> None:
        """Where memory is shared: wait until all ranks have written what the others will read. No sum may be under
        way."""
        if self.link is not None:
            self.link.wait_for_all()

    def gather(self, own: Flat, full: Tensor) -> Pending:
        """Begin to fill `full` with the fragments `own` of all ranks of the zero axis. After `meet`. In one order on
        all of them."""
        self.gathers += 1
        self.elements += _ring(full.numel(), self.zero.size)
        host = own.host
        if host is None and self._fetches is not None:
            return self._fetches.start(lambda: self._gather(own.tensor, full))
        pending = Pending()
        if host is None:
            pending.settle(lambda: collectives.all_gather(own.tensor, full, self.zero))
            if full.device.type != "cpu":
                pending.follow(torch.accelerator.current_stream())
        else:
            parts = [host.tensors[self.replicas.rank * self.zero.size + rank] for rank in range(self.zero.size)]
            pending.settle(lambda: _ignore(torch.cat(parts, out=full)))
        return pending

    def _gather(self, own: Tensor, full: Tensor) -> None:
        collectives.all_gather(own, full, self._gathered)
        if own.device.type != "cpu":  # it may be given back before this stream has read it
            own.record_stream(torch.accelerator.current_stream())

    def refresh(self, full: Flat) -> None:
        """Fill `full`, of which every rank of the zero axis has updated its fragment, with the others' fragments. After
        `meet`."""
        parts = full.tensor.view(self.zero.size, -1)
        self.elements += _ring(full.tensor.numel(), self.zero.size)
        if full.host is None:
            collectives.all_gather(parts[self.zero.rank], full.tensor, self.zero)
            return
        for rank, part in enumerate(parts):
            if rank != self.zero.rank:
                theirs = full.host.tensors[self.replicas.rank * self.zero.size + rank]
                part.copy_(theirs.view(parts.shape)[rank])

    def alone(self) -> "Reducer":
        """A reducer over this rank alone: what a plan computes whose gradients are not summed."""
        single = copy.copy(self)
        single.axis = Axis("gradient", 0, 1, (self.axis.ranks[self.axis.rank],))
        single._sums = None
        return single

    def _start(self, work: Callable[[], None] | None, elements: float = 0.0) -> Pending:
        self.elements += elements
        if work is not None and self._sums is not None:
            return self._sums.start(work)
        pending = Pending()
        pending.settle(work or (lambda: None))
        return pending

    def leave(self) -> None:
        """Tell the peers that this rank will not come again: an error has ended the work midway."""
        if self.link is not None:
            self.link.leave()

    def close(self) -> None:
        """Stop the threads and close the sockets."""
        for lane in (self._sums, self._fetches):
            if lane is not None:
                lane.close()
        self._release()
        self.link = None


_Tasks = queue.SimpleQueue[tuple[Pending, Callable[[], None]] | None]


def _serve(tasks: "_Tasks") -> None:
    while (task := tasks.get()) is not None:
        pending, work = task
        pending.settle(work)
        del task, pending, work  # a reducer they refer to may be let go of while this waits


def _close(link: HostLink | None) -> None:
    if link is not None:
        link.close()


def _ring(numel: int, size: int, times: int = 1) -> float:
    return times * numel * (size - 1) / size


def _given(tensor: Tensor) -> Into:
    return lambda: nullcontext(tensor)


def _add(part: Tensor, bring: Into) -> None:
    with bring() as target:
        target.add_(part)


def _ignore(value: object) -> None:
    pass
