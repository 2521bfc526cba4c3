"""Collectives on a named axis.

Sums between ranks of one machine go through memory that all of them map (`HostMemory`): each rank adds up its share of
every rank's tensor in place and writes the result to all of them, so nothing is copied through sockets. Elsewhere
torch.distributed does the work.
"""

import contextlib
import functools
import math
import mmap
import os
import platform
import select
import socket
import struct
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import share
from shardwise.mesh import Axis

# A peer that is alive but silent for this long is taken for lost (a dead one is noticed at once: its socket closes).
PATIENCE_SECONDS = 1800.0
# Elements added up at a time: the sum is still in the second-level cache when it is copied to the peers.
CACHE_ELEMENTS = 1 << 16


def all_reduce(tensor: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Reduce `tensor` in place over `axis`; op is "sum", "max" or "min". Returns the tensor."""
    if axis.size == 1:
        return tensor
    divides = op == "sum" and tensor.is_contiguous() and tensor.numel() % axis.size == 0 and tensor.numel() > 0
    if divides and _variant("all_reduce", tensor, axis) == "divided":
        flat = tensor.view(-1)
        all_gather(reduce_scatter(flat, axis), flat, axis)
    else:
        dist.all_reduce(tensor, _OPS[op], group=axis.group)
    return tensor


def _variant(collective: str, tensor: Tensor, axis: Axis) -> str:
    """How this axis makes a collective of a tensor."""
    backend = "gloo" if tensor.device.type == "cpu" else "nccl"
    return axis.choices.pick(backend, collective, tensor.dtype, tensor.numel() * tensor.element_size())


# Newer torch's names, and what they were called before.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_gather_object(value: Any, axis: Axis) -> list[Any]:
    """Every rank's picklable `value`, by rank along the axis."""
    if axis.size == 1:
        return [value]
    found: list[Any] = [None] * axis.size
    dist.all_gather_object(found, value, group=axis.group)
    return found


def reduce_scatter(flat: Tensor, axis: Axis) -> Tensor:
    """Sum `flat` (N,), N a multiple of the axis, over its ranks; returns this rank's N / size elements, which may be a
    part of `flat`, whose other elements are then of no use."""
    parts = flat.view(axis.size, -1)
    if axis.size == 1:
        return parts[0]
    return _REDUCE_SCATTER[_variant("reduce_scatter", flat, axis)](flat, axis)


def _own_reduce_scatter(flat: Tensor, axis: Axis) -> Tensor:
    out = torch.empty_like(flat.view(axis.size, -1)[0])
    _reduce_scatter_single(out, flat, group=axis.group)
    return out


def _exchange_and_sum(flat: Tensor, axis: Axis) -> Tensor:
    received = torch.empty_like(flat).view(axis.size, -1)
    dist.all_to_all_single(received.view(-1), flat, group=axis.group)
    return received.sum(0)


def _sum_all(flat: Tensor, axis: Axis) -> Tensor:
    dist.all_reduce(flat, group=axis.group)
    return flat.view(axis.size, -1)[axis.rank]


_REDUCE_SCATTER = {"reduce_scatter": _own_reduce_scatter, "all_to_all": _exchange_and_sum, "all_reduce": _sum_all}


def reduce_scatter_in(flat: Tensor, axis: Axis, dtype: torch.dtype) -> Tensor:
    """As `reduce_scatter`, but every rank's part travels in `dtype`; they are added up in `flat`'s."""
    sent = flat.to(dtype)
    received = torch.empty_like(sent)
    if axis.size > 1:
        dist.all_to_all_single(received, sent, group=axis.group)
    else:
        received = sent
    return received.view(axis.size, -1).to(flat.dtype).sum(0)


def all_reduce_in(tensor: Tensor, axis: Axis, dtype: torch.dtype) -> None:
    """Sum `tensor` (N,) in place over `axis`. The ranks' parts, and the sum, travel in `dtype`; they are added up in
    the tensor's."""
    numel = tensor.numel()
    padded = F.pad(tensor, (0, -numel % axis.size))
    whole = torch.empty(padded.shape, dtype=dtype, device=tensor.device)
    all_gather(reduce_scatter_in(padded, axis, dtype).to(dtype), whole, axis)
    tensor.copy_(whole[:numel])


def all_gather(own: Tensor, full: Tensor, axis: Axis) -> None:
    """Fill `full` (N,) with every rank's `own` (N / size,), which may be a part of it."""
    parts = full.view(axis.size, -1)
    if axis.size > 1 and _variant("all_gather", full, axis) == "all_gather":
        _all_gather_single(full, own, group=axis.group)
        return
    if parts[axis.rank].data_ptr() != own.data_ptr():
        parts[axis.rank].copy_(own)
    if axis.size == 1:
        return
    works = [dist.broadcast(parts[r], axis.ranks[r], group=axis.group, async_op=True) for r in range(axis.size)]
    for work in works:
        assert work is not None
        work.wait()


def broadcast(tensor: Tensor, axis: Axis, source: int) -> Tensor:
    """Copy `tensor` from the rank at position `source` along `axis` to all others, in place. Returns the tensor."""
    if axis.size > 1:
        dist.broadcast(tensor, axis.ranks[source], group=axis.group)
    return tensor


def broadcast_object(value: Any, axis: Axis, source: int = 0) -> Any:
    """The picklable `value` of the rank at position `source` along `axis`, on every rank."""
    if axis.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, axis.ranks[source], group=axis.group)
    return box[0]


