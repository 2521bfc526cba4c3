"""Executes one rank's row of a schedule.

Receives are posted ahead of the actions that need them, sends do not hold up computation, and an activation is let go
of when its backward is done. There is no barrier: a rank waits for nothing but the messages and sums that its next
action needs.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.functions import apply
from shardwise.pipeline_parallel.halves import Half, halves_of
from shardwise.pipeline_parallel.schedule import Action, Kind, Receive, Schedule, Send, Step
from shardwise.pipeline_parallel.wire import Incoming, Spec, Wire

# Messages whose buffers wait for their sender beyond the next one needed: enough to hide a transfer behind an action.
RECEIVES_AHEAD = 2


class Chunk(Protocol):
    """What the runner asks of a model chunk on this rank."""

    def forward(self, microbatch: int, received: tuple[Any, ...], inputs: Any, again: bool = False) -> Any:
        """Run the chunk's modules, with the weight version that the microbatch uses, the first time or, with the same
        result, again."""

    def begin_backward(self, half: Half) -> None:
        """A backward pass begins."""

    def end_backward(self, half: Half) -> None:
        """That pass has ended; if it was the weight half alone, what was put off is to be computed now."""


@dataclass
class Microbatch:
    """One microbatch's own data, which every pipeline rank has: inputs and targets, their signature, and what its loss
    is divided by."""

    inputs: Any
    targets: Any
    signature: Any
    count: Callable[[], Tensor]


@dataclass
class _Held:
    """What is kept of a microbatch on a chunk between its forward and its backward."""

    leaves: list[Tensor]  # received tensors that need a gradient
    roots: list[GradientEdge]  # of the outputs that need one
    spec: Spec | None = None  # of what was sent on
    loss: Tensor | None = None
    again: tuple[Any, ...] | None = None  # what was received, if forward is to be computed again before backward
    asked: list[bool] | None = None  # which of the gradients that come back are of use, if not all are


class Stamp(NamedTuple):
    """When an action ran, in seconds of `time.perf_counter`: from when it had all it waited for."""

    action: Action
    start: float
    end: float


@dataclass
class Runner:
    """Runs rows of a schedule on this rank.

    Args:
        schedule: for the placement of stages.
        rank: this rank's position along the pipeline axis.
        chunks: this rank's model chunks.
        wire: messages to the other pipeline ranks.
        loss_sum: (output, targets) -> the loss summed over targets; called by the last stage.
        update: called for every U with its action.
        loss_scale: a factor on the loss that backwards start from (fp16).
        recompute: keep of a forward what it was given alone, and compute it again before its backward, unless that
            comes next.
        finished: called with a microbatch's number when this rank has computed all that it will of it.
    """

    schedule: Schedule
    rank: int
    chunks: Sequence[Chunk]
    wire: Wire
    loss_sum: Callable[[Any, Any], Tensor]
    update: Callable[[Action], None] = lambda action: None
    stamps: list[Stamp] | None = None
    loss_scale: float = 1.0
    recompute: bool = False
    finished: Callable[[int], None] = lambda number: None
    losses: list[Tensor] = field(default_factory=list)
    _held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    _local: dict[tuple[Kind, int, int], Any] = field(default_factory=dict)
    _microbatches: dict[int, Microbatch] = field(default_factory=dict)
    _passes_left: dict[int, int] = field(default_factory=dict)
    _began: float = 0.0  # when the action at hand had what it waited for

    def feed(self, number: int, microbatch: Microbatch) -> None:
        """Make microbatch `number` (counted from the first one ever) known; it is forgotten after its last use."""
        self._microbatches[number] = microbatch
        self._passes_left[number] = len(self.chunks)

    def run(self, steps: Sequence[Step], first_microbatch: int, training: bool = True) -> None:
        """Execute a row with its transfers.

        Args:
            steps: from `transfers`, microbatches numbered from `first_microbatch`.
            training: whether forwards keep what backwards need.
        """
        absolute = [step._replace(microbatch=step.microbatch + first_microbatch) for step in steps]
        receives: deque[Receive] = deque(step for step in absolute if isinstance(step, Receive))
        posted: dict[tuple[Kind, int, int], Incoming] = {}
        halves = halves_of(absolute)
        for position, step in enumerate(absolute):
            if isinstance(step, Receive):
                continue
            try:
                if isinstance(step, Send):
                    self._send(step)
                    continue
                self._post(receives, posted)
                self._began = time.perf_counter()
                if step.kind is Kind.F:
                    graph = training and not (self.recompute and _returns_later(absolute, position))
                    self._forward(step, receives, posted, training, graph)
                elif step.kind is Kind.U:
                    self.update(step)
                else:
                    self._backward(step, halves[position], receives, posted)
                if self.stamps is not None:
                    self.stamps.append(Stamp(step, self._began, time.perf_counter()))
                self.wire.prune()
            except Exception as error:
                stage = self.schedule.stage(self.rank, step.chunk)
                doing = f"{'the message behind ' if isinstance(step, Send) else ''}{step.kind.value}"
                error.add_note(
                    f"in {doing} of microbatch {step.microbatch} on stage {stage} (pipeline rank {self.rank})"
                )
                raise

    def finish(self) -> None:
        """Wait until everything has been sent."""
        self.wire.flush()

    def _stage(self, chunk: int) -> int:
        return self.schedule.stage(self.rank, chunk)

    # Receiving

    def _post(self, receives: deque[Receive], posted: dict[tuple[Kind, int, int], Incoming]) -> None:
        while receives and len(posted) < RECEIVES_AHEAD:
            incoming = self._open(receives[0], ahead=True)
            if incoming is None:
                return
            receive = receives.popleft()
            posted[receive.kind, receive.microbatch, receive.boundary] = incoming

    def _open(self, receive: Receive, ahead: bool) -> Incoming | None:
        kind, number, boundary, chunk, peer = receive
        if kind is Kind.F:
            return self.wire.receive_activation(number, boundary, peer, self._microbatches[number].signature, ahead)
        held = self._held.get((number, chunk))
        spec = held.spec if held else None
        if spec is None:
            microbatch = self._microbatches.get(number)
            spec = self.wire.known(boundary, microbatch.signature) if microbatch else None
        if spec is None:
            assert ahead, "a gradient is due before its forward"
            return None
        return self.wire.receive_tensors(kind, number, boundary, peer, spec.gradients)

    def _receive(
        self,
        kind: Kind,
        number: int,
        boundary: int,
        receives: deque[Receive],
        posted: dict[tuple[Kind, int, int], Incoming],
    ) -> Incoming:
        """The message an action needs; receives are opened in their sender's order up to it."""
        key = (kind, number, boundary)
        while key not in posted:
            receive = receives.popleft()
            incoming = self._open(receive, ahead=False)
            assert incoming is not None
            posted[receive.kind, receive.microbatch, receive.boundary] = incoming
        return posted.pop(key)

    # Actions

    def _forward(
        self,
        action: Action,
        receives: deque[Receive],
        posted: dict[tuple[Kind, int, int], Incoming],
        training: bool,
        graph: bool,
    ) -> None:
        number, chunk = action.microbatch, action.chunk
        stage = self._stage(chunk)
        received: tuple[Any, ...] = ()
        if stage > 0:
            if self._neighbour(stage - 1) is None:
                incoming = self._receive(Kind.F, number, stage - 1, receives, posted)
                assert incoming.spec is not None
                received = incoming.spec.fill(incoming.wait())
            else:
                received = self._local.pop((Kind.F, number, stage - 1))
        self._began = time.perf_counter()
        with torch.set_grad_enabled(graph):
            # A loss that will be computed again would be computed, with promised logits the head too, for nothing.
            held, values = self._compute(number, chunk, received, with_loss=graph or not training)
        if stage < self.schedule.total_stages - 1:
            if training and self.recompute:  # without a graph nobody knows which gradients will be of use
                values = tree_map_only(Tensor, _asking, values)
            self._local[Kind.F, number, stage] = values
        if not training:
            self._pass_done(number)
        else:
            self._held[number, chunk] = held if graph else _Held([], [], again=received)

    def _compute(
        self, number: int, chunk: int, received: tuple[Any, ...], again: bool = False, with_loss: bool = True
    ) -> tuple[_Held, Any]:
        """A chunk's forward, with the loss behind the last one: what backward needs, and what the chunk returned."""
        leaves: list[Tensor] = []
        microbatch = self._microbatches[number]
        value = self.chunks[chunk].forward(number, _enter(received, leaves), microbatch.inputs, again)
        if self._stage(chunk) == self.schedule.total_stages - 1:
            loss = self.loss_sum(value, microbatch.targets) if with_loss else None
            if with_loss and not (isinstance(loss, Tensor) and loss.is_floating_point()):
                what = f"a tensor of {loss.dtype}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
                raise ValueError(f"the loss has returned {what}; return the sum over targets, a tensor of real numbers")
            if loss is not None:
                self.losses.append(loss.detach())
            return _Held(leaves, [], loss=loss), None
        values = value if isinstance(value, tuple) else (value,)
        tensors = [v for v in tree_leaves(values) if isinstance(v, Tensor)]
        roots = [get_gradient_edge(v) for v in tensors if v.requires_grad]
        asked = [v.requires_grad for v in tensors if v.is_floating_point()] if self.recompute else None
        return _Held(leaves, roots, asked=asked), values

    def _neighbour(self, stage: int) -> int | None:
        """The local chunk that is `stage`, if it is on this rank."""
        rank, chunk = self.schedule.owner(stage)
        return chunk if rank == self.rank else None

    def _backward(
        self, action: Action, half: Half, receives: deque[Receive], posted: dict[tuple[Kind, int, int], Incoming]
    ) -> None:
        number, chunk = action.microbatch, action.chunk
        took = self._compute_again(number, chunk) if half.backward else 0.0
        gradients = self._output_gradients(number, chunk, receives, posted) if half.backward else []
        self._began = time.perf_counter() - took
        self.chunks[chunk].begin_backward(half)
        if half.backward:
            held = self._held.pop((number, chunk))
            if held.loss is not None and held.loss.requires_grad:
                torch.autograd.backward(held.loss, gradients[0])
            elif held.roots:
                torch.autograd.backward(held.roots, gradients)
            if self._stage(chunk) > 0:
                self._local[Kind.B, number, self._stage(chunk) - 1] = [
                    torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in held.leaves
                ]
        self.chunks[chunk].end_backward(half)
        if half.weights and self._pass_done(number):
            self.forget(number)

    def _compute_again(self, number: int, chunk: int) -> float:
        """Compute a forward again of which the inputs alone were kept: before its gradients are waited for. The seconds
        it took."""
        held = self._held[number, chunk]
        if held.again is None:
            return 0.0
        start = time.perf_counter()
        with torch.enable_grad():
            self._held[number, chunk], _ = self._compute(number, chunk, held.again, again=True)
        self._held[number, chunk].spec = held.spec
        return time.perf_counter() - start

    def _output_gradients(
        self, number: int, chunk: int, receives: deque[Receive], posted: dict[tuple[Kind, int, int], Incoming]
    ) -> list[Tensor]:
        """The gradients a chunk's backward starts from: the loss's own, or those of its outputs from the next stage."""
        stage = self._stage(chunk)
        loss = self._held[number, chunk].loss
        if loss is not None:
            count = self._microbatches[number].count().to(loss.device)
            return [torch.full_like(loss, self.loss_scale) / count.clamp(min=1)]
        gradients: list[Tensor]
        if self._neighbour(stage + 1) is not None:
            gradients = self._local.pop((Kind.B, number, stage))
        else:
            gradients = self._receive(Kind.B, number, stage, receives, posted).wait()
        asked = self._held[number, chunk].asked
        return gradients if asked is None else [found for found, use in zip(gradients, asked, strict=True) if use]

    def _pass_done(self, number: int) -> bool:
        """Count the last pass of a chunk over a microbatch; whether it was the last chunk's."""
        self._passes_left[number] -= 1
        if self._passes_left[number]:
            return False
        self.finished(number)
        return True

    def forget(self, number: int) -> None:
        """Let go of a microbatch's own data."""
        self._microbatches.pop(number, None)
        self._passes_left.pop(number, None)

    # Sending

    def _send(self, send: Send) -> None:
        kind, number, boundary, chunk, peer = send
        values = self._local.pop((kind, number, boundary))
        if kind is Kind.B:
            self.wire.send_tensors(kind, number, boundary, peer, values)
            return
        spec = self.wire.send_activation(number, boundary, peer, values, self._microbatches[number].signature)
        if (number, chunk) in self._held:
            self._held[number, chunk].spec = spec


class _Entrance(torch.autograd.Function):
    """A received tensor as the stage sees it: not a leaf, so that the stage's first operation may work in place, as it
    may in the whole model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _enter(received: tuple[Any, ...], leaves: list[Tensor]) -> tuple[Any, ...]:
    """What a stage is given for what it received. The leaves of its own graph are added to `leaves`."""

    def one(tensor: Tensor) -> Tensor:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor.detach()
        leaves.append(tensor.detach().requires_grad_())
        entered: Tensor = apply(_Entrance, leaves[-1])
        return entered

    found: tuple[Any, ...] = tree_map_only(Tensor, one, received)
    return found


def _asking(value: Tensor) -> Tensor:
    """The tensor, such that a gradient is sent back for it if it can have one."""
    return value if value.requires_grad or not value.is_floating_point() else value.detach().requires_grad_()


def _returns_later(steps: Sequence[Step], position: int) -> bool:
    """Whether other actions come between a forward and its backward."""
    following = next(step for step in steps[position + 1 :] if isinstance(step, Action))
    return following.kind is Kind.F or following[1:] != steps[position][1:]
