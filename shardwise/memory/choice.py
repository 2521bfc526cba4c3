"""Which results of a block are kept: what each choice saves and costs, and the best choices within a limit.

A block is as it is (everything kept), or keeps its inputs and the results of some of its parts. With the bytes and
seconds of every part measured, the least time within a limit of bytes is a knapsack with one choice a block
(cf. Beaumont et al., arXiv 1911.13214; Korthikanti et al., arXiv 2205.05198), solved by dynamic programming.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Parts of a block beyond which not every set of them is looked at.
MOST_PARTS = 10
# Steps into which a limit is divided.
STEPS = 4096


class Item(NamedTuple):
    """Results that are kept together: their path in the block, their bytes, and the seconds computing them takes."""

    path: str
    size: int
    seconds: float


@dataclass(frozen=True)
class Costs:
    """What one block's choices cost, as measured.

    Args:
        path: of the block.
        inputs: bytes of its inputs, which are kept whenever anything is computed again.
        plain: bytes it keeps if nothing is.
        without: bytes it would keep if the plan computed nothing again.
        rest: seconds of what is always computed again, unless nothing is.
        items: what may be kept beside the inputs.
        microbatches: how many forwards of it wait for their backwards at once, at most.
        runs: forwards of it in a step.
    """

    path: str
    inputs: int
    plain: int
    without: int
    rest: float
    items: tuple[Item, ...]
    microbatches: int
    runs: int


@dataclass(frozen=True)
class Option:
    """One way to treat a block: what is kept (None: everything), bytes of it and seconds of computing the rest, for one
    microbatch."""

    kept: frozenset[str] | None
    size: int
    seconds: float


def everything(costs: Costs) -> Option:
    """Nothing is computed again."""
    return Option(None, costs.plain, 0.0)


def keeping(costs: Costs, kept: Sequence[Item]) -> Option:
    """The inputs are kept, and these results."""
    missing = sum(item.seconds for item in costs.items if item not in kept)
    return Option(
        frozenset(item.path for item in kept), costs.inputs + sum(item.size for item in kept), costs.rest + missing
    )


def options(costs: Costs) -> list[Option]:
    """The choices of a block that no other one beats in both bytes and seconds, fewest bytes first."""
    items = sorted(costs.items, key=lambda item: item.seconds / max(item.size, 1), reverse=True)
    if len(items) <= MOST_PARTS:
        sets = [c for number in range(len(items) + 1) for c in itertools.combinations(items, number)]
    else:
        sets = [tuple(items[:number]) for number in range(len(items) + 1)]
    found: list[Option] = []
    candidates = [everything(costs), *(keeping(costs, chosen) for chosen in sets)]
    for option in sorted(candidates, key=lambda option: (option.size, option.seconds)):
        if not found or option.seconds < found[-1].seconds:
            found.append(option)
    return found


def least_bytes(blocks: Sequence[Costs]) -> int:
    """What the blocks keep at least at once."""
    return sum(options(costs)[0].size * costs.microbatches for costs in blocks)


def solve(blocks: Sequence[Costs], limit: float) -> list[Option]:
    """The options that take the least time and keep no more than `limit` bytes at once; those with the fewest bytes, if
    even they keep more."""
    if sum(costs.plain * costs.microbatches for costs in blocks) <= limit:
        return [everything(costs) for costs in blocks]
    found = [options(costs) for costs in blocks]
    least = least_bytes(blocks)
    room = limit - least
    if room <= 0:
        return [choices[0] for choices in found]
    step = room / STEPS
    # best[c]: the least seconds of the blocks so far, c steps of room being left for those that follow.
    best = torch.zeros(STEPS + 1, dtype=torch.float64)
    taken: list[torch.Tensor] = []
    for costs, choices in zip(blocks, found, strict=True):
        totals = []
        for option in choices:
            shift = _steps(costs, option, choices[0], step)
            moved = torch.full_like(best, float("inf"))
            if shift <= STEPS:
                moved[: STEPS + 1 - shift] = best[shift:] + option.seconds * costs.runs
            totals.append(moved)
        best, which = torch.stack(totals).min(0)
        taken.append(which)
    return _walk(blocks, found, taken, step, int(best.argmin()))


def _steps(costs: Costs, option: Option, least: Option, step: float) -> int:
    """The room that an option takes beyond the least one, rounded up, but for the rounding of the division itself."""
    return math.ceil((option.size - least.size) * costs.microbatches / step - 1e-6)


def _walk(
    blocks: Sequence[Costs], found: list[list[Option]], taken: list[torch.Tensor], step: float, place: int
) -> list[Option]:
    """Back from the best end to the choices that led there."""
    chosen: list[Option] = []
    for costs, choices, which in zip(reversed(blocks), reversed(found), reversed(taken), strict=True):
        option = choices[int(which[place])]
        place += _steps(costs, option, choices[0], step)
        chosen.append(option)
    return chosen[::-1]
