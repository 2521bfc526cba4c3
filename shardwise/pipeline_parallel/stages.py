"""Cutting a model into pipeline stages.

A model that can be cut is a sequence of parts: an `nn.Sequential`, or a module with an attribute `stages` that lists
its submodules in call order ("blocks.*" stands for all children of `blocks`). A part is called with what the part
before returned, and with those of the batch's named inputs that its `forward` has parameters for.
"""

import copy
import inspect
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

# So many ways to cut are tried one by one; beyond, dynamic programming balances the largest stage alone.
MOST_TRIED = 50_000


@dataclass(frozen=True)
class Part:
    """One piece that stays whole.

    Args:
        path: in the model.
        block: whether it is one of a starred list of blocks, or of an `nn.Sequential`.
        spread: whether a tuple that the part before returned makes its arguments; an `nn.Sequential` passes it on as
            one.
    """

    path: str
    module: nn.Module
    block: bool
    spread: bool = True


def parts_of(model: nn.Module) -> list[Part]:
    """The model's parts in call order.

    Raises:
        ValueError: the model does not say where it may be cut, names a submodule it does not have, or has parameters
            outside its parts.
    """
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return _covering(model, [Part(name, module, True, spread=False) for name, module in _children(model)])
    listed = getattr(model, "stages", None)
    if listed is None:
        raise ValueError(
            f"plan.pipeline: {type(model).__name__} does not say where it may be cut into stages; if its forward is a "
            'chain of submodules and nothing else, list them in an attribute `stages`, such as ["embedding", '
            '"blocks.*", "head"], or make it an nn.Sequential; else set plan.pipeline to 1'
        )
    found: list[Part] = []
    for path in listed:
        try:
            if path.endswith(".*"):
                parent = path.removesuffix(".*")
                children = _children(model.get_submodule(parent))
                found.extend(Part(f"{parent}.{name}", module, True) for name, module in children)
            else:
                found.append(Part(path, model.get_submodule(path), False))
        except AttributeError:
            raise ValueError(
                f"{type(model).__name__}.stages lists {path!r}, which is not a submodule; correct the list"
            ) from None
    return _covering(model, found)


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children by name, also those that stand there twice, since each stands for a call."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _covering(model: nn.Module, parts: list[Part]) -> list[Part]:
    inside = {id(parameter) for part in parts for parameter in part.module.parameters()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    if outside:
        raise ValueError(
            f"parameter {outside[0]!r} of {type(model).__name__} is in none of its parts; list the submodule it is in "
            "among its `stages`"
        )
    return parts


class Stage(nn.Module):
    """Consecutive parts of a model as one module.

    Args:
        parts: the parts.
        first, last: whether these are the model's first and last.
    """

    def __init__(self, parts: Sequence[Part], first: bool, last: bool) -> None:
        super().__init__()
        self.paths = [part.path for part in parts]
        self.first, self.last = first, last
        self.parts = nn.ModuleList(part.module for part in parts)
        self.blocks = [part.block for part in parts]
        # (arguments of the first part, the batch's named inputs) -> what the last part returns, one after the other.
        self.segments: list[Callable[[tuple[Any, ...], dict[str, Any]], Any]] = [self.segment(0, len(parts))]
        self._accepted = [_Accepted.by(part.module) for part in parts]
        self._spread = parts[0].spread

    def forward(self, received: tuple[Any, ...], inputs: Any) -> Any:
        """What the stage returns for `received` (from the stage before; empty for the first) and the microbatch's own
        `inputs`."""
        named = inputs if isinstance(inputs, dict) else {}
        given = self.first_arguments(inputs) if self.first else received
        value: Any = None
        for segment in self.segments:
            value = segment(given, named)
            given = self.passed(value)
        return value if self.last else given

    def segment(self, start: int, stop: int) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """What computes parts `start` to `stop`."""

        def compute(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            value: Any = None
            for number in range(start, stop):
                value = self.parts[number](*given, **self.accepted(number, named, len(given)))
                given = self.passed(value)
            return value

        return compute

    def accepted(self, number: int, named: dict[str, Any], num_given: int) -> dict[str, Any]:
        """Those of the batch's named inputs that part `number` takes beside so many arguments by position."""
        return self._accepted[number].of(named, num_given)

    def passed(self, value: Any) -> tuple[Any, ...]:
        """The next part's arguments."""
        return value if self._spread and isinstance(value, tuple) else (value,)

    def first_arguments(self, inputs: Any) -> tuple[Any, ...]:
        """The positional arguments of the model's first part: all inputs without names, or the only named one if it
        goes by another name there."""
        if not isinstance(inputs, dict):
            return inputs if isinstance(inputs, tuple) else (inputs,)
        accepted = self._accepted[0]
        if accepted.of(inputs, 0):
            return ()
        if len(inputs) != 1:
            raise ValueError(
                f"part {self.paths[0]!r} of the model takes {[*accepted.positional, *accepted.keywords]} and the batch "
                f"has {list(inputs)}: name the inputs as its forward does"
            )
        return tuple(inputs.values())


class Whole(nn.Module):
    """A model that is not cut, in the form of a stage."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.first = self.last = True

    def forward(self, received: tuple[Any, ...], inputs: Any) -> Any:
        if isinstance(inputs, dict):
            return self.model(**inputs)
        return self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)


@dataclass(frozen=True)
class _Accepted:
    """Which named inputs a module's forward takes: by names it could also take by position, by keyword alone, or any at
    all."""

    positional: list[str]
    keywords: set[str]
    anything: bool

    @staticmethod
    def by(module: nn.Module) -> "_Accepted":
        parameters = inspect.signature(module.forward).parameters.values()
        return _Accepted(
            [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD],
            {p.name for p in parameters if p.kind is p.KEYWORD_ONLY},
            any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    def of(self, named: dict[str, Any], num_given: int) -> dict[str, Any]:
        """Those of `named` that go with `num_given` positional arguments."""
        taken, free = self.positional[:num_given], self.positional[num_given:]
        return {
            name: value
            for name, value in named.items()
            if name not in taken and (self.anything or name in free or name in self.keywords)
        }


def cut(
    parts: Sequence[Part],
    placement: Sequence[Sequence[int]],
    how: str | Sequence[int],
    example: tuple[Any, Any] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> list[range]:
    """Which parts each stage holds, in stage order.

    Args:
        parts: the model's parts.
        placement: the stages of every pipeline rank, as a schedule has them.
        how: "parameters" (those that multiply: embedding tables weigh nothing, since a look-up costs nothing), "flops"
            (counted on the meta device), "time" (measured here), "memory" (parameters with their state, and saved
            activations times the microbatches in flight), or the number of layers of each stage.
        example: a microbatch (inputs, targets) of the sizes to come; needed for all but "parameters" and a list.
        loss: (output, targets) -> scalar; counted with the last part where given.

    Raises:
        ValueError: fewer parts than stages, a list that does not fit, or no example where one is needed.
    """
    num_stages = sum(len(stages) for stages in placement)
    if len(parts) < num_stages:
        raise ValueError(
            f"plan.pipeline: {num_stages} stages need as many parts, the model has {len(parts)}; use fewer stages or "
            "chunks"
        )
    if not isinstance(how, str):
        return _as_listed(parts, list(how), num_stages)
    if how == "parameters":
        costs = [float(_multiplying(part.module)) for part in parts]
        return balance([costs] * num_stages, placement)
    if example is None:
        raise ValueError(
            f'plan.cut = "{how}" looks at a microbatch: pass parallelize(..., example=(inputs, targets)), or use '
            '"parameters"'
        )
    if how == "memory":
        state, saved = _memory(parts, example)
        depth = {stage: len(placement) - rank for rank, stages in enumerate(placement) for stage in stages}
        table = [
            [4 * fixed + depth[stage] * kept for fixed, kept in zip(state, saved, strict=True)]
            for stage in range(num_stages)
        ]
        return balance(table, placement)
    costs = _flops(parts, example) if how == "flops" else _seconds(parts, example, loss)
    return balance([costs] * num_stages, placement)


def _as_listed(parts: Sequence[Part], counts: list[int], num_stages: int) -> list[range]:
    """Stages of the listed numbers of blocks; parts before the first block go with the first stage, those behind the
    last with the last."""
    blocks = [index for index, part in enumerate(parts) if part.block]
    if len(counts) != num_stages or sum(counts) not in (len(blocks), len(parts)):
        raise ValueError(
            f"plan.cut = {counts}: list {num_stages} numbers, one for each stage, whose sum is the model's "
            f"{len(blocks)} blocks"
        )
    edges = list(itertools.accumulate(counts, initial=0))
    if sum(counts) == len(blocks) and blocks:
        edges = [0, *(blocks[edge] if edge < len(blocks) else blocks[-1] + 1 for edge in edges[1:-1]), len(parts)]
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        if start == stop:
            raise ValueError(
                f"plan.cut = {counts}: stage {number} would hold nothing; give every stage at least one layer"
            )
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def balance(table: Sequence[Sequence[float]], placement: Sequence[Sequence[int]]) -> list[range]:
    """The consecutive parts of each stage such that the busiest rank has least to do, and among such cuts the busiest
    stage.

    Args:
        table: [stage][part], what a part costs on a stage.
        placement: the stages of every rank.
    """
    num_stages, num_parts = len(table), len(table[0])
    sums = [list(itertools.accumulate(costs, initial=0.0)) for costs in table]

    def price(edges: Sequence[int]) -> tuple[float, float]:
        costs = [sums[stage][edges[stage + 1]] - sums[stage][edges[stage]] for stage in range(num_stages)]
        return max(sum(costs[stage] for stage in stages) for stages in placement), max(costs)

    if math.comb(num_parts - 1, num_stages - 1) <= MOST_TRIED:
        inner = itertools.combinations(range(1, num_parts), num_stages - 1)
        best: Sequence[int] = min(((0, *edges, num_parts) for edges in inner), key=price)
    else:
        best = _smallest_largest(sums, num_stages, num_parts)
    return [range(start, stop) for start, stop in itertools.pairwise(best)]


def _smallest_largest(sums: list[list[float]], num_stages: int, num_parts: int) -> list[int]:
    """Edges that make the largest stage as small as can be: dynamic programming over (stages, parts)."""
    largest = [[math.inf] * (num_parts + 1) for _ in range(num_stages + 1)]
    origin = [[0] * (num_parts + 1) for _ in range(num_stages + 1)]
    largest[0][0] = 0.0
    for stage in range(num_stages):
        for stop in range(stage + 1, num_parts - (num_stages - stage - 1) + 1):
            for start in range(stage, stop):
                value = max(largest[stage][start], sums[stage][stop] - sums[stage][start])
                if value < largest[stage + 1][stop]:
                    largest[stage + 1][stop], origin[stage + 1][stop] = value, start
    edges = [num_parts]
    for stage in range(num_stages, 0, -1):
        edges.append(origin[stage][edges[-1]])
    return edges[::-1]


def _multiplying(module: nn.Module) -> int:
    tables = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    return sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in tables)


def _chain(
    parts: Sequence[Part], example: tuple[Any, Any], device: str, visit: Callable[[Part, Callable[[], Any]], Any]
) -> None:
    """Runs copies of the parts on `device` one after the other on the example; `visit(part, call)` makes the call and
    returns its result."""
    with torch.random.fork_rng(devices=[]):  # one rank alone measures: its random numbers must stay the others'
        inputs = tree_map_only(Tensor, lambda leaf: leaf.to(device), example[0])
        received: tuple[Any, ...] = ()
        for number, part in enumerate(parts):
            module = copy.deepcopy(part.module)
            module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta or device == "meta" else t)
            if device != "meta":
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.normal_(0, 0.02) if parameter.is_floating_point() else parameter.zero_()
            stage = Stage([replace(part, module=module)], number == 0, number == len(parts) - 1)
            value = visit(part, lambda stage=stage, received=received: stage(received, inputs))  # type: ignore[misc]
            received = tree_map_only(Tensor, lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()), value)


def _flops(parts: Sequence[Part], example: tuple[Any, Any]) -> list[float]:
    found: list[float] = []

    def visit(part: Part, call: Callable[[], Any]) -> Any:
        with FlopCounterMode(display=False) as counter:
            value = call()
        found.append(float(counter.get_total_flops()))
        return value

    _chain(parts, example, "meta", visit)
    return found


def _memory(parts: Sequence[Part], example: tuple[Any, Any]) -> tuple[list[float], list[float]]:
    state = [float(sum(p.numel() * p.element_size() for p in part.module.parameters())) for part in parts]
    saved: list[float] = []

    def visit(part: Part, call: Callable[[], Any]) -> Any:
        own = {id(parameter) for parameter in part.module.parameters()}
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if id(tensor) not in own and not isinstance(tensor, nn.Parameter):
                seen[id(tensor)] = tensor.numel() * tensor.element_size()
                keep.append(tensor)
            return tensor

        keep: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            value = call()
        saved.append(float(sum(seen.values())))
        return value

    _chain(parts, example, "meta", visit)
    return state, saved


def _seconds(
    parts: Sequence[Part], example: tuple[Any, Any], loss: Callable[[Any, Any], Tensor] | None, repeats: int = 5
) -> list[float]:
    found: list[float] = []

    def visit(part: Part, call: Callable[[], Any]) -> Any:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            value = call()
            scalar = loss(value, example[1]) if loss is not None and len(found) == len(parts) - 1 else _total(value)
            if scalar.requires_grad:
                scalar.backward()
            times.append(time.perf_counter() - start)
        found.append(min(times))
        return value

    _chain(parts, example, "cpu", visit)
    return found


def _total(value: Any) -> Tensor:
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.sum() for leaf in leaves]).sum()
