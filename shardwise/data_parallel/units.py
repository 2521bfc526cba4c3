"""Parameters divided between steps (ZeRO stage 3): gathered for a unit of the model just before it computes, and given
back after."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.data_parallel.buckets import Bucket, Buckets

# Set on a module by `parallelize`: the number of the unit whose parameters it needs.
UNIT = "_shardwise_unit"


class Units:
    """Gathers and releases the buckets of one chunk around its modules' forwards and backwards; below stage 3, and
    where ranks read each other's fragments in memory they share, it does nothing.

    A unit is gathered before its module's forward and released after it; gathered again when the gradient of its output
    is there, and released when the unit before it is. What belongs to no unit (-1) is there while the chunk computes.
    """

    def __init__(self, root: nn.Module, buckets: Buckets) -> None:
        self._active = any(bucket.gathers for bucket in buckets.buckets)
        self._buckets = {unit: buckets.of_unit(unit) for unit in {bucket.unit for bucket in buckets.buckets}}
        self._open: int | None = None  # the unit whose backward runs
        if not self._active:
            return
        for module in root.modules():
            unit = getattr(module, UNIT, None)
            if unit in self._buckets:
                module.register_forward_pre_hook(lambda module, args, unit=unit: self._acquire(unit))
                module.register_forward_hook(lambda module, args, output, unit=unit: self._after_forward(unit, output))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The chunk's forward runs inside."""
        self._acquire(-1)
        yield
        self._release(-1)

    def begin_backward(self) -> None:
        """The chunk's backward begins."""
        self._acquire(-1)

    def end_backward(self) -> None:
        """The chunk's backward is over."""
        self._close()
        self._release(-1)

    def _of(self, unit: int) -> list[Bucket]:
        return self._buckets.get(unit, []) if self._active else []

    def _acquire(self, unit: int) -> None:
        for bucket in self._of(unit):
            bucket.acquire()

    def _release(self, unit: int) -> None:
        for bucket in self._of(unit):
            bucket.release()

    def _after_forward(self, unit: int, output: Any) -> None:
        self._release(unit)
        if torch.is_grad_enabled():
            for leaf in torch.utils._pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda gradient: self._before_backward(unit))  # type: ignore[no-untyped-call]

    def _before_backward(self, unit: int) -> None:
        if self._open == unit:
            return
        self._close()
        self._acquire(unit)
        self._open = unit

    def _close(self) -> None:
        if self._open is not None:
            self._release(self._open)
            self._open = None
