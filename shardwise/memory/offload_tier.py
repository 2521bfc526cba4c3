"""Where state lives that `plan.offload` keeps elsewhere, what moves it, and how much was moved."""

import collections
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.memory.offload_files import DiskFile

DISK = "disk:"

_counting = threading.Lock()


@dataclass
class Copy:
    """A copy on a stream of an accelerator's.

    Attributes:
        begin, end: recorded around it.
        needed: recorded on the stream that came to wait for it; None if none has.
        host: seconds that the host waited for it, and for what came before it.
    """

    begin: torch.Event
    end: torch.Event
    needed: torch.Event | None = None
    host: float = 0.0

    def times(self) -> tuple[float, float]:
        """Seconds beside the computation, and seconds that it waited; to be asked once the copy is done."""
        seconds = self.begin.elapsed_time(self.end) / 1e3
        waited = self.host
        if self.needed is not None and self.needed.query():
            waited = max(waited, self.needed.elapsed_time(self.end) / 1e3)
        waited = min(seconds, waited)
        return seconds - waited, waited


@dataclass
class Traffic:
    """What one rank moved, so far.

    Attributes:
        read, written: bytes brought to where they are used, and back.
        hidden: seconds of transfers beside the computation.
        waited: seconds that the computation waited for them.
        under_way: copies whose time is not known yet.
    """

    read: int = 0
    written: int = 0
    hidden: float = 0.0
    waited: float = 0.0

    def __post_init__(self) -> None:
        self.under_way: collections.deque[Copy] = collections.deque()  # no field: what is recorded are numbers

    def add(self, read: int = 0, written: int = 0, hidden: float = 0.0, waited: float = 0.0) -> None:
        """Count more; from any thread."""
        with _counting:
            self.read += read
            self.written += written
            self.hidden += hidden
            self.waited += waited

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.read - other.read,
            self.written - other.written,
            self.hidden - other.hidden,
            self.waited - other.waited,
        )

    def copy(self) -> "Traffic":
        """As it is now."""
        while self.under_way and self.under_way[0].end.query():
            hidden, waited = self.under_way.popleft().times()
            self.add(hidden=hidden, waited=waited)
        return self - Traffic()


class Side:
    """Where copies of one direction run beside the computation: a stream of an accelerator's; on a CPU they are done
    when they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device) if device.type != "cpu" else None

    @contextlib.contextmanager
    def follows(self, *copies: Copy) -> Iterator[None]:
        """The stream is current inside, after what the current one has been given so far and after `copies`."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.accelerator.current_stream())
        for copy in copies:
            self.stream.wait_event(copy.end)
        with self.stream:
            yield


def has_own_memory(device: torch.device) -> bool:
    """Whether a device computes with memory of its own, and not with the host's."""
    return device.type != "cpu"


class Tier:
    """Where one kind of state lives.

    Args:
        key: of `plan.offload`.
        place: "cpu" or "disk:FOLDER".
        device: where the state is computed with.
        traffic: to be counted in.
        reader, writer: threads that read ahead and write behind, in the order in which they are asked to.
        up, down: streams for copies to the device and from it.

    Attributes:
        copies: whether what is computed with on the device is a copy.

    Raises:
        OffloadError: the folder cannot be used.
    """

    def __init__(
        self,
        key: str,
        place: str,
        device: torch.device,
        traffic: Traffic,
        reader: ThreadPoolExecutor,
        writer: ThreadPoolExecutor,
        up: Side | None = None,
        down: Side | None = None,
    ) -> None:
        self.key, self.place, self.device = key, place, device
        self.traffic = traffic
        self.reader, self.writer = reader, writer
        self.up, self.down = up or Side(device), down or Side(device)
        self.copies = has_own_memory(device)
        self.file = DiskFile(Path(place.removeprefix(DISK)), key) if place.startswith(DISK) else None

    def settle(self, work: "Future[None]") -> None:
        """Wait for something that is written behind.

        Raises:
            OffloadError: it could not be written.
        """
        begin = time.perf_counter()
        if not work.cancelled():
            work.result()
        waited = time.perf_counter() - begin
        self.traffic.add(hidden=-waited, waited=waited)
