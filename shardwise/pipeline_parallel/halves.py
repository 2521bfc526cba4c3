"""The halves of a backward pass, input and weight gradients, as the actions of a row run them."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.pipeline_parallel.schedule import Action, Kind, Step


@dataclass(frozen=True)
class Half:
    """Which half of a microbatch's backward an action runs: input gradients (`backward`), weight gradients (`weights`),
    or both; and whether each is the chunk's last before its update."""

    microbatch: int
    backward: bool
    weights: bool
    last_backward: bool
    last_weights: bool


def halves_of(steps: Sequence[Step]) -> dict[int, Half]:
    """By position, what every backward action of a row does, and whether it is its chunk's last of that half before the
    next update."""
    found: dict[int, Half] = {}
    # The halves, by (half, chunk), whose last one before an update in this row has yet to be met, going backwards.
    open_halves: set[tuple[str, int]] = set()
    for position in range(len(steps) - 1, -1, -1):
        step = steps[position]
        if not isinstance(step, Action) or step.kind is Kind.F:
            continue
        both = {("backward", step.chunk), ("weights", step.chunk)}
        if step.kind is Kind.U:
            open_halves |= both
            continue
        backward, weights = step.kind is not Kind.W, step.kind is not Kind.B
        found[position] = Half(
            step.microbatch,
            backward,
            weights,
            last_backward=backward and ("backward", step.chunk) in open_halves,
            last_weights=weights and ("weights", step.chunk) in open_halves,
        )
        if backward:
            open_halves.discard(("backward", step.chunk))
        if weights:
            open_halves.discard(("weights", step.chunk))
    return found
