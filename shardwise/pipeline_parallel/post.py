"""How messages travel between pipeline ranks: through memory that ranks of one machine share, or torch.distributed."""

from __future__ import annotations

import array
import contextlib
import math
import mmap
import os
import socket
import struct
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.host_memory import HostLink
from shardwise.mesh import Axis

Wait = Callable[[], Tensor]


class Post(Protocol):
    """Point-to-point messages along an axis, known by sender and tag, of at least one element each."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Send a tensor to the rank at position `peer` along the axis; does not wait for it."""

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int) -> Wait:
        """Begin to receive a tensor, onto `device`. Returns a function that waits and returns it."""

    def prune(self) -> None:
        """Let go of what has been sent, and of what is no longer used of what was received."""

    def flush(self) -> None:
        """Wait until everything sent may be overwritten."""

    def leave(self) -> None:
        """No message follows, though some are awaited: an error has ended the work midway."""

    def close(self) -> None:
        """No message follows."""


def connect(axis: Axis, device: torch.device) -> Post:
    """The shortest way between the ranks of an axis. Collective over the axis."""
    link = HostLink.connect(axis) if axis.size > 1 and device.type == "cpu" else None
    return GroupPost(axis) if link is None else HostPost(link)


class GroupPost:
    """Messages through the axis's process group."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.axis.ranks[peer], group=self.axis.group, tag=tag)
        assert work is not None
        self._sending.append((work, tensor))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int) -> Wait:
        buffer = torch.empty(shape, dtype=dtype, device=device)
        work = dist.irecv(buffer, self.axis.ranks[peer], group=self.axis.group, tag=tag)
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            return buffer

        return wait

    def prune(self) -> None:
        self._sending = [(work, tensor) for work, tensor in self._sending if not work.is_completed()]

    def flush(self) -> None:
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def leave(self) -> None:
        """The peers find out by the group's own patience, or when the process ends."""

    def close(self) -> None:
        self.flush()


class HostPost:
    """Messages through shared memory.

    The sender copies a tensor there and says so on a socket; the receiver's tensor is that memory, which goes back to
    the sender when nothing on the receiver refers to it any more.
    """

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._peers = {rank: _Peer(link, rank) for rank in link.sockets}

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        self._peers[peer].send(tensor, tag)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int) -> Wait:
        assert device.type == "cpu"
        return lambda: self._peers[peer].receive(shape, dtype, tag)

    def prune(self) -> None:
        for peer in self._peers.values():
            peer.give_back()

    def flush(self) -> None:
        """Nothing to wait for: a message has left when `send` returns."""

    def leave(self) -> None:
        self._link.leave()

    def close(self) -> None:
        self._link.close()


# A note on the socket: a message's tag and which of the sender's segments holds it, the first one in a segment with the
# segment's file descriptor; or that a segment of the reader's is given back.
_NOTE = struct.Struct("<qq")
_GIVEN_BACK = -1


class _Segment:
    """Memory of a power of two of bytes that two ranks see and that holds one message at a time."""

    def __init__(self, descriptor: int) -> None:
        self.length = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, self.length)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, on_free: Callable[[], None] | None = None) -> Tensor:
        """The segment's beginning as a tensor; `on_free` is called once nothing uses its memory."""
        view = memoryview(self._memory)
        if on_free is not None:
            weakref.finalize(view, on_free).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(shape)


class _Peer:
    """The rank at the other end of a socket."""

    def __init__(self, link: HostLink, rank: int) -> None:
        self._link, self._rank = link, rank
        self._socket = link.sockets[rank]
        self._socket.setblocking(False)
        self._own: list[_Segment] = []
        self._free: dict[int, list[int]] = defaultdict(list)  # by length, our segments that hold nothing
        self._theirs: dict[int, _Segment] = {}
        self._arrived: dict[int, deque[int]] = defaultdict(deque)  # by tag, in which of their segments
        self._unused: deque[int] = deque()  # their segments to give back; whatever thread lets go last adds to it

    def send(self, tensor: Tensor, tag: int) -> None:
        length = max(mmap.PAGESIZE, 1 << (tensor.numel() * tensor.element_size() - 1).bit_length())
        while not self._free[length] and self._read(wait=False):
            pass
        descriptor = None
        if self._free[length]:
            number = self._free[length].pop()
        else:
            descriptor = os.memfd_create("shardwise")  # no name in any file system: gone when the last rank is
            os.ftruncate(descriptor, length)
            number = len(self._own)
            self._own.append(_Segment(descriptor))
        self._own[number].tensor(tuple(tensor.shape), tensor.dtype).copy_(tensor)
        self._write(tag, number, descriptor)
        if descriptor is not None:
            os.close(descriptor)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, tag: int) -> Tensor:
        while not self._arrived[tag]:
            self._read(wait=True)
        number = self._arrived[tag].popleft()
        if not self._arrived[tag]:
            del self._arrived[tag]
        return self._theirs[number].tensor(shape, dtype, lambda: self._unused.append(number))

    def give_back(self) -> None:
        # A peer that is gone has no use for its memory. It may have done its part of the job; if it has not, that shows
        # where something is waited for.
        with contextlib.suppress(RuntimeError):
            while self._unused:
                self._write(_GIVEN_BACK, self._unused.popleft(), ring=False)

    def _write(self, tag: int, number: int, descriptor: int | None = None, ring: bool = True) -> None:
        passed = []
        if descriptor is not None:
            passed.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])))
        while True:
            try:
                self._socket.sendmsg([_NOTE.pack(tag, number)], passed)
                break
            except BlockingIOError:
                # No room: the peer has not read for long. It may wait for room itself, so read.
                self._link.listen(self._rank, room=True)
                self._read(wait=False)
            except OSError as error:
                raise self._link.gone(self._rank) from error
        if ring:
            self._link.ring(self._rank)

    def _read(self, wait: bool) -> bool:
        """Take note of what the peer says next. Returns False if it says nothing and `wait` is not asked for."""
        while True:
            try:
                note, passed, _, _ = self._socket.recvmsg(_NOTE.size, socket.CMSG_SPACE(4))
                break
            except BlockingIOError:
                if not wait:
                    return False
                self._link.listen(self._rank)
            except OSError as error:
                raise self._link.gone(self._rank) from error
        if len(note) < _NOTE.size:
            raise self._link.gone(self._rank)
        tag, number = _NOTE.unpack(note)
        if tag == _GIVEN_BACK:
            self._free[self._own[number].length].append(number)
            return True
        for _, _, data in passed:
            (descriptor,) = array.array("i", data)
            self._theirs[number] = _Segment(descriptor)
            os.close(descriptor)
        self._arrived[tag].append(number)
        return True
