"""Groups of tensors that live elsewhere between their uses."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from shardwise.memory.offload_tier import Copy, Tier

# Of tensors within a shelf: what vector instructions and other ranks' rounding want.
ALIGNMENT = 64


class Shelf:
    """Tensors that are brought and put back together, in host memory.

    Args:
        tier: where.
        like: of which shapes and dtypes; they are zeros at first.
        pinned: whether an accelerator copies from and to it.

    Attributes:
        away: what stands for the tensors while they are not there: the same shapes and dtypes without memory.
    """

    def __init__(self, tier: Tier, like: Sequence[Tensor], pinned: bool = False) -> None:
        self._tier = tier
        self.away = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in like]
        sizes = [tensor.numel() * tensor.element_size() for tensor in self.away]
        self._starts: list[int] = []
        end = 0
        for size in sizes:
            self._starts.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end
        self._offset = 0
        self._host: Tensor | None = None
        if tier.file is not None:
            self._offset = tier.file.take(end)
        else:
            self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=pinned)
        self._users = 0
        self._changed = False
        self._here: list[Tensor] = []
        self._ahead: Future[Tensor] | None = None

    def prefetch(self) -> None:
        """Begin to bring the tensors."""
        if self._host is None and self._users == 0 and self._ahead is None and self.num_bytes:
            self._ahead = self._tier.reader.submit(self._read)

    def fetch(self) -> list[Tensor]:
        """The tensors, until `give_back`; once more for every `fetch`."""
        self._users += 1
        if self._users == 1:
            self._here = self._views(self._bring())
        return self._here

    def give_back(self, changed: bool = True) -> bool:
        """One user fewer; whether it was the last one, after whom what was changed goes back."""
        self._users -= 1
        self._changed |= changed
        if self._users:
            return False
        self._here = []
        if self._changed and self._host is None:
            self._tier.traffic.add(written=self.num_bytes)
        self._changed = False
        return True

    def peek(self, index: int) -> Tensor:
        """One tensor by itself, for as long as anything refers to it; what is written to it stays."""
        like, start = self.away[index], self._starts[index]
        size = like.numel() * like.element_size()
        if self._host is not None or not size:
            return self._views(self._bring())[index]
        assert self._tier.file is not None
        return self._tier.file.map(self._offset + start, size).view(like.dtype).view(like.shape)

    @property
    def on_disk(self) -> bool:
        return self._host is None

    def _read(self) -> Tensor:
        assert self._tier.file is not None
        begin = time.perf_counter()
        memory = self._tier.file.map(self._offset, self.num_bytes)
        self._tier.file.populate(memory)
        self._tier.traffic.add(hidden=time.perf_counter() - begin)
        return memory

    def _bring(self) -> Tensor:
        if self._host is not None:
            return self._host
        if not self.num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        begin = time.perf_counter()
        memory = self._read() if self._ahead is None else self._ahead.result()
        self._ahead = None
        waited = time.perf_counter() - begin
        self._tier.traffic.add(read=self.num_bytes, hidden=-waited, waited=waited)
        return memory

    def _views(self, memory: Tensor) -> list[Tensor]:
        found = []
        for like, start in zip(self.away, self._starts, strict=True):
            part = memory[start : start + like.numel() * like.element_size()]
            found.append(part.view(like.dtype).view(like.shape))
        return found


class CopiedShelf(Shelf):
    """A shelf of what an accelerator computes with: it is used there in copies (`near`, `filled`, `add`), which move
    beside the computation, while `fetch` gives host memory itself, once the copies under way from and to it are done.

    On disk a copy goes through pinned memory: a thread reads that ahead, and another writes it behind.
    """

    def __init__(self, tier: Tier, like: Sequence[Tensor]) -> None:
        super().__init__(tier, like, pinned=tier.device.type != "cpu")
        self._near: list[Tensor] = []
        self._near_users = 0
        self._near_changed = False
        self._zero = False  # zeros, whatever the memory holds
        self._under_way: list[Copy] = []  # from the memory and to it
        self._staged: Future[Tensor] | None = None  # pinned memory that is read ahead
        self._behind: Future[None] | None = None  # what is being written
        self._needed: Copy | None = None  # the last copy to the device

    # In host memory

    def fetch(self) -> list[Tensor]:
        """As `Shelf.fetch`, after the copies under way."""
        assert not self._near_users
        self._settle()
        found = super().fetch()
        if self._zero:
            self._zero, self._changed = False, True
            for tensor in found:
                tensor.zero_()
        return found

    def peek(self, index: int) -> Tensor:
        """As `Shelf.peek`, after the copies under way."""
        self._settle()
        return super().peek(index)

    def _settle(self) -> None:
        self._staged = None  # it may soon be old
        if self._behind is not None:
            self._tier.settle(self._behind)
            self._behind = None
        for copy in self._under_way:
            begin = time.perf_counter()
            copy.end.synchronize()
            copy.host += time.perf_counter() - begin
        self._under_way.clear()

    # In copies

    def clear(self) -> None:
        """Make everything zero, without a copy."""
        assert not self._users
        assert not self._near_users
        self._staged = None
        self._zero = True

    def near(self) -> list[Tensor]:
        """Copies for the device's current stream, until `give_back_near`; the same ones once more for every `near`."""
        assert not self._users
        if not self._near_users:
            self._near = [torch.empty(t.shape, dtype=t.dtype, device=self._tier.device) for t in self.away]
            if self._zero:
                for tensor in self._near:
                    tensor.zero_()
            else:
                with self.filled(self._near):
                    pass
                self.need()
                if self._tier.up.stream is not None:
                    torch.accelerator.current_stream().wait_stream(self._tier.up.stream)
        self._near_users += 1
        return self._near

    def give_back_near(self, changed: bool = True) -> bool:
        """One user of the copies fewer; whether it was the last one, after whom they go, back if any changed them."""
        self._near_users -= 1
        self._near_changed |= changed
        if self._near_users:
            return False
        near, self._near = self._near, []
        if self._near_changed:
            self.write(near)
        self._near_changed = False
        return True

    @contextlib.contextmanager
    def adding(self) -> Iterator[Tensor]:
        """A copy of the only tensor, for the device's current stream; what is added to it inside goes back."""
        (copy,) = self.near()
        yield copy
        self.give_back_near()

    @contextlib.contextmanager
    def filled(self, into: Sequence[Tensor]) -> Iterator[None]:
        """Begin to copy into memory on the device; what is started inside comes after the copies."""
        assert not self._zero
        tier = self._tier
        if tier.up.stream is None:
            for to, tensor in zip(into, self.fetch(), strict=True):
                to.copy_(tensor)
            self.give_back(changed=False)
            yield
            return
        source = self._source()
        with tier.up.follows(*self._under_way):
            begin = _recorded(tier.device)
            for to, tensor in zip(into, source, strict=True):
                to.copy_(tensor, non_blocking=True)
            self._needed = self._started(begin)
            tier.traffic.add(read=self.num_bytes)
            yield

    def need(self) -> None:
        """The computation comes to wait for the last copy to the device."""
        if self._needed is not None:
            self._needed.needed = _recorded(self._tier.device)

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Take over what tensors will hold once the current stream comes to this; they may be of another dtype. Those
        on the device may be let go of."""
        assert not self._near_users
        tier = self._tier
        self._staged, self._zero = None, False
        if tensors[0].device.type == "cpu" or tier.down.stream is None:
            for own, tensor in zip(self.fetch(), tensors, strict=True):
                own.copy_(tensor)
            self.give_back()
            return
        tensors = [tensor.to(like.dtype) for tensor, like in zip(tensors, self.away, strict=True)]
        memory = self._host
        if memory is None:
            memory = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True)
        with tier.down.follows(*self._under_way):
            begin = _recorded(tier.device)
            for to, tensor in zip(self._views(memory), tensors, strict=True):
                to.copy_(tensor, non_blocking=True)
                tensor.record_stream(tier.down.stream)
            end = self._started(begin).end
        tier.traffic.add(written=self.num_bytes)
        if self._host is None and self.num_bytes:
            self._behind = tier.writer.submit(self._write_behind, memory, end)

    def _started(self, begin: torch.Event) -> Copy:
        """Note that copies have been started on the current stream."""
        copy = Copy(begin, _recorded(self._tier.device))
        self._under_way = [other for other in self._under_way if not other.end.query()]
        self._under_way.append(copy)
        self._tier.traffic.under_way.append(copy)
        return copy

    # On disk, where an accelerator computes

    def prefetch_near(self) -> None:
        """Begin to read what will be copied to the device."""
        if self._host is None and self._staged is None and self.num_bytes and not (self._zero or self._near_users):
            self._staged = self._tier.reader.submit(self._read_staged, self._behind)

    def _source(self) -> list[Tensor]:
        """What copies to the device are made of."""
        if self._host is not None:
            return self._views(self._host)
        if not self.num_bytes:
            return self.away
        begin = time.perf_counter()
        self.prefetch_near()
        assert self._staged is not None
        memory, self._staged = self._staged.result(), None
        waited = time.perf_counter() - begin
        self._tier.traffic.add(hidden=-waited, waited=waited)
        return self._views(memory)

    def _read_staged(self, behind: "Future[None] | None") -> Tensor:
        if behind is not None:
            behind.result()
        memory = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True)
        return memory.copy_(self._read())

    def _write_behind(self, memory: Tensor, end: torch.Event) -> None:
        end.synchronize()
        begin = time.perf_counter()
        self._read().copy_(memory)
        self._tier.traffic.add(hidden=time.perf_counter() - begin)


def _recorded(device: torch.device) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event
