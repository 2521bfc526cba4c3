"""Process groups for the emulated accelerator, over gloo: what a collective finds lands late on the current stream."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "emu-gloo"


def register() -> None:
    """Have `init_process_group` know `NAME`, for tensors of both devices."""
    dist.Backend.register_backend(NAME, Group, devices=["cpu", "emu"])


class Done(dist._Work):
    """Work that `finish`, if there is any, brings to its end when it is waited for."""

    def __init__(self, finish: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None


class Group(dist.ProcessGroup):
    """A gloo group that copies what it is given to the host and back."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._sent: list[Any] = []

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        pass

    @property
    def group_name(self) -> str:
        return self._name

    def _through(self, run: Callable[[Any, Any], Any], into: list[Tensor], given: list[Tensor]) -> Done:
        """Run something of (what it fills, what it reads), both on the host."""
        filled, read = [_host(tensor) for tensor in into], [_host(tensor) for tensor in given]
        work = run(filled, read)
        if work is not None:
            work.wait()
        _back(into, filled)
        return Done()

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Done:
        return self._through(lambda filled, _: self._gloo.allreduce(filled, options), tensors, [])

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Done:
        return self._through(lambda filled, _: self._gloo.broadcast(filled, options), tensors, [])

    def allgather(self, outputs: list[list[Tensor]], given: list[Tensor], options: Any = None) -> Done:
        return self._through(lambda filled, read: self._gloo.allgather([filled], read), outputs[0], given)

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any = None) -> Done:
        # A part of the output may be given.
        return self._through(lambda f, r: self._gloo._allgather_base(f[0], r[0].clone()), [output], [given])

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any = None) -> Done:
        def run(filled: list[Tensor], read: list[Tensor]) -> None:
            whole = read[0].clone()
            self._gloo.allreduce([whole]).wait()
            filled[0].copy_(whole.view(self._size, -1)[self._rank].view(output.shape))

        return self._through(run, [output], [given])

    def reduce_scatter(self, outputs: list[Tensor], given: list[list[Tensor]], options: Any = None) -> Done:
        def run(filled: list[Tensor], read: list[Tensor]) -> None:
            whole = torch.stack(read)
            self._gloo.allreduce([whole]).wait()
            filled[0].copy_(whole[self._rank])

        return self._through(run, outputs, given[0])

    def all_to_all_single(self, output: Tensor, given: Tensor, filled: Any, read: Any, options: Any = None) -> Done:
        return self._through(lambda f, r: self._gloo.alltoall_base(f[0], r[0], filled, read), [output], [given])

    def alltoall(self, outputs: list[Tensor], given: list[Tensor], options: Any = None) -> Done:
        return self._through(lambda filled, read: self._gloo.alltoall(filled, read), outputs, given)

    def barrier(self, options: Any = None) -> Any:
        return self._gloo.barrier()

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Done:
        sent = [_host(tensor) for tensor in tensors]
        work = self._gloo.send(sent, peer, tag)
        self._sent.append((work, sent))  # whoever sends may not wait
        return Done(work.wait)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Done:
        received = [tensor if _is_host(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        work = self._gloo.recv(received, peer, tag)

        def finish() -> None:
            work.wait()
            _back(tensors, received)

        return Done(finish)


def _is_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _host(tensor: Tensor) -> Tensor:
    return tensor if _is_host(tensor) else tensor.cpu()


def _back(tensors: list[Tensor], found: list[Tensor]) -> None:
    for tensor, landed in zip(tensors, found, strict=True):
        if not _is_host(tensor):
            tensor.copy_(landed.pin_memory(), non_blocking=True)
