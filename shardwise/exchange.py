"""Sums and gathers in the middle of computation: within forward and backward passes, and of small numbers that travel
while the ranks go on."""

import contextlib
import functools
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.host_memory import HostLink, HostMemory
from shardwise.layout import share
from shardwise.mesh import Axis


class Exchange:
    """Sums and gathers between the ranks of an axis within forward and backward passes, one at a time, in the same
    order on all of them.

    On one machine without an accelerator a rank computes what it contributes into memory that all ranks see, and reads
    the others' parts
    from there: one meeting for each exchange, and no copy on the way. Elsewhere torch.distributed does the work.

    Args:
        axis: the ranks.
        device: where the tensors lie.

    Attributes:
        elements: what this rank would have sent by a ring, so far: n (R - 1) / R for a gather or a divided sum of n
            elements, twice that for a whole sum.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis = axis
        self.elements = 0.0
        self._link = HostLink.connect(axis) if axis.size > 1 and device.type == "cpu" else None
        # Three memories in turn. Who writes the next but two has met all since, hence they have read this one; and one
        # can be filled while another is being exchanged.
        self._memories: list[list[Tensor]] = [[], [], []]
        self._turn = 0
        self._under_way: Callable[[], Tensor] | None = None

    def buffer(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory for this rank's part of the next sum, of the dtype and device of `like`; to be filled and given to
        `start_sum`."""
        if self._link is None:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        self._reserve(math.prod(shape) * like.element_size())
        return self._view(self.axis.rank, shape, like.dtype)

    def start_sum(self, buffer: Tensor, dim: int | None = None) -> Callable[[], Tensor]:
        """Begin to sum all ranks' buffers (from `buffer`, of equal shapes).

        Args:
            buffer: this rank's part; not to be touched afterwards.
            dim: None gives every rank the whole sum, else the rank's share along this dimension.

        Returns:
            a function that waits and returns the sum: the same bits on every rank.
        """
        size = self.axis.size
        self.elements += (1 if dim is not None else 2) * buffer.numel() * (size - 1) / size
        if self._link is None:
            return self._start_elsewhere(buffer, dim)
        parts = [self._view(rank, tuple(buffer.shape), buffer.dtype) for rank in range(size)]
        if dim is not None:
            start, stop = share(buffer.shape[dim], self.axis.rank, size)
            parts = [part.narrow(dim, start, stop - start) for part in parts]

        def total() -> Tensor:
            found = torch.add(parts[0], parts[1])
            for part in parts[2:]:
                found.add_(part)
            return found.contiguous()

        return self._begin(total)

    def gather(self, shard: Tensor, dim: int, length: int) -> Tensor:
        """All ranks' shares along `dim`, whose lengths together are `length`, as one tensor."""
        return self.start_gather(shard, dim, length)()

    def start_gather(self, shard: Tensor, dim: int, length: int) -> Callable[[], Tensor]:
        """Begin to gather all ranks' shares along `dim`, whose lengths together are `length`.

        Returns:
            a function that waits and returns them as one tensor.
        """
        size = self.axis.size
        ranges = [share(length, rank, size) for rank in range(size)]
        shapes = [(*shard.shape[:dim], stop - start, *shard.shape[dim + 1 :]) for start, stop in ranges]
        assert tuple(shard.shape) == shapes[self.axis.rank], (tuple(shard.shape), length, self.axis)
        largest = max(shapes, key=math.prod)
        self.elements += sum(map(math.prod, shapes)) * (size - 1) / size
        if self._link is not None:
            self._reserve(math.prod(largest) * shard.element_size())
            parts = [self._view(rank, shape, shard.dtype) for rank, shape in enumerate(shapes)]
            parts[self.axis.rank].copy_(shard)
            return self._begin(lambda: torch.cat(parts, dim))
        padded = shard.contiguous()
        if tuple(shard.shape) != largest:
            padded = shard.new_zeros(largest)
            padded.narrow(dim, 0, shard.shape[dim]).copy_(shard)
        everyone = [torch.empty_like(padded) for _ in range(size)]
        work = dist.all_gather(everyone, padded, group=self.axis.group, async_op=True)
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            return torch.cat([everyone[rank].narrow(dim, 0, shape[dim]) for rank, shape in enumerate(shapes)], dim)

        return wait

    def leave(self) -> None:
        """Tell the peers that this rank will not come again: an error has ended the work midway."""
        if self._link is not None:
            self._link.leave()

    def close(self) -> None:
        """Close the sockets."""
        if self._link is not None:
            self._link.close()
        self._memories = [[], [], []]

    def _start_elsewhere(self, buffer: Tensor, dim: int | None) -> Callable[[], Tensor]:
        size = self.axis.size
        if (
            dim is not None and buffer.device.type != "cpu" and buffer.shape[dim] % size == 0
        ):  # gloo's is slower than a sum
            shares = [part.contiguous() for part in buffer.chunk(size, dim)]
            out = torch.empty_like(shares[0])
            work = dist.reduce_scatter(out, shares, group=self.axis.group, async_op=True)
        else:
            out = buffer
            work = dist.all_reduce(out, group=self.axis.group, async_op=True)
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            if dim is None or out is not buffer:
                return out
            start, stop = share(buffer.shape[dim], self.axis.rank, size)
            return out.narrow(dim, start, stop - start).contiguous()

        return wait

    def _reserve(self, num_bytes: int) -> None:
        assert self._link is not None
        held = self._memories[self._turn]
        if not held or held[0].numel() < num_bytes:
            self._memories[self._turn] = HostMemory(self._link, num_bytes, torch.uint8).tensors

    def _view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        flat = self._memories[self._turn][rank][: math.prod(shape) * dtype.itemsize]
        return flat.view(dtype).view(shape)

    def _begin(self, result: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Tell the others that this rank's part is there; what is under way ends first. Returns a function that waits
        for theirs and returns the result."""
        assert self._link is not None
        link = self._link
        if self._under_way is not None:
            self._under_way()
        link.arrive()
        self._turn = (self._turn + 1) % len(self._memories)

        @functools.cache
        def wait() -> Tensor:
            link.wait_for_others()
            self._under_way = None
            return result()

        self._under_way = wait
        return wait


class Totals:
    """Sums of small tensors in host memory over an axis, which run while the ranks go on.

    Args:
        axis: the ranks. Collective over it.
    """

    def __init__(self, axis: Axis) -> None:
        self._exchange = Exchange(axis, torch.device("cpu")) if axis.size > 1 else None
        self._last: Callable[[], Tensor] | None = None

    def start(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to sum `tensor`, of the same shape on all ranks. Returns a function that waits and returns the sum,
        whenever and as often as it is called."""
        if self._exchange is None:
            return lambda: tensor
        if self._last is not None:
            self._last()
        buffer = self._exchange.buffer(tuple(tensor.shape), tensor).copy_(tensor)
        self._last = functools.cache(self._exchange.start_sum(buffer))
        return self._last

    def leave(self) -> None:
        """Tell the peers that this rank will not come again: an error has ended the work midway."""
        if self._exchange is not None:
            self._exchange.leave()

    def close(self) -> None:
        """Close the sockets, once the last sum is there for whoever asks later."""
        if self._last is not None:
            with contextlib.suppress(RuntimeError):  # a peer that is gone is told to who asks for the sum
                self._last()
        if self._exchange is not None:
            self._exchange.close()
