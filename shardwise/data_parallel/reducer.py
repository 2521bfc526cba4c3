"""Sums flat gradients over the data-parallel ranks, one after the other, beside the computation; and exchanges what
ZeRO divides."""

import copy
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.collectives import HostLink, HostMemory, common_memory
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

    def settle(self, work: Callable[[], None]) -> None:
        """Do the work here and now; its error is kept for whoever waits."""
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            self._error = error
        self._done.set()


@dataclass(frozen=True)
class Flat:
    """A flat tensor, and the memory behind it if other ranks see it too."""

    tensor: Tensor
    host: HostMemory | None


class Reducer:
    """Sums over the mesh's gradient axis (replicate x shard x context), whole or divided over its zero axis (shard x
    context), in the order in which they are started, which must be the same on all ranks.

    Ranks of one machine without an accelerator add up memory they share; elsewhere torch.distributed does it. Either
    way beside the
    computation: on a thread, or on an accelerator's side stream.

    Args:
        mesh: the job's mesh. Collective over the job.
        link: whether ranks of one machine may share memory.
    """

    def __init__(self, mesh: Mesh, link: bool = True) -> None:
        self.axis, self.zero, self.replicas = mesh.axis("gradient"), mesh.axis("zero"), mesh.axis("replicate")
        wanted = link and self.axis.size > 1 and mesh.device_type == "cpu"
        self.link = HostLink.connect(self.axis) if wanted else None
        # Groups of its own, since the thread's collectives run beside the main thread's.
        self._axis, self._zero, self._replicas = self.axis, self.zero, self.replicas
        world = mesh.axis("world")
        if any(collectives.all_gather_object(self.axis.size > 1 and self.link is None, world)):
            axes = (self.axis, self.zero, self.replicas)
            self._axis, self._zero, self._replicas = (replace(axis, group=mesh.private_group(axis)) for axis in axes)
        self._stream = torch.Stream(mesh.device()) if mesh.device_type != "cpu" else None
        self._tasks: queue.SimpleQueue[tuple[Pending, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if self.axis.size > 1 and self._stream is None:
            self._thread = threading.Thread(target=_serve, args=(self._tasks,), name="shardwise-reducer", daemon=True)
            self._thread.start()
            # A reducer that nobody closes takes its thread and its sockets with it.
            self._release = weakref.finalize(self, _let_go, self._tasks, self.link)
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
        if self.axis.size == 1:
            return self._start(None)
        if host is None:
            return self._start(lambda: _ignore(collectives.all_reduce(flat.tensor, self._axis)))
        start, stop = share(flat.tensor.numel(), self.axis.rank, self.axis.size)
        return self._start(lambda: host.sum_into(start, stop, [tensor[start:stop] for tensor in host.tensors]))

    def reduce_scatter(self, flat: Flat, into: Tensor | None = None) -> Pending:
        """Begin to sum `flat` over the gradient axis; this rank gets its fragment of the zero axis alone: in place, or
        added to `into`."""
        size, rank = self.zero.size, self.zero.rank
        length = flat.tensor.numel() // size
        start, stop = rank * length, (rank + 1) * length
        own = flat.tensor[start:stop]
        host = flat.host
        if self.axis.size == 1:
            return self._start(lambda: _ignore(into.add_(own)) if into is not None else None)
        if host is None:

            def exchange() -> None:
                part = collectives.reduce_scatter(flat.tensor, self._zero)
                collectives.all_reduce(part, self._replicas)
                own.copy_(part) if into is None else into.add_(part)

            return self._start(exchange)
        if into is not None:
            return self._start(lambda: host.sum_into(start, stop, [into], add=True))
        # The replicas of a fragment share the work, and give each other the result.
        low, high = share(length, self.replicas.rank, self.replicas.size)
        low, high = start + low, start + high
        copies = [host.tensors[replica * size + rank][low:high] for replica in range(self.replicas.size)]
        return self._start(lambda: host.sum_into(low, high, copies))

    def meet(self) -> None:
        """Where memory is shared: wait until all ranks have written what the others will read. No sum may be under
        way."""
        if self.link is not None:
            self.link.wait_for_all()

    def gather(self, own: Flat, full: Tensor) -> None:
        """Fill `full` with the fragments `own` of all ranks of the zero axis. After `meet`."""
        parts = full.view(self.zero.size, -1)
        if own.host is None:
            collectives.all_gather(own.tensor, full, self.zero)
            return
        for rank, part in enumerate(parts):
            part.copy_(own.host.tensors[self.replicas.rank * self.zero.size + rank])

    def refresh(self, full: Flat) -> None:
        """Fill `full`, of which every rank of the zero axis has updated its fragment, with the others' fragments. After
        `meet`."""
        parts = full.tensor.view(self.zero.size, -1)
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
        single._thread = None
        return single

    def _start(self, work: Callable[[], None] | None) -> Pending:
        pending = Pending()
        if work is None or (self._thread is None and self._stream is None):
            pending.settle(work or (lambda: None))
        elif self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())
            pending._stream = self._stream
            with self._stream:
                pending.settle(work)
        else:
            self._tasks.put((pending, work))
        return pending

    def close(self) -> None:
        """Stop the thread and close the sockets."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None
            self._release()
            self.link = None


_Tasks = queue.SimpleQueue[tuple[Pending, Callable[[], None]] | None]


def _serve(tasks: "_Tasks") -> None:
    while (task := tasks.get()) is not None:
        pending, work = task
        pending.settle(work)
        del task, pending, work  # a reducer they refer to may be let go of while this waits


def _let_go(tasks: "_Tasks", link: HostLink | None) -> None:
    tasks.put(None)
    if link is not None:
        link.close()


def _ignore(value: object) -> None:
    pass
