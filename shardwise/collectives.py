"""Collectives on a named axis.

Sums between ranks of one machine go through memory that all of them map (`HostMemory`): each rank adds up its share of
every rank's tensor in place and writes the result to all of them, so nothing is copied through sockets. Elsewhere
torch.distributed does the work.
"""

import contextlib
import math
import mmap
import os
import platform
import select
import socket
import struct
import uuid
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.mesh import Axis

# A peer that is alive but silent for this long is taken for lost (a dead one is noticed at once: its socket closes).
PATIENCE_SECONDS = 1800.0
# Elements added up at a time: the sum is still in the second-level cache when it is copied to the peers.
CACHE_ELEMENTS = 1 << 16
# Tensors that go the same way are put together up to this size.
MESSAGE_BYTES = 4 << 20


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


def broadcast_all(tensors: Sequence[Tensor], axis: Axis, source: int) -> None:
    """As `broadcast` of each contiguous tensor, in few messages: what is small travels together."""
    together: list[Tensor] = []

    def send() -> None:
        flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in together])
        broadcast(flat, axis, source)
        if axis.rank != source:
            for tensor, sent in zip(together, flat.split([tensor.nbytes for tensor in together]), strict=True):
                tensor.view(-1).view(torch.uint8).copy_(sent)
        together.clear()

    if axis.size == 1:
        return
    for tensor in tensors:
        if tensor.nbytes >= MESSAGE_BYTES:
            broadcast(tensor, axis, source)
            continue
        if sum(other.nbytes for other in together) + tensor.nbytes > MESSAGE_BYTES:
            send()
        together.append(tensor)
    if together:
        send()


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

    def leave(self) -> None:
        """Tell the peers that this rank will not come again, and whoever waits for them on a thread of its own."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # the peer has gone first
                peer.shutdown(socket.SHUT_RDWR)

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


def sum_of_squares(tensor: Tensor) -> float:
    """The sum of squares of a flat tensor, added up by blocks; the host waits for a device once."""
    block = CACHE_ELEMENTS if tensor.device.type == "cpu" else CACHE_ELEMENTS << 8
    return math.fsum(torch.stack([torch.dot(part, part) for part in torch.split(tensor, block)]).tolist())


def agree(axis: Axis, facts: dict[str, str], mends: Mapping[str, str] = MappingProxyType({})) -> None:
    """Check that all ranks of `axis` hold the same `facts` (name -> fingerprint).

    Args:
        axis: the ranks.
        facts: those of this rank.
        mends: by the beginning of a name, what to do; else "give all ranks the same".

    Raises:
        ValueError: on every rank, naming the first fact that differs and the ranks that differ from the first one.
    """
    everyone = all_gather_object(facts, axis)
    for name in dict.fromkeys(name for other in everyone for name in other):
        values = [other.get(name, "none") for other in everyone]
        odd = [axis.ranks[position] for position, value in enumerate(values) if value != values[0]]
        if odd:
            others = f" (and ranks {', '.join(map(str, odd[1:]))} differ as well)" if odd[1:] else ""
            mend = next((text for start, text in mends.items() if name.startswith(start)), "give all ranks the same")
            raise ValueError(
                f"the ranks do not hold the same {name}: rank {axis.ranks[0]} has {values[0]}, rank {odd[0]} has "
                f"{values[axis.ranks.index(odd[0])]}{others}; {mend}"
            )
