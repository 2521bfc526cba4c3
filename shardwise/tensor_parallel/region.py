"""What the tensor-parallel modules of a rank have in common."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import batch as batches
from shardwise.exchange import Exchange
from shardwise.gradient import Slot, Tape
from shardwise.layout import share
from shardwise.mesh import Axis

# The stream between the divided layers is (batch, sequence, ...).
SEQUENCE_DIM = 1
# Into so many parts an accelerator divides a product and the sum behind it, or the gather before it, so that one part
# travels while the next is computed. On a CPU, whose cores both compute and copy, four cost 6 to 8 % (measured on two).
PARTS = 4
# Positions a part has at least.
PART_TOKENS = 1024


class Region:
    """The tensor axis as modules see it.

    Args:
        axis: the tensor axis.
        sequence: whether the stream between the divided layers is split over the sequence.
        exchange: sums and gathers over the axis.
    """

    def __init__(self, axis: Axis, sequence: bool, exchange: Exchange) -> None:
        self.axis = axis
        self.sequence = sequence
        self.exchange = exchange
        self.length = 0  # positions of the microbatch at hand, over all ranks
        self.at_begin: list[Callable[[], None]] = []

    def begin(self, inputs: Any) -> None:
        """A microbatch's forward begins on a stage.

        Raises:
            ValueError: the sequence is split and no input says how long it is.
        """
        for forget in self.at_begin:
            forget()
        if not self.sequence:
            return
        long = [tensor for tensor in batches.tensors(inputs) if tensor.ndim > SEQUENCE_DIM]
        if not long:
            raise ValueError(
                "plan.sequence splits dimension 1 of the inputs, and no input has one; set plan.sequence to false"
            )
        self.length = long[0].shape[SEQUENCE_DIM]

    def note(self) -> Callable[[], None]:
        """Note what microbatch is at hand; the function that is returned makes it so again."""
        length = self.length
        return lambda: setattr(self, "length", length)

    def attend(self, stage: nn.Module) -> None:
        """Have `begin` called before every forward of a stage, which is called with (received, inputs)."""
        stage.register_forward_pre_hook(lambda _, args: self.begin(args[1]))

    def parts(self, x: Tensor) -> list[slice]:
        """The rows (of dimension 0) of x (B, S, ...) that are computed, and exchanged, one after another."""
        num = 1
        if self.axis.size > 1 and x.ndim > SEQUENCE_DIM + 1 and x.device.type != "cpu":
            num = min(PARTS, x.shape[0], x.shape[0] * x.shape[SEQUENCE_DIM] // PART_TOKENS)
        ranges = [share(x.shape[0], number, max(1, num)) for number in range(max(1, num))]
        return [slice(start, stop) for start, stop in ranges]

    def gathered(self, x: Tensor, length: int) -> Iterator[Tensor]:
        """The whole stream from the ranks' shares of it, without a gradient, part by part; the next one travels
        meanwhile."""
        parts = self.parts(x)
        wait = self.exchange.start_gather(x[parts[0]], SEQUENCE_DIM, length)
        for rows in parts[1:]:
            found = wait()
            wait = self.exchange.start_gather(x[rows], SEQUENCE_DIM, length)
            yield found
        yield wait()

    @property
    def scatter(self) -> int | None:
        """The dimension along which sums are left divided: the sequence, or None."""
        return SEQUENCE_DIM if self.sequence else None

    def share(self) -> tuple[int, int]:
        """The positions that are this rank's."""
        return share(self.length, self.axis.rank, self.axis.size)

    def gather(self, shard: Tensor, length: int) -> Tensor:
        """The whole stream of `length` positions from the ranks' shares of it, without a gradient."""
        return self.exchange.gather(shard, SEQUENCE_DIM, length)


class Landing:
    """Where the gradients of one divided module land: in its slots if it alone writes them, else with autograd.

    Args:
        module: the module.
        transposed: whether its weight is (in, out), as of Hugging Face's Conv1D.
    """

    def __init__(self, module: nn.Module, transposed: bool = False) -> None:
        self.module = module
        self.transposed = transposed
        self.layer: object = None  # what computes the module, for techniques that look for it
        self.slots: dict[str, Slot] = {}
        self.tape = Tape()

    def attach(self, slots: dict[str, Slot], tape: Tape) -> None:
        self.slots, self.tape = slots, tape

    def direct(self, name: str) -> Slot | None:
        """The slot that the module writes itself, if there is one."""
        slot = self.slots.get(name)
        return slot if slot is not None and slot.direct else None

    def parameter(self, name: str) -> Tensor | None:
        return self.module._parameters.get(name)

    def matrix(self) -> Tensor:
        """The weight of a linear layer, (out, in)."""
        weight = self.parameter("weight")
        assert weight is not None
        return weight.t() if self.transposed else weight

    def land_matrix(self, grad: Tensor, x: Tensor) -> None:
        """Add a linear layer's weight gradient to its slot: grad (N, out), x (N, in)."""
        slot = self.direct("weight")
        if slot is not None:
            slot.matmul(*((x.t(), grad) if self.transposed else (grad.t(), x)))


def rows_of(tensor: Tensor) -> Tensor:
    """(..., H) as a matrix (N, H)."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def product(left: Tensor, right: Tensor, out: Tensor, first: bool) -> None:
    """left @ right into `out`, or added to what is there if it is not the first."""
    if first:
        torch.mm(left, right, out=out)
    else:
        out.addmm_(left, right)
