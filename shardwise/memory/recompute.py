"""Recomputation: which blocks of a stage are computed again in backward, and what of them is kept (`plan.recompute`).

"full" computes every block again from its input, "every:K" each K-th one; "sqrt" divides a chain of n parts into about
sqrt(n) segments and keeps the inputs of segments alone (Chen et al., arXiv 1604.06174, section 4). "selective" keeps
the results of matrix products and of attention beside and computes the rest again: norms, activations, dropout, and
scores within attention's backward (Korthikanti et al., arXiv 2205.05198, section 5). A fraction of memory, or a number
of bytes, keeps what saves most time within it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from shardwise import collectives
from shardwise.gradient import Tape
from shardwise.memory.choice import Costs, Item, Moment, Option, everything, keeping, least_bytes, peak, solve
from shardwise.memory.measure import Measured
from shardwise.memory.parts import watch_parts
from shardwise.memory.replay import Block, Note, Part, stand_in
from shardwise.memory.report import Report
from shardwise.mesh import Axis
from shardwise.pipeline_parallel.schedule import Kind, Schedule, unroll
from shardwise.pipeline_parallel.stages import Stage, Whole, parts_of
from shardwise.plan_values import bytes_of, limit_of

# Steps that compute everything again and are measured, before what is kept is chosen.
MEASURED_STEPS = 2
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


class Recomputation:
    """What one rank computes again, measured in its first steps and then chosen.

    Args:
        how: `plan.recompute`.
        moments: by chunk, what waits at the moments of a step at which the rank may keep most (`moments_of`); may be
            set anew until what is kept is chosen.
        axis: the ranks that hold the same layers or parts of them, which choose alike.
        world: all ranks.
        layer_of: what computes a module that tensor parallelism has divided, None for others.

    Attributes:
        report: what has been chosen; None before.
    """

    def __init__(
        self,
        how: str | float,
        moments: Sequence[tuple[Moment, ...]],
        axis: Axis,
        world: Axis,
        layer_of: Callable[[nn.Module], object],
    ) -> None:
        self.how = how
        self.moments = moments
        self.report: Report | None = None
        self._axis, self._world = axis, world
        self._layer_of = layer_of
        self._blocks: list[_Measured] = []
        self._steps = 0

    def apply(self, chunk: int, stage: nn.Module, notes: Sequence[Note], tape: Tape, runs: int) -> None:
        """Have blocks of a stage be computed again in backward; the stage is changed in place.

        Args:
            chunk: its number on this rank.
            stage: a `Stage` or `Whole`.
            notes: of what a forward depends on beside its arguments and random numbers.
            tape: where its weight gradients are put off.
            runs: microbatches of a step.
        """
        if self.how == "sqrt":
            assert isinstance(stage, Stage)
            for block, modules in _segments(stage, notes, max(moment.forwards for moment in self.moments[chunk])):
                self._add(chunk, block, modules, tape, runs)
            return
        for path, module in _blocks(stage):
            block = Block(path, module.forward, [module], notes)
            stand_in(module, block)
            self._add(chunk, block, [module], tape, runs)

    def _add(self, chunk: int, block: Block, modules: list[nn.Module], tape: Tape, runs: int) -> None:
        for module in modules:
            watch_parts(block, module, self._layer_of)
        self._blocks.append(_Measured(Measured(block, modules, tape), chunk, runs))

    def after_step(self) -> None:
        """Choose, once there are measurements. Collective over the axis, with a limit in bytes over all ranks.

        Raises:
            ValueError: some rank keeps more than the plan's limit whatever is chosen; on every rank.
        """
        self._steps += 1
        if self._steps == MEASURED_STEPS:
            self._settle()

    def _settle(self) -> None:
        measured = [block.costs(self.moments[block.chunk]) for block in self._blocks]
        skipped = [block.skipped for block in self._blocks]
        everyone = collectives.all_gather_object((measured, skipped), self._axis)
        blocks = _alike([_together(several) for several in zip(*(costs for costs, _ in everyone), strict=True)])
        chosen = self._choose(blocks)
        for number, (block, costs, option) in enumerate(zip(self._blocks, blocks, chosen, strict=True)):
            paths = {skips[number] for _, skips in everyone}
            block.adopt(option, skip=len(paths) == 1)
            assert costs.path == block.path
        self.report = Report(str(self.how), blocks, chosen)

    def _choose(self, blocks: list[Costs]) -> list[Option]:
        how = self.how
        if how in ("full", "sqrt"):
            return [keeping(costs, ()) for costs in blocks]
        if how == "selective":
            return [keeping(costs, costs.items) for costs in blocks]
        if isinstance(how, str) and how.startswith("every:"):
            step = int(how.removeprefix("every:"))
            return [
                everything(costs) if (number + 1) % step else keeping(costs, ()) for number, costs in enumerate(blocks)
            ]
        if isinstance(how, float):
            chosen_from = [replace(costs, put_off=0) for costs in blocks]  # no choice makes what W needs less
            return solve(chosen_from, how * peak(chosen_from, [costs.without for costs in blocks]))
        limit = bytes_of(how)
        assert limit is not None
        # Of all ranks, so that the value which the error names is enough for every stage.
        needs_more = least_bytes(blocks), any(costs.put_off for costs in blocks)
        least, for_weights = max(collectives.all_gather_object(needs_more, self._world))
        if least > limit:
            kept = "their inputs and what W needs take" if for_weights else "their inputs take"
            raise ValueError(
                f'plan.recompute = "{how}": even with every block computed again, {kept} more on a rank; '
                f'set it to "{limit_of(least)}" or more, or plan.microbatches higher, whose inputs are smaller'
            )
        return solve(blocks, limit)


class _Measured:
    """A block, its measurements and where it stands in a step."""

    def __init__(self, measured: Measured, chunk: int, runs: int) -> None:
        self.measured, self.chunk, self.runs = measured, chunk, runs
        self.path = measured.block.path

    @property
    def skipped(self) -> str | None:
        """The path of the part whose values are not needed."""
        return self.measured.skipped.path if self.measured.skipped is not None else None

    def _items(self) -> Iterator[tuple[Item, list[Part]]]:
        """What may be kept: parts that are kept together as one."""
        found = self.measured
        seen: set[Part] = set()
        for part in found.parts:
            group = part.together or [part]
            if part is found.skipped or part in seen or any(other not in found.parts for other in group):
                continue
            seen.update(group)
            path = "|".join([group[0].path, *(other.path.rpartition(".")[2] for other in group[1:])])
            size = sum(found.parts[other][1] for other in group)
            yield Item(path, size, sum(found.parts[other][0] for other in group)), group

    def costs(self, moments: tuple[Moment, ...]) -> Costs:
        found = self.measured
        parts = sum(seconds for seconds, _ in found.parts.values())
        measured = found.seconds < float("inf")
        return Costs(
            self.path,
            found.inputs,
            found.plain,
            found.plain + found.spared,
            max(0.0, found.seconds - parts) if measured else 0.0,
            tuple(item for item, _ in self._items()),
            found.put_off,
            moments,
            self.runs,
        )

    def adopt(self, option: Option, skip: bool) -> None:
        """Treat the block so from its next forward on."""
        block, kept = self.measured.block, option.kept
        block.observer = None
        block.plain = kept is None
        block.skipped = self.measured.skipped if skip else None
        groups = [group for item, group in self._items() if kept is not None and item.path in kept]
        block.kept = frozenset(part for group in groups for part in group)


def _together(several: Sequence[Costs]) -> Costs:
    """One block as several ranks have measured it: most bytes, mean seconds."""
    first = several[0]
    items = []
    for number, item in enumerate(first.items):
        sizes, seconds = zip(
            *((other.items[number].size, other.items[number].seconds) for other in several), strict=True
        )
        items.append(Item(item.path, max(sizes), math.fsum(seconds) / len(several)))
    return replace(
        first,
        inputs=max(other.inputs for other in several),
        plain=max(other.plain for other in several),
        without=max(other.without for other in several),
        rest=math.fsum(other.rest for other in several) / len(several),
        items=tuple(items),
        put_off=max(other.put_off for other in several),
    )


def _alike(blocks: list[Costs]) -> list[Costs]:
    """Blocks that keep the same bytes take the same time: each kind gets its mean, since one measurement is a rough
    one."""
    kinds: dict[Any, list[Costs]] = {}
    for costs in blocks:
        sizes = tuple((item.path, item.size) for item in costs.items)
        kinds.setdefault((costs.inputs, costs.plain, costs.without, costs.put_off, sizes), []).append(costs)
    means = {id(costs): _together(alike) for alike in kinds.values() for costs in alike}
    return [replace(means[id(costs)], path=costs.path, moments=costs.moments, runs=costs.runs) for costs in blocks]


def moments_of(schedule: Schedule, rank: int) -> list[tuple[Moment, ...]]:
    """By chunk of a pipeline rank, what waits at the moments of a step at which the rank may keep most: at those at
    which no other one has as much of everything."""
    row = (schedule if schedule.rounds is None else unroll(schedule, 3)).rows[rank]
    now = [Moment(0, 0)] * schedule.num_chunks
    seen: dict[tuple[Moment, ...], None] = {}  # a set that stays in order: all ranks of a stage choose alike
    for action in row:
        waiting = now[action.chunk]
        now[action.chunk] = Moment(
            waiting.forwards + (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.BW)),
            waiting.backwards + (action.kind is Kind.B) - (action.kind is Kind.W),
        )
        seen[tuple(now)] = None
    found = [moment for moment in seen if not any(_has_as_much(other, moment) for other in seen if other != moment)]
    return list(zip(*found, strict=True))


def _has_as_much(one: tuple[Moment, ...], other: tuple[Moment, ...]) -> bool:
    return all(a.forwards >= b.forwards and a.backwards >= b.backwards for a, b in zip(one, other, strict=True))


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


def _segments(stage: Stage, notes: Sequence[Note], in_flight: int) -> list[tuple[Block, list[nn.Module]]]:
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
    found: list[tuple[Block, list[nn.Module]]] = []
    calls: list[Callable[..., Any]] = []
    for start, stop in zip(edges, edges[1:], strict=False):
        call = stage.segment(start, stop)
        if stop < len(parts) or in_flight > 1 or not stage.last:
            block = Block(f"{stage.paths[start]} to {stage.paths[stop - 1]}", call, parts[start:stop], notes)
            found.append((block, parts[start:stop]))
            call = block
        calls.append(call)
    stage.segments = calls
    return found
