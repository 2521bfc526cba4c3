"""Collectives on a named axis.

Sums between ranks of one machine go through memory that all of them map (`HostMemory`): each rank adds up its share of every rank's
tensor in place and writes the result to all of them, so nothing is copied through sockets. Elsewhere torch.distributed does the work.
"""

import math
import mmap
import os
import platform
import socket
import struct
import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout import share
from shardwise.mesh import Axis

# A peer that is alive but silent for this long is taken for lost (a dead one is noticed at once: its socket closes).
PATIENCE_SECONDS = 1800.0
# Elements added up at a time: the sum is still in the second-level cache when it is copied to the peers.
CACHE_ELEMENTS = 1 << 16


def all_reduce(tensor: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Reduce `tensor` in place over `axis`; op is "sum", "max" or "min". Returns the tensor."""
    if axis.size > 1:
        dist.all_reduce(tensor, _OPS[op], group=axis.group)
    return tensor


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_gather_object(value: Any, axis: Axis) -> list[Any]:
    """Every rank's picklable `value`, by rank along the axis."""
    if axis.size == 1:
        return [value]
    found: list[Any] = [None] * axis.size
    dist.all_gather_object(found, value, group=axis.group)
    return found


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
    """What two processes that can share memory and sockets have in common: the booted kernel and the network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return platform.node() + uuid.uuid4().hex


class HostLink:
    """Sockets between all pairs of ranks of an axis that lie on one machine: tells when all have come to a point, and passes file
    descriptors. Made by `connect`, which is collective over the axis.
    """

    def __init__(self, axis: Axis, peers: dict[int, socket.socket]) -> None:
        self.axis = axis
        self._peers = peers

    @staticmethod
    def connect(axis: Axis) -> "HostLink | None":
        """A link over `axis`, or None on all its ranks if they are not all on one Linux machine."""
        listener: socket.socket | None = None
        offer = None
        if hasattr(os, "memfd_create") and hasattr(socket, "AF_UNIX"):
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

    def wait_for_all(self) -> None:
        """Return once every rank has called this as often as this rank has.

        Raises:
            RuntimeError: a peer died or stayed silent.
        """
        for rank, peer in self._peers.items():
            self._talk(rank, lambda peer=peer: peer.sendall(b"."))  # type: ignore[misc]
        for rank, peer in self._peers.items():
            if self._talk(rank, lambda peer=peer: peer.recv(1)) == b"":  # type: ignore[misc]
                raise RuntimeError(f"rank {self.axis.ranks[rank]} is gone: it closed its end of the {self.axis.name} axis")

    def _talk(self, rank: int, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except OSError as error:
            raise RuntimeError(f"rank {self.axis.ranks[rank]} does not answer on the {self.axis.name} axis: {error}") from error

    def exchange(self, descriptor: int) -> dict[int, int]:
        """Give every peer a file descriptor, get theirs, by rank along the axis."""
        for peer in self._peers.values():
            socket.send_fds(peer, [b"f"], [descriptor])
        return {rank: socket.recv_fds(peer, 1, 1)[1][0] for rank, peer in self._peers.items()}

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


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
            self.tensors.append(torch.frombuffer(memory, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype))
        self.mine = self.tensors[link.axis.rank]

    def all_reduce(self) -> float:
        """Sum over the ranks, in place on all of them, in the order of ranks: the same bits everywhere.

        Returns:
            the sum of squares of this rank's share of the result; over all ranks these make the square of its norm.
        """
        self.link.wait_for_all()
        start, stop = share(self.mine.numel(), self.link.axis.rank, self.link.axis.size)
        square = 0.0
        total = torch.empty(min(CACHE_ELEMENTS, max(0, stop - start)), dtype=self.mine.dtype)
        for low in range(start, stop, CACHE_ELEMENTS):
            parts = [tensor[low : min(low + CACHE_ELEMENTS, stop)] for tensor in self.tensors]
            block = torch.add(parts[0], parts[1], out=total[: parts[0].numel()])
            for part in parts[2:]:
                block.add_(part)
            for part in parts:
                part.copy_(block)
            square += float(torch.dot(block, block))
        self.link.wait_for_all()
        return square


def sum_of_squares(tensor: Tensor) -> float:
    """The sum of squares of a flat tensor, added up by blocks as `HostMemory.all_reduce` does."""
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
