"""What pipeline stages send each other: any number of tensors and other values, shapes negotiated once and
remembered."""

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.mesh import Axis
from shardwise.pipeline_parallel.schedule import Kind

# A message's tag says which microbatch, boundary and direction it belongs to, and which tensor of it this is.
_MICROBATCHES, _ITEMS = 512, 64
_HEADER_LENGTH, _HEADER = _ITEMS - 2, _ITEMS - 1


@dataclass(frozen=True)
class TensorSpec:
    """A tensor in a message: what its receiver must have room for, and whether a gradient goes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Spec:
    """What an activation message consists of: the values a stage returned, also nested ones, with a `TensorSpec` for
    every tensor."""

    items: tuple[Any, ...]

    @staticmethod
    def of(values: tuple[Any, ...]) -> "Spec":
        return Spec(tree_map_only(Tensor, lambda v: TensorSpec(tuple(v.shape), v.dtype, v.requires_grad), values))

    def fill(self, tensors: Iterable[Tensor]) -> tuple[Any, ...]:
        """The values, with `tensors` for the specs; those that need a gradient say so."""
        left = iter(tensors)
        filled: tuple[Any, ...] = tree_map_only(
            TensorSpec, lambda item: next(left).requires_grad_(item.requires_grad), self.items
        )
        return filled

    @property
    def tensors(self) -> list[TensorSpec]:
        return [item for item in tree_leaves(self.items) if isinstance(item, TensorSpec)]

    @property
    def gradients(self) -> list[TensorSpec]:
        """The tensors whose gradients are sent back."""
        return [item for item in self.tensors if item.requires_grad]


class Incoming:
    """A message on its way: buffers that are being filled."""

    def __init__(self, spec: Spec | None, buffers: list[Tensor], works: list[dist.Work]) -> None:
        self.spec = spec
        self._buffers = buffers
        self._works = works

    def wait(self) -> list[Tensor]:
        """The tensors, once they are there."""
        for work in self._works:
            work.wait()
        return self._buffers


class Wire:
    """Point-to-point messages along the pipeline axis.

    Args:
        axis: the pipeline axis.
        device: where received tensors lie.
        num_boundaries: stage boundaries in the whole model.
        negotiate: "once": what a message consists of depends on the shapes of the microbatch's inputs alone, and is
            sent ahead of the first message of each kind; "always": it is sent ahead of every one.
    """

    def __init__(self, axis: Axis, device: torch.device, num_boundaries: int, negotiate: str) -> None:
        self.axis = axis
        self.device = device
        self.num_boundaries = max(1, num_boundaries)
        self.negotiate = negotiate
        self._known: dict[tuple[int, Any], Spec] = {}
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def known(self, boundary: int, signature: Any) -> Spec | None:
        """What activations across `boundary` consist of for inputs of these shapes, if it is known without asking."""
        return None if self.negotiate == "always" else self._known.get((boundary, signature))

    def send_activation(
        self, microbatch: int, boundary: int, peer: int, values: tuple[Any, ...], signature: Any
    ) -> Spec:
        """Send what a stage returned; does not wait. Returns what it consists of.

        Raises:
            ValueError: it does not consist of what earlier messages for inputs of these shapes did.
        """
        spec = Spec.of(values)
        if len(spec.tensors) > _HEADER_LENGTH:
            raise ValueError(
                f"a stage passes on {len(spec.tensors)} tensors; at most {_HEADER_LENGTH} can be sent, so pass fewer, "
                "larger ones"
            )
        earlier = self.known(boundary, signature)
        if earlier is None:
            header = torch.frombuffer(bytearray(pickle.dumps(spec)), dtype=torch.uint8)
            self._send(torch.tensor([header.numel()]), peer, self._tag(Kind.F, microbatch, boundary, _HEADER_LENGTH))
            self._send(header, peer, self._tag(Kind.F, microbatch, boundary, _HEADER))
            self._known[boundary, signature] = spec
        elif earlier != spec:
            raise ValueError(
                f"what passes from stage {boundary} to stage {boundary + 1} changed from {_describe(earlier)} to "
                f"{_describe(spec)} for "
                'inputs of the same shapes; pass parallelize(..., negotiate="always")'
            )
        self.send_tensors(
            Kind.F, microbatch, boundary, peer, [v.detach() for v in tree_leaves(values) if isinstance(v, Tensor)]
        )
        return spec

    def send_tensors(self, kind: Kind, microbatch: int, boundary: int, peer: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors whose shapes the receiver knows; does not wait."""
        for item, tensor in enumerate(tensors):
            self._send(tensor.contiguous(), peer, self._tag(kind, microbatch, boundary, item))

    def receive_activation(
        self, microbatch: int, boundary: int, peer: int, signature: Any, ahead: bool
    ) -> Incoming | None:
        """Begin to receive an activation. None if `ahead` and what it consists of has yet to be learnt, which would
        mean waiting."""
        spec = self.known(boundary, signature)
        if spec is None:
            if ahead:
                return None
            length = torch.zeros(1, dtype=torch.int64)
            self._receive(length, peer, self._tag(Kind.F, microbatch, boundary, _HEADER_LENGTH)).wait()
            header = torch.empty(int(length), dtype=torch.uint8)
            self._receive(header, peer, self._tag(Kind.F, microbatch, boundary, _HEADER)).wait()
            spec = pickle.loads(header.numpy().tobytes())
            assert isinstance(spec, Spec)
            self._known[boundary, signature] = spec
        return self.receive_tensors(Kind.F, microbatch, boundary, peer, spec.tensors, spec)

    def receive_tensors(
        self,
        kind: Kind,
        microbatch: int,
        boundary: int,
        peer: int,
        specs: Sequence[TensorSpec],
        spec: Spec | None = None,
    ) -> Incoming:
        """Begin to receive tensors of known shapes."""
        buffers = [torch.empty(item.shape, dtype=item.dtype, device=self.device) for item in specs]
        works = [
            self._receive(buffer, peer, self._tag(kind, microbatch, boundary, item))
            for item, buffer in enumerate(buffers)
            if buffer.numel()
        ]
        return Incoming(spec, buffers, works)

    def prune(self) -> None:
        """Let go of what has been sent."""
        self._sending = [(work, tensor) for work, tensor in self._sending if not work.is_completed()]

    def flush(self) -> None:
        """Wait until everything has been sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _tag(self, kind: Kind, microbatch: int, boundary: int, item: int) -> int:
        message = (microbatch % _MICROBATCHES * self.num_boundaries + boundary) * 2 + (kind is Kind.B)
        return message * _ITEMS + item

    def _send(self, tensor: Tensor, peer: int, tag: int) -> None:
        if tensor.numel():
            work = dist.isend(tensor, self.axis.ranks[peer], group=self.axis.group, tag=tag)
            assert work is not None
            self._sending.append((work, tensor))

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.irecv(tensor, self.axis.ranks[peer], group=self.axis.group, tag=tag)
        assert work is not None
        return work


def _describe(spec: Spec) -> str:
    parts = [
        f"{str(item.dtype).removeprefix('torch.')} {list(item.shape)}" if isinstance(item, TensorSpec) else repr(item)
        for item in tree_leaves(spec.items)
    ]
    return ", ".join(parts) or "nothing"
