"""One pool of warm worker processes per session: importing torch once for all ranks keeps multi-rank tests quick.

`run_ranks(function, num_ranks, *args)` runs `function(*args)` on that many ranks, each in a process with a fresh gloo
world of that size, and returns the results by rank. The function must be importable. An exception in any rank is raised
here with its traceback.
"""

import atexit
import contextlib
import gc
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 120.0
# What most ranks need. On Linux it is imported once, by a process that ranks are forked from: imports are nearly all of
# a rank's start. torch imports its compiler when it draws values for a tensor on the meta device.
PRELOADED = ["pytest", "hypothesis", "torch.distributed", "torch._dynamo", "shardwise.verify", "shardwise.models"]


@contextlib.contextmanager
def apart(wanted: bool = True) -> Iterator[None]:
    """On a rank: as if every rank were on a machine of its own, so that nothing passes through shared memory."""
    from shardwise import host_memory

    identity = host_memory.machine_identity
    if wanted:
        host_memory.machine_identity = lambda: uuid.uuid4().hex
    try:
        yield
    finally:
        host_memory.machine_identity = identity


class RankFailed(AssertionError):
    """A function failed on a rank."""


def _serve(connection: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # What imports made stays: a collection need not look at it again.
    gc.freeze()
    while True:
        try:
            task = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        function, args, rank, num_ranks, store_path = task
        try:
            if num_ranks > 1:
                store = dist.FileStore(store_path, num_ranks)
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
                )
            result = function(*args)
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            # A model that ranks share is full of cycles, and its process groups' threads and connections go with it.
            gc.collect()


class _Pool:
    def __init__(self) -> None:
        self.context: Any = mp.get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":
            self.context.set_forkserver_preload(PRELOADED)
        self.workers: list[tuple[Any, Connection]] = []

    def grow(self, num_ranks: int) -> None:
        while len(self.workers) < num_ranks:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def stop(self) -> None:
        for process, connection in self.workers:
            connection.close()
            process.kill()
            process.join()
        self.workers.clear()

    def run(self, function: Callable[..., Any], num_ranks: int, args: tuple[Any, ...]) -> list[Any]:
        self.grow(num_ranks)
        handle, path = tempfile.mkstemp(prefix="shardwise-store-")
        os.close(handle)
        os.unlink(path)
        for rank in range(num_ranks):
            self.workers[rank][1].send((function, args, rank, num_ranks, path))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {self.workers[rank][1]: rank for rank in range(num_ranks)}
        while waiting:
            # Once a rank has failed the others may wait for it for ever: give them a moment, then replace the pool.
            ready = wait(list(waiting), 5.0 if failures else TIMEOUT)
            if not ready:
                stuck = sorted(waiting.values())
                self.stop()
                if not failures:
                    raise RankFailed(f"ranks {stuck} of {num_ranks} did not answer within {TIMEOUT:.0f} s")
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    good, value = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    good, value = False, "the process died"
                (results if good else failures)[rank] = value
        if os.path.exists(path):
            os.unlink(path)
        if any(value == "the process died" for value in failures.values()):
            self.stop()
        if failures:
            rank, text = min(failures.items())
            raise RankFailed(f"rank {rank} of {num_ranks} failed:\n{text}")
        return [results[rank] for rank in range(num_ranks)]


_pool = _Pool()
atexit.register(_pool.stop)


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """`function(*args)` on `num_ranks` ranks; the results by rank."""
    return _pool.run(function, num_ranks, args)
