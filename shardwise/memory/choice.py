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
# How often the room of a knapsack is halved, whose blocks do not all keep most at the same moment.
HALVINGS = 6


class Item(NamedTuple):
    """Results that are kept together: their path in the block, their bytes, and the seconds computing them takes."""

    path: str
    size: int
    seconds: float


class Moment(NamedTuple):
    """How many forwards wait for their backwards, and how many backwards for their W."""

    forwards: int
    backwards: int


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
        put_off: bytes that its weight gradients need from B to W, whatever is kept.
        moments: of a step, those at which a rank may keep most, the same ones for all its blocks: how many forwards of
            the block wait for their backwards, and how many backwards for their W.
        runs: forwards of it in a step.
    """

    path: str
    inputs: int
    plain: int
    without: int
    rest: float
    items: tuple[Item, ...]
    put_off: int
    moments: tuple[Moment, ...]
    runs: int

    @property
    def most(self) -> int:
        """How many forwards wait for their backwards at once, at most."""
        return max(moment.forwards for moment in self.moments)


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


def peak(blocks: Sequence[Costs], sizes: Sequence[int]) -> int:
    """What the blocks hold at most at once, if they keep so much of a microbatch each."""
    moments = zip(*(costs.moments for costs in blocks), strict=True)
    pairs = list(zip(blocks, sizes, strict=True))
    return max(
        (
            sum(m.forwards * size + m.backwards * costs.put_off for (costs, size), m in zip(pairs, moment, strict=True))
            for moment in moments
        ),
        default=0,
    )


def least_bytes(blocks: Sequence[Costs]) -> int:
    """What the blocks hold at least at once."""
    return peak(blocks, [options(costs)[0].size for costs in blocks])


def solve(blocks: Sequence[Costs], limit: float) -> list[Option]:
    """The options that take the least time and hold no more than `limit` bytes at once; those with the fewest bytes, if
    even they hold more."""
    if peak(blocks, [costs.plain for costs in blocks]) <= limit:
        return [everything(costs) for costs in blocks]
    found = [options(costs) for costs in blocks]
    room = limit - least_bytes(blocks)
    if room <= 0:
        return [choices[0] for choices in found]
    chosen = _knapsack(blocks, found, room)
    if len(blocks[0].moments) == 1:
        return chosen
    # Each block was counted when it keeps most, which for others is another moment: there may be more room.
    low, high = (
        room,
        float(sum((choices[-1].size - choices[0].size) * c.most for c, choices in zip(blocks, found, strict=True))),
    )
    for _ in range(HALVINGS):
        tried = _knapsack(blocks, found, (low + high) / 2)
        if peak(blocks, [option.size for option in tried]) <= limit:
            low, chosen = (low + high) / 2, tried
        else:
            high = (low + high) / 2
    return chosen


def _knapsack(blocks: Sequence[Costs], found: list[list[Option]], room: float) -> list[Option]:
    """The options that take the least time and `room` bytes beyond the least, if all blocks keep most at once."""
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
    return math.ceil((option.size - least.size) * costs.most / step - 1e-6)


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
