"""Recomputation: which blocks of a stage are computed again in backward (`plan.recompute`).

"full" computes every block again from its input, "every:K" each K-th one; "sqrt" divides a chain of n parts into about
sqrt(n) segments and keeps the inputs of segments alone (Chen et al., arXiv 1604.06174, section 4).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from shardwise.memory.replay import Block, Note, stand_in
from shardwise.pipeline_parallel.schedule import Kind, Schedule, unroll
from shardwise.pipeline_parallel.stages import Stage, Whole, parts_of

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def require(model: nn.Module, how: str | float) -> None:
    """Check that a model has what is to be computed again.

    Raises:
        ValueError: it has not.
    """
    if how == "none":
        return
    if how == "sqrt":
        try:
            parts_of(model)
        except ValueError:
            raise ValueError(
                f'plan.recompute: "sqrt" divides a chain, and {type(model).__name__} is none: make it an '
                "nn.Sequential, give it an attribute `stages` with its submodules in call order, or set plan.recompute "
                'to "full"'
            ) from None
        return
    if not list(_blocks(Whole(model))):
        raise ValueError(
            f"plan.recompute: {type(model).__name__} has no list of blocks (nn.ModuleList, nn.ModuleDict, "
            "nn.Sequential or an attribute `stages`, whose members have layers inside); set plan.recompute to "
            '"sqrt" if it is a chain of layers, else to "none"'
        )


def apply(stage: nn.Module, how: str | float, notes: Sequence[Note], in_flight: int) -> list[Block]:
    """Have blocks of a stage be computed again in backward; the stage is changed in place.

    Args:
        stage: a `Stage` or `Whole`.
        how: `plan.recompute`.
        notes: of what a forward depends on beside its arguments and random numbers.
        in_flight: the most microbatches that are between their forward and their backward on the stage.
    """
    if how == "none":
        return []
    if how == "sqrt":
        assert isinstance(stage, Stage)
        return _segments(stage, notes, in_flight)
    step = int(how.removeprefix("every:")) if isinstance(how, str) and how.startswith("every:") else 1
    found = []
    for number, (path, module) in enumerate(_blocks(stage)):
        if (number + 1) % step == 0:
            found.append(Block(path, module.forward, [module], notes))
            stand_in(module, found[-1])
    return found


def in_flight(schedule: Schedule, rank: int) -> list[int]:
    """By chunk of a pipeline rank, the most microbatches that are between their forward and their backward at once."""
    row = (schedule if schedule.rounds is None else unroll(schedule, 3)).rows[rank]
    now, most = [0] * schedule.num_chunks, [0] * schedule.num_chunks
    for action in row:
        now[action.chunk] += (Kind.F is action.kind) - (action.kind in (Kind.B, Kind.BW))
        most[action.chunk] = max(most[action.chunk], now[action.chunk])
    return most


def _blocks(stage: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A stage's blocks by path, in order: those parts that the model's own list calls blocks, or the members of its
    outermost lists; of both those with modules inside, since a layer alone keeps little beside its input."""
    if isinstance(stage, Stage):
        named = [
            (path, part) for path, part, block in zip(stage.paths, stage.parts, stage.blocks, strict=True) if block
        ]
    else:
        assert isinstance(stage, Whole)
        model = stage.model
        if type(model) is nn.Sequential or getattr(model, "stages", None) is not None:
            named = [(part.path, part.module) for part in parts_of(model) if part.block]
        else:
            named = list(_members(model, ""))
    seen: set[int] = set()
    for path, module in named:
        if id(module) not in seen and next(module.children(), None) is not None:
            seen.add(id(module))
            yield path, module


def _members(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        below = f"{path}.{name}".lstrip(".")
        if isinstance(module, CONTAINERS):
            yield below, child
        else:
            yield from _members(child, below)


def _segments(stage: Stage, notes: Sequence[Note], in_flight: int) -> list[Block]:
    """Divide a chain of parts into segments, each a block. The last one's backward may follow at once, in which case it
    need not be computed again."""
    parts = list(stage.parts)
    size = math.ceil(math.sqrt(len(parts)))
    edges = [0]
    for number in range(size, len(parts), size):
        # What changes its input in place needs what makes that input in its own segment.
        if not getattr(parts[number], "inplace", False):
            edges.append(number)
    edges.append(len(parts))
    found: list[Block] = []
    calls: list[Callable[..., Any]] = []
    for start, stop in zip(edges, edges[1:], strict=False):
        call = stage.segment(start, stop)
        if stop < len(parts) or in_flight > 1 or not stage.last:
            found.append(Block(f"{stage.paths[start]} to {stage.paths[stop - 1]}", call, parts[start:stop], notes))
            call = found[-1]
        calls.append(call)
    stage.segments = calls
    return found
