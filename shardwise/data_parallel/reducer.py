"""Sums flat gradients over the data-parallel ranks, one after the other, beside the computation."""

import copy
import queue
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives import HostLink, HostMemory, sum_of_squares
from shardwise.layout import share
from shardwise.mesh import Axis, Mesh


class Pending:
    """A sum under way. `wait` returns when it is there, and raises what went wrong; `square` then holds this rank's
    share of the result's squared norm (all ranks' shares add up to it)."""

    def __init__(self, finish: Callable[[], float] | None = None) -> None:
        self._finish = finish
        self._done = threading.Event()
        self._error: BaseException | None = None
        self.square = 0.0

    def wait(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self.square = finish()
            return
        self._done.wait()
        if self._error is not None:
            raise self._error

    def settle(self, work: Callable[[], float]) -> None:
        try:
            with torch.no_grad():
                self.square = work()
        except BaseException as error:
            self._error = error
        self._done.set()


class Reducer:
    """Sums over one axis in the order they are started, which must be the same on all its ranks.

    On one machine without an accelerator a thread adds up memory that the ranks share; elsewhere the backend's own
    asynchronous all-reduce runs.

    Args:
        mesh: the job's mesh.
        axis: the ranks to sum over.
        squares: whether to compute the squares' sums (for the gradient norm) as well.
        link: whether ranks of one machine may share memory.
    """

    def __init__(self, mesh: Mesh, axis: Axis, squares: bool, link: bool = True) -> None:
        self.axis = axis
        self.squares = squares
        wanted = link and axis.size > 1 and mesh.device_type == "cpu"
        self._link = HostLink.connect(axis) if wanted else None
        self._tasks: queue.SimpleQueue[tuple[Pending, Callable[[], float]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if self._link is not None:
            self._thread = threading.Thread(
                target=_serve, args=(self._tasks,), name=f"shardwise-{axis.name}", daemon=True
            )
            self._thread.start()
            # A reducer that nobody closes takes its thread and its sockets with it.
            self._release = weakref.finalize(self, _let_go, self._tasks, self._link)
            self._release.atexit = False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, HostMemory | None]:
        """A zeroed flat tensor that this reducer can sum, and the memory behind it if it is shared. Collective over the
        axis."""
        if self._link is None:
            return torch.zeros(numel, dtype=dtype, device=device), None
        memory = HostMemory(self._link, numel, dtype)
        return memory.mine, memory

    def start(self, flat: Tensor, memory: HostMemory | None) -> Pending:
        """Begin to sum `flat` (from `allocate`) in place."""
        if self.axis.size == 1:
            return Pending(lambda: sum_of_squares(flat) if self.squares else 0.0)
        if memory is None:
            work = dist.all_reduce(flat, group=self.axis.group, async_op=True)
            assert work is not None

            def finish() -> float:
                work.wait()
                start, stop = share(flat.numel(), self.axis.rank, self.axis.size)
                return sum_of_squares(flat[start:stop]) if self.squares else 0.0

            return Pending(finish)
        pending = Pending()
        self._tasks.put((pending, memory.all_reduce))
        return pending

    def alone(self) -> "Reducer":
        """A reducer over this rank alone: what a plan computes whose gradients are not summed."""
        single = copy.copy(self)
        single.axis = Axis(self.axis.name, 0, 1, (self.axis.ranks[self.axis.rank],))
        return single

    def close(self) -> None:
        """Stop the thread and close the sockets."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None
            self._release()


_Tasks = queue.SimpleQueue[tuple[Pending, Callable[[], float]] | None]


def _serve(tasks: "_Tasks") -> None:
    while (task := tasks.get()) is not None:
        pending, work = task
        pending.settle(work)


def _let_go(tasks: "_Tasks", link: HostLink) -> None:
    tasks.put(None)
    link.close()
