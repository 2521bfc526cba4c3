"""What pipeline stages send each other: any number of tensors and other values, shapes negotiated once and
remembered."""

import hashlib
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise import collectives
from shardwise.exchange import Exchange
from shardwise.layout import share
from shardwise.mesh import Axis
from shardwise.pipeline_parallel import post
from shardwise.pipeline_parallel.post import Wait
from shardwise.pipeline_parallel.schedule import Kind

# A message's tag says which microbatch, boundary and direction it belongs to, and which tensor of it this is.
_MICROBATCHES, _ITEMS = 512, 64
_HEADER_LENGTH, _HEADER = _ITEMS - 2, _ITEMS - 1


@dataclass(frozen=True)
class TensorSpec:
    """A tensor in a message: what its receiver must have room for, whether a gradient goes back, and whether each
    tensor rank sends its share of it only, since all of them have the same."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    shared: bool = False


@dataclass(frozen=True)
class Spec:
    """What an activation message consists of: the values a stage returned, also nested ones, with a `TensorSpec` for
    every tensor."""

    items: tuple[Any, ...]

    @staticmethod
    def of(values: tuple[Any, ...]) -> "Spec":
        def spec(tensor: Tensor) -> TensorSpec:
            return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

        # Nothing but tensors needs no tree: 40 microseconds less between two matrix products.
        if all(isinstance(value, Tensor) for value in values):
            return Spec(tuple(map(spec, values)))
        return Spec(tree_map_only(Tensor, spec, values))

    def fill(self, tensors: Iterable[Tensor]) -> tuple[Any, ...]:
        """The values, with `tensors` for the specs; those that need a gradient say so."""
        left = iter(tensors)

        def take(spec: TensorSpec) -> Tensor:
            return next(left).requires_grad_(spec.requires_grad)

        if self.flat:
            return tuple(map(take, self.items))
        filled: tuple[Any, ...] = tree_map_only(TensorSpec, take, self.items)
        return filled

    @cached_property
    def flat(self) -> bool:
        """Whether the message is nothing but tensors, one beside the other."""
        return all(isinstance(item, TensorSpec) for item in self.items)

    @cached_property
    def plain(self) -> "Spec":
        """The same without marks of what is shared."""
        return Spec(tree_map_only(TensorSpec, lambda item: replace(item, shared=False), self.items))

    @cached_property
    def tensors(self) -> list[TensorSpec]:
        return [item for item in tree_leaves(self.items) if isinstance(item, TensorSpec)]

    @cached_property
    def gradients(self) -> list[TensorSpec]:
        """The tensors whose gradients are sent back."""
        return [item for item in self.tensors if item.requires_grad]


class Incoming:
    """A message on its way."""

    def __init__(self, spec: Spec | None, tensors: Sequence[Wait]) -> None:
        self.spec = spec
        self._tensors = tensors

    def wait(self) -> list[Tensor]:
        """The tensors, once they are there."""
        return [wait() for wait in self._tensors]


class Wire:
    """Point-to-point messages along the pipeline axis.

    Args:
        axis: the pipeline axis.
        device: where received tensors lie.
        num_boundaries: stage boundaries in the whole model.
        negotiate: "once": what a message consists of depends on the shapes of the microbatch's inputs alone, and is
            sent ahead of the first message of each kind; "always": it is sent ahead of every one.
        exchange: over the tensor axis, if what passes may be the same on all its ranks. Each then sends its share, and
            the receivers gather (Narayanan et al., arXiv 2104.04473, section 4.1): for stages on different machines.
    """

    def __init__(
        self, axis: Axis, device: torch.device, num_boundaries: int, negotiate: str, exchange: Exchange | None = None
    ) -> None:
        self.axis = axis
        self.device = device
        self.num_boundaries = max(1, num_boundaries)
        self.negotiate = negotiate
        self._known: dict[tuple[int, Any], Spec] = {}
        self._post = post.connect(axis, device)
        self._exchange = exchange if isinstance(self._post, post.GroupPost) else None
        self._received: dict[int, Spec] = {}  # by boundary, what came last

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
        tensors = [v.detach() for v in tree_leaves(values) if isinstance(v, Tensor)]
        earlier = self.known(boundary, signature)
        if earlier is None:
            if len(tensors) > _HEADER_LENGTH:
                raise ValueError(
                    f"a stage passes on {len(tensors)} tensors; at most {_HEADER_LENGTH} can be sent, so pass fewer, "
                    "larger ones"
                )
            spec = self._shared(spec, tensors)
            header = torch.frombuffer(bytearray(pickle.dumps(spec)), dtype=torch.uint8)
            self._send(torch.tensor([header.numel()]), peer, self._tag(Kind.F, microbatch, boundary, _HEADER_LENGTH))
            self._send(header, peer, self._tag(Kind.F, microbatch, boundary, _HEADER))
            self._known[boundary, signature] = spec
        elif earlier.plain != spec:
            raise ValueError(
                f"what passes from stage {boundary} to stage {boundary + 1} changed from {_describe(earlier)} to "
                f"{_describe(spec)} for "
                'inputs of the same shapes; pass parallelize(..., negotiate="always")'
            )
        spec = spec if earlier is None else earlier
        for item, (tensor, known) in enumerate(zip(tensors, spec.tensors, strict=True)):
            self._send(tensor, peer, self._tag(Kind.F, microbatch, boundary, item), known.shared)
        return spec

    def send_tensors(self, kind: Kind, microbatch: int, boundary: int, peer: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors whose shapes the receiver knows, the gradients of what came last across a boundary; does not
        wait."""
        came = self._received[boundary].gradients if boundary in self._received else ()
        shared = [item.shared for item in came] or [False] * len(tensors)
        for item, (tensor, part) in enumerate(zip(tensors, shared, strict=True)):
            self._send(tensor, peer, self._tag(kind, microbatch, boundary, item), part)

    def receive_activation(
        self, microbatch: int, boundary: int, peer: int, signature: Any, ahead: bool
    ) -> Incoming | None:
        """Begin to receive an activation. None if `ahead` and what it consists of has yet to be learnt, which would
        mean waiting."""
        spec = self.known(boundary, signature)
        if spec is None:
            if ahead:
                return None
            cpu = torch.device("cpu")
            tags = [self._tag(Kind.F, microbatch, boundary, item) for item in (_HEADER_LENGTH, _HEADER)]
            length = int(self._post.receive((1,), torch.int64, cpu, peer, tags[0])())
            header = self._post.receive((length,), torch.uint8, cpu, peer, tags[1])()
            spec = pickle.loads(header.numpy().tobytes())
            assert isinstance(spec, Spec)
            self._known[boundary, signature] = spec
        self._received[boundary] = spec
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
        return Incoming(
            spec,
            [
                self._receive(item, peer, self._tag(kind, microbatch, boundary, number))
                for number, item in enumerate(specs)
            ],
        )

    def prune(self) -> None:
        """Let go of what has been sent, and of what is no longer used of what was received."""
        self._post.prune()

    def flush(self) -> None:
        """Wait until everything has been sent."""
        self._post.flush()

    def leave(self) -> None:
        """No message follows, though some are awaited: an error has ended the work midway."""
        self._post.leave()

    def close(self) -> None:
        """No message follows."""
        self._post.close()

    def _tag(self, kind: Kind, microbatch: int, boundary: int, item: int) -> int:
        message = (microbatch % _MICROBATCHES * self.num_boundaries + boundary) * 2 + (kind is Kind.B)
        return message * _ITEMS + item

    def _shared(self, spec: Spec, tensors: Sequence[Tensor]) -> Spec:
        """What a message consists of, with marks on tensors that all tensor ranks have alike. Collective over them."""
        if self._exchange is None:
            return spec
        axis = self._exchange.axis
        everyone = collectives.all_gather_object([_digest(tensor) for tensor in tensors], axis)
        marks = iter(
            tensor.is_floating_point() and tensor.numel() >= axis.size and len(set(found)) == 1
            for tensor, *found in zip(tensors, *everyone, strict=True)
        )
        return Spec(tree_map_only(TensorSpec, lambda item: replace(item, shared=next(marks)), spec.items))

    def _send(self, tensor: Tensor, peer: int, tag: int, shared: bool = False) -> None:
        if shared and self._exchange is not None:
            axis = self._exchange.axis
            start, stop = share(tensor.numel(), axis.rank, axis.size)
            tensor = tensor.reshape(-1)[start:stop]
        if tensor.numel():
            self._post.send(tensor, peer, tag)

    def _receive(self, spec: TensorSpec, peer: int, tag: int) -> Wait:
        if 0 in spec.shape:
            return lambda: torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        if not spec.shared or self._exchange is None:
            return self._post.receive(spec.shape, spec.dtype, self.device, peer, tag)
        exchange, numel = self._exchange, math.prod(spec.shape)
        start, stop = share(numel, exchange.axis.rank, exchange.axis.size)
        receive = self._post.receive((stop - start,), spec.dtype, self.device, peer, tag)
        return lambda: exchange.gather(receive(), 0, numel).view(spec.shape)


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest()


def _describe(spec: Spec) -> str:
    def one(item: TensorSpec) -> str:
        gradient = "" if item.requires_grad else " without a gradient"
        return f"{str(item.dtype).removeprefix('torch.')} {list(item.shape)}{gradient}"

    parts = [one(item) if isinstance(item, TensorSpec) else repr(item) for item in tree_leaves(spec.items)]
    return ", ".join(parts) or "nothing"
