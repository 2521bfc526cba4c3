"""What forward saves for backward, in host memory or on disk meanwhile.

Tensors that autograd saves are handed to `torch.autograd.graph.saved_tensors_hooks`. One that is large, and no
parameter, is written behind while forward goes on, once for all that share its memory; backward, which wants them in
reverse order, has those before it read ahead.
"""

import collections
import contextlib
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.memory.offload_files import trim
from shardwise.memory.offload_tier import Tier

# Bytes below which a tensor stays: mapping it again would cost as much as computing it.
SMALLEST = 1 << 16
# Bytes that may wait to be written before forward waits for them.
BEHIND = 1 << 26
# How many are read ahead.
AHEAD = 2


class Activations:
    """Saves what the forwards of one chunk leave for backward.

    Args:
        tier: where.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._behind: collections.deque[tuple[Future[None], int]] = collections.deque()

    @contextlib.contextmanager
    def saving(self, module: nn.Module) -> Iterator[None]:
        """A forward of `module` runs inside."""
        if not torch.is_grad_enabled():
            yield
            return
        held = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
        known: dict[int, tuple[StorageWeakRef, int, weakref.ref[_Saved]]] = {}
        last: list[_Saved] = []

        def pack(tensor: Tensor) -> "_View | Tensor":
            if tensor.nbytes < SMALLEST or tensor.layout != torch.strided or type(tensor) is nn.Parameter:
                return tensor.detach()
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in held:
                return tensor.detach()
            alone = 2 * tensor.nbytes < storage.nbytes()
            found = known.get(key)
            saved = found[2]() if found and not alone and not found[0].expired() else None
            if saved is None or (found is not None and found[1] != tensor._version):
                tensor = tensor.detach().contiguous().clone() if alone else tensor.detach()
                saved = self._save(tensor, last[-1] if last else None)
                last[:] = [saved]
                if not alone:
                    mark = StorageWeakRef(storage)
                    known[key] = mark, tensor._version, weakref.ref(saved)
            return _View(saved, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield

    def _save(self, tensor: Tensor, previous: "_Saved | None") -> "_Saved":
        saved = _Saved(self._tier, tensor, previous)
        self._behind.append((saved.written, saved.num_bytes))
        waiting = sum(size for _, size in self._behind)
        while waiting > BEHIND or (self._behind and self._behind[0][0].done()):
            first, size = self._behind.popleft()
            waiting -= size
            self._tier.settle(first)
        return saved


class _View(NamedTuple):
    """A tensor within saved memory."""

    saved: "_Saved"
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(packed: "_View | Tensor") -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    memory = packed.saved.bring()
    whole = torch.empty(0, dtype=packed.dtype, device=memory.device)
    return whole.set_(memory.untyped_storage(), packed.offset, packed.shape, packed.stride)


class _Range:
    """A range of the tier's file, which is another's once neither a saved tensor nor a mapping refers to it."""

    def __init__(self, tier: Tier, num_bytes: int) -> None:
        assert tier.file is not None
        self._file, self._num_bytes = tier.file, num_bytes
        self.offset = tier.file.take(num_bytes)

    def __del__(self) -> None:
        if hasattr(self, "offset"):
            self._file.give_back(self.offset, self._num_bytes)


class _Saved:
    """The memory behind saved tensors, on its way to the tier, there, or on its way back."""

    def __init__(self, tier: Tier, tensor: Tensor, previous: "_Saved | None") -> None:
        self._tier = tier
        self.num_bytes = tensor.untyped_storage().nbytes()
        self._device = tensor.device
        self._previous = weakref.ref(previous) if previous is not None else lambda: None
        self._range = _Range(tier, self.num_bytes) if tier.file is not None else None
        self._source: Tensor | None = tensor  # until it is written
        self._host: Tensor | None = None
        self._mapped: weakref.ref[Tensor] | None = None
        self._ahead: Future[Tensor] | None = None
        flat = torch.empty(0, dtype=torch.uint8, device=self._device).set_(tensor.untyped_storage())
        event = None
        if self._device.type != "cpu":
            flat, event = _to_host(flat, tier)
            self._host = flat if self._range is None else None
        version = tensor._version
        self.written = tier.writer.submit(self._write, flat, event, tensor, version)

    def _write(self, flat: Tensor, event: torch.Event | None, tensor: Tensor, version: int) -> None:
        begin = time.perf_counter()
        if event is not None:
            event.synchronize()
        if self._range is not None:
            self._map().copy_(flat)
        if tensor._version != version:
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} that backward needs was changed in place in forward: change a "
                "copy of it"
            )
        self._source = None
        del flat, tensor
        trim(self._device, self.num_bytes)
        self._tier.traffic.add(written=self.num_bytes, hidden=time.perf_counter() - begin)

    def bring(self) -> Tensor:
        """The memory, (num_bytes,), on its device; begins to bring what backward wants next."""
        following = self._previous()
        for _ in range(AHEAD):
            if following is None:
                break
            following.prefetch()
            following = following._previous()
        source = self._source
        if source is not None:  # it has not gone yet
            self.written.cancel()
            return source
        memory = self._mapped() if self._mapped is not None else None
        if memory is None:
            begin = time.perf_counter()
            memory = self._read() if self._ahead is None else self._ahead.result()
            self._ahead = None
            self._mapped = weakref.ref(memory)
            waited = time.perf_counter() - begin
            self._tier.traffic.add(read=self.num_bytes, hidden=-waited, waited=waited)
        return memory

    def prefetch(self) -> None:
        """Begin to bring it, if it is away."""
        away = self._mapped is None or self._mapped() is None
        if away and self._ahead is None and self._source is None:
            self._ahead = self._tier.reader.submit(self._read)

    def _read(self) -> Tensor:
        begin = time.perf_counter()
        self.written.result()  # what went wrong, if anything did
        memory = self._map() if self._range is not None else self._host
        assert memory is not None
        if self._device.type != "cpu":
            memory = memory.to(self._device)
        self._tier.traffic.add(hidden=time.perf_counter() - begin)
        return memory

    def _map(self) -> Tensor:
        assert self._tier.file is not None
        assert self._range is not None
        memory = self._tier.file.map(self._range.offset, self.num_bytes, self._range)
        self._tier.file.populate(memory)
        return memory


def _to_host(flat: Tensor, tier: Tier) -> tuple[Tensor, torch.Event]:
    """A copy that is made beside the computation, and what is over once it is there."""
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    with tier.down.follows():
        host.copy_(flat, non_blocking=True)
        flat.record_stream(torch.accelerator.current_stream())
        event = torch.Event(flat.device)
        event.record()
    return host, event