def machine_identity() -> str:
    """What two processes that can share memory and sockets have in common: the booted kernel and the network
    namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return platform.node() + uuid.uuid4().hex


class HostLink:
    """Between all pairs of ranks of an axis that lie on one machine: a socket, which passes file descriptors, and a
    bell each way. Made by `connect`, which is collective over the axis.

    Ranks wait for bells alone. The kernel moves whoever a socket wakes to the core of the writer, which goes on
    computing there.
    """

    def __init__(self, axis: Axis, peers: dict[int, socket.socket]) -> None:
        self.axis = axis
        self._peers = peers
        self._rung = dict.fromkeys(peers, 0)
        self._mine = {rank: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for rank in peers}
        for rank, peer in peers.items():
            socket.send_fds(peer, [b"b"], [self._mine[rank]])
        self._theirs = {rank: _receive_descriptor(peer) for rank, peer in peers.items()}
        self._release = weakref.finalize(self, _close, [*self._mine.values(), *self._theirs.values()])

    @staticmethod
    def connect(axis: Axis) -> "HostLink | None":
        """A link over `axis`, or None on all its ranks if they are not all on one Linux machine."""
        listener: socket.socket | None = None
        offer = None
        if hasattr(os, "memfd_create") and hasattr(os, "eventfd"):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # A name in Linux's abstract namespace: no file to leave behind.
            address = f"\0shardwise-{uuid.uuid4().hex}"
            listener.bind(address)
            listener.listen(axis.size)
            listener.settimeout(PATIENCE_SECONDS)
            offer = (machine_identity(), address)
        offers = all_gather_object(offer, axis)
        if listener is None or any(other is None or other[0] != offers[0][0] for other in offers):
            if listener is not None:
                listener.close()
            return None
        peers: dict[int, socket.socket] = {}
        for rank in range(axis.rank):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.connect(offers[rank][1])
            peer.sendall(struct.pack("<i", axis.rank))
            peers[rank] = peer
        for _ in range(axis.rank + 1, axis.size):
            peer, _address = listener.accept()
            (rank,) = struct.unpack("<i", peer.recv(4, socket.MSG_WAITALL))
            peers[rank] = peer
        listener.close()
        for peer in peers.values():
            peer.settimeout(PATIENCE_SECONDS)
        return HostLink(axis, dict(sorted(peers.items())))

    @property
    def sockets(self) -> dict[int, socket.socket]:
        """By rank along the axis, the socket to it, for a link that is used for nothing else."""
        return self._peers

    def wait_for_all(self) -> None:
        """Return once every rank has called this as often as this rank has.

        Raises:
            RuntimeError: a peer died or stayed silent.
        """
        self.arrive()
        self.wait_for_others()

    def arrive(self) -> None:
        """Tell every peer that this rank has come so far; does not wait."""
        for rank in self._peers:
            self.ring(rank)

    def wait_for_others(self) -> None:
        """Return once every peer has called `arrive` as often as this rank has called this."""
        for rank in self._peers:
            while not self._rung[rank]:
                if not self.listen(rank):
                    raise self.gone(rank)
            self._rung[rank] -= 1

    def gone(self, rank: int) -> RuntimeError:
        """What to raise when the rank at a position on the axis is gone."""
        return RuntimeError(f"rank {self.axis.ranks[rank]} is gone: it closed its end of the {self.axis.name} axis")

    def ring(self, rank: int) -> None:
        """Wake the rank at a position on the axis if it listens, or have it find this when it does."""
        os.eventfd_write(self._theirs[rank], 1)

    def listen(self, rank: int, room: bool = False) -> bool:
        """Wait until the rank at a position on the axis has rung since the last time, or, with `room`, until its socket
        takes more. Returns False if it is gone.

        Raises:
            RuntimeError: it stayed silent.
        """
        poll = select.poll()
        poll.register(self._mine[rank], select.POLLIN)
        poll.register(self._peers[rank], select.POLLOUT if room else 0)
        ready = dict(poll.poll(PATIENCE_SECONDS * 1000))
        if not ready:
            name = f"rank {self.axis.ranks[rank]} does not answer on the {self.axis.name} axis"
            raise RuntimeError(f"{name}: silent for {PATIENCE_SECONDS:.0f} s")
        if self._mine[rank] in ready:
            self._rung[rank] += os.eventfd_read(self._mine[rank])
            return True
        return not ready[self._peers[rank].fileno()] & (select.POLLHUP | select.POLLERR)

    def exchange(self, descriptor: int) -> dict[int, int]:
        """Give every peer a file descriptor, get theirs, by rank along the axis."""
        for peer in self._peers.values():
            socket.send_fds(peer, [b"f"], [descriptor])
        return {rank: _receive_descriptor(peer) for rank, peer in self._peers.items()}

    def close(self) -> None:
        """Close the sockets, by which the peers notice, and the bells."""
        for peer in self._peers.values():
            peer.close()
        self._release()


def _receive_descriptor(peer: socket.socket) -> int:
    descriptor: int = socket.recv_fds(peer, 1, 1)[1][0]
    return descriptor


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class HostMemory:
    """A flat tensor on every rank of a `HostLink`, each visible to all of them.

    Args:
        link: the ranks.
        numel, dtype: of the tensor; equal on all ranks. Starts as zeros.
    """

    def __init__(self, link: HostLink, numel: int, dtype: torch.dtype) -> None:
        self.link = link
        length = max(1, numel) * dtype.itemsize
        own = os.memfd_create("shardwise")  # no name in any file system: gone when the last rank is
        os.ftruncate(own, length)
        descriptors = {link.axis.rank: own, **link.exchange(own)}
        self.tensors: list[Tensor] = []
        for rank in range(link.axis.size):
            memory = mmap.mmap(descriptors[rank], length)
            os.close(descriptors[rank])
            self.tensors.append(
                torch.frombuffer(memory, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)
            )
        self.mine = self.tensors[link.axis.rank]

    def sum_into(
        self, start: int, stop: int, targets: list[Tensor], add: bool = False, through: Sequence[torch.dtype] = ()
    ) -> None:
        """Sum elements `start` to `stop` over all ranks, in the order of ranks: the same bits wherever they are
        computed.

        Every rank calls this, with ranges of its own. It returns when all ranks are done with each other's memory.

        Args:
            targets: where the sums go, each (stop - start,); may be parts of the ranks' own tensors.
            add: whether to add to the targets instead of overwriting them.
            through: the number formats that the parts, and, if there are two, the sum are rounded to, as if they had
                travelled in them; they are added up in the tensors' own.
        """
        self.link.wait_for_all()
        total = torch.empty(min(CACHE_ELEMENTS, max(0, stop - start)), dtype=self.mine.dtype)
        for low in range(start, stop, CACHE_ELEMENTS):
            high = min(low + CACHE_ELEMENTS, stop)
            parts = [tensor[low:high] for tensor in self.tensors]
            if through:
                parts = [part.to(through[0]).to(part.dtype) for part in parts]
            block = torch.add(parts[0], parts[1], out=total[: high - low])
            for part in parts[2:]:
                block.add_(part)
            if len(through) > 1:
                block.copy_(block.to(through[1]))
            for target in targets:
                place = target[low - start : high - start]
                place.add_(block) if add else place.copy_(block)
        self.link.wait_for_all()


def common_memory(link: HostLink, owner: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A zeroed flat tensor (numel,) that is one memory for all ranks of `link` that name the same owner, a rank along
    its axis. Collective over the link."""
    length = max(1, numel) * dtype.itemsize
    own = os.memfd_create("shardwise")
    os.ftruncate(own, length)
    descriptors = {link.axis.rank: own, **link.exchange(own)}
    memory = mmap.mmap(descriptors[owner], length)
    for descriptor in descriptors.values():
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)


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

    def close(self) -> None:
        """Close the sockets, once the last sum is there for whoever asks later."""
        if self._last is not None:
            with contextlib.suppress(RuntimeError):  # a peer that is gone is told to who asks for the sum
                self._last()
        if self._exchange is not None:
            self._exchange.close()


def sum_of_squares(tensor: Tensor) -> float:
    """The sum of squares of a flat tensor, added up by blocks."""
    return math.fsum(float(torch.dot(part, part)) for part in torch.split(tensor, CACHE_ELEMENTS))


def agree(axis: Axis, facts: dict[str, str]) -> None:
    """Check that all ranks of `axis` hold the same `facts` (name -> fingerprint).

    Raises:
        ValueError: on every rank, naming the first fact that differs and the ranks that differ from the first one.
    """
    everyone = all_gather_object(facts, axis)
    for name in dict.fromkeys(name for other in everyone for name in other):
        values = [other.get(name, "none") for other in everyone]
        odd = [axis.ranks[position] for position, value in enumerate(values) if value != values[0]]
        if odd:
            others = f" (and ranks {', '.join(map(str, odd[1:]))} differ as well)" if odd[1:] else ""
            raise ValueError(
                f"the ranks do not hold the same {name}: rank {axis.ranks[0]} has {values[0]}, rank {odd[0]} has "
                f"{values[axis.ranks.index(odd[0])]}{others}; give all ranks the same"
            )
