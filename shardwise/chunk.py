"""A rank's chunk of the model: its modules, its buckets, and, where updates overtake microbatches, its weight
versions."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.data_parallel.buckets import Buckets, Scale
from shardwise.data_parallel.reducer import Flat
from shardwise.data_parallel.units import Units
from shardwise.gradient import Tape, hook
from shardwise.head import Head
from shardwise.memory.offload_activations import Activations
from shardwise.mesh import Axis
from shardwise.optimizers.optimizer import Optimizer
from shardwise.pipeline_parallel.halves import Half
from shardwise.randomness import seed_generators
from shardwise.tensor_parallel.slices import Slices

Owner = tuple[nn.Module, str]


@dataclass
class _Version:
    """One version of a chunk's weights: what every bucket stores of it, and parameters that are views into that (where
    ZeRO stage 3 gathers, into what is gathered, which is one memory for all versions)."""

    stored: dict[int, Flat]  # by id of bucket
    parameters: dict[str, nn.Parameter]
    users: set[int] = field(default_factory=set)  # microbatches between their forward and the end of their backward


class ModelChunk:
    """What the runner runs: forwards and backwards of one stage, and its updates.

    Args:
        module: the stage.
        buckets: its own trainable parameters.
        shared: buckets of parameters that other stages hold too, whose sums wait for all of them.
        owners: by parameter name, the modules that hold the parameter and under which attribute.
        parameters: by parameter name, the parameters as they stand in the modules.
        tape: where the modules' weight gradients are put off.
        overlap: whether sums start while backward still runs.
        seeds: microbatch -> seed of the random numbers of its forward.
        splits: by name, the axes that layouts divide parameters over.
        version_of: microbatch -> the weight version it uses, for asynchronous schedules.
        slices: of sequences that are computed slice by slice, which then count as microbatches.
        activations: keeps elsewhere what forward saves for backward; None leaves it.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Buckets,
        shared: list[Buckets],
        owners: dict[str, list[Owner]],
        parameters: dict[str, nn.Parameter],
        tape: Tape,
        overlap: bool,
        seeds: Callable[[int], int],
        splits: dict[str, Axis],
        version_of: Callable[[int], int] | None,
        slices: Slices | None = None,
        activations: Activations | None = None,
    ) -> None:
        self.module = module
        self.buckets = buckets
        self.overlap = overlap
        self.current = 0
        self._shared = shared
        self._owners = owners
        self.tape = tape
        self._seeds = seeds
        self._splits = splits
        self._units = Units(module, buckets)
        self._version_of = version_of
        self._slices = slices
        self._activations = activations
        self._put_off: dict[int, list[Callable[[], None]]] = {}
        self._next_microbatch = 0
        self._versions = {0: _Version({id(bucket): bucket.stored for bucket in buckets.buckets}, parameters)}
        self._spare: list[_Version] = []
        self._bound = 0
        self._in_place = parameters  # as they stand in the modules
        self._head: Head | None = None

    def adopt(self, head: Head) -> None:
        """Have forwards leave the logits to the loss."""
        self._head = head
        head.holding = lambda: self._units.holding(head.module)

    # The runner's side

    def forward(self, microbatch: int, received: tuple[Any, ...], inputs: Any, again: bool = False) -> Any:
        """Run the modules with the microbatch's weight version and random numbers, the first time or, with the same
        result, again."""
        if self._slices is not None:
            self._slices.enter(microbatch, again)
        if self._version_of is not None and torch.is_grad_enabled():
            number = self._version_of(microbatch)
            assert number in self._versions, (number, sorted(self._versions), self.current)
            self._bind(number)
            self._versions[number].users.add(microbatch)
            self._next_microbatch = microbatch + 1
        if self.module.training:
            seed_generators(self._seeds(microbatch))
        saving = nullcontext() if self._activations is None else self._activations.saving(self.module)
        promising = nullcontext() if self._head is None else self._head.promising()
        # Running statistics and the like change once.
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()] if again else []
        with self._units.running(), saving, promising:
            value = self.module(received, inputs)
        for buffer, now in buffers:
            buffer.data.copy_(now)  # through .data: what autograd has saved of it stays valid
        return value

    def note(self) -> Callable[[], None]:
        """Note the weight version that is computed with; the function that is returned makes it so again."""
        bound = self._bound
        return lambda: self._bind(bound)

    def begin_backward(self, half: Half) -> None:
        """Make ready for what lands in this pass: the buckets count the last ones, the tape keeps what is put off."""
        if self._slices is not None:  # layers may be computed again
            self._slices.enter(half.microbatch, again=True)
        if self._version_of is not None:
            self._bind(self._version_of(half.microbatch))
        for buckets in (self.buckets, *self._shared):
            if buckets.spent:
                buckets.begin()
        if self.buckets.every_microbatch and not self.buckets.puts_off:
            self.buckets.last(half.backward, half.weights)
        elif not self.buckets.every_microbatch and (half.last_backward or half.last_weights):
            self.buckets.last(half.last_backward, half.last_weights)
        if half.backward:
            self._units.begin_backward()
        self.tape.record = None if half.weights else self._put_off.setdefault(half.microbatch, [])

    def end_backward(self, half: Half) -> None:
        """Compute what was put off, if this was its pass, let go of the version, and start the sums that are due."""
        self.tape.record = None
        if half.weights and not half.backward:
            with torch.no_grad():
                for work in self._put_off.pop(half.microbatch, []):
                    work()
        if half.weights:
            for version in self._versions.values():
                version.users.discard(half.microbatch)
        if half.backward:
            self._units.end_backward()
        if half.last_weights or (half.weights and self.buckets.every_microbatch):
            self.buckets.flush(self.overlap)

    # The engine's side

    def update(self, optimizer: Optimizer, lr: float, step: int, scale: Scale, apply: bool = True) -> None:
        """Apply the optimizer with the summed gradients, or, if not `apply`, leave the parameters as they are. With an
        asynchronous schedule this makes a new weight version, in new memory if microbatches in flight need the old
        one."""
        if self._version_of is not None:
            self._advance(self._version_of(self._next_microbatch), apply)
        if apply:
            self.buckets.update(optimizer, lr, step, scale, self._splits)
        self.buckets.spent = True

    def _advance(self, oldest: int, apply: bool) -> None:
        """Make the buckets store a new version; `oldest` is what the next forward uses."""
        version = self._versions[self.current]
        # Before the copy, which takes the memory of what nobody needs any more.
        for number in [n for n in self._versions if n < min(oldest, self.current) and not self._versions[n].users]:
            self._spare.append(self._versions.pop(number))
        if version.users or oldest <= self.current:
            version = self._spare.pop() if self._spare else self._allocate()
            for bucket in self.buckets.buckets:
                bucket.move(version.stored[id(bucket)], updated=apply)
        else:
            del self._versions[self.current]
        self.current += 1
        self._versions[self.current] = version

    def changed(self) -> list[str]:
        """Parameters that somebody has frozen, or put another one in the place of."""
        return [
            name
            for name, parameter in self._in_place.items()
            if not parameter.requires_grad
            or any(module._parameters.get(key) is not parameter for module, key in self._owners[name])
        ]

    def settle(self) -> None:
        """No microbatch is in flight: keep the newest version alone, where everything else looks for the parameters."""
        if self._version_of is None:
            return
        for number in [number for number in self._versions if number != self.current]:
            self._spare.append(self._versions.pop(number))
        version = self._versions.pop(self.current)
        assert not version.users, version.users
        self.current = self._next_microbatch = 0
        self._versions[0] = version
        self._bound = -1
        self._bind(0)

    @property
    def version_bytes(self) -> int:
        """Bytes of the weight versions held beside the first."""
        beside = len(self._versions) + len(self._spare) - 1
        return beside * sum(bucket.memory()["parameters"] for bucket in self.buckets.buckets)

    @property
    def num_versions(self) -> int:
        """Weight versions held now."""
        return len(self._versions)

    def _bind(self, number: int) -> None:
        """Make the modules compute with a version."""
        if number == self._bound:
            return
        version = self._versions[number]
        for name, parameter in version.parameters.items():
            for module, attribute in self._owners[name]:
                module._parameters[attribute] = parameter
        for bucket in self.buckets.buckets:
            bucket.gather_from(version.stored[id(bucket)])
        self._bound, self._in_place = number, version.parameters

    def _allocate(self) -> _Version:
        """Memory for a further version. Collective over the gradient axis, whose ranks make versions alike."""
        stored = {id(bucket): bucket.allocate() for bucket in self.buckets.buckets}
        parameters = {}
        for bucket, entry in self.buckets:
            if bucket.gathers:
                parameters[entry.name] = self._versions[self.current].parameters[entry.name]
                continue
            parameters[entry.name] = nn.Parameter(bucket.view(stored[id(bucket)].tensor, entry))
            hook(parameters[entry.name], entry.slot)
        return _Version(stored, parameters)
