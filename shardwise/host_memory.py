"""Memory that ranks of one machine share.

Their sums go through memory that all of them map (`HostMemory`): each rank adds up its share of every rank's tensor in
place and writes the result to all of them, so nothing is copied through sockets.
"""

import contextlib
import mmap
import os
import platform
import select
import socket
import struct
import uuid
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.collectives import CACHE_ELEMENTS
from shardwise.mesh import Axis

# A peer that is alive but silent for this long is taken for lost (a dead one is noticed at once: its socket closes).
PATIENCE_SECONDS = 1800.0


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
        offers = collectives.all_gather_object(offer, axis)
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
