"""A model's layers divided over the tensor axis: a layout for every parameter, and modules that compute their part."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from shardwise.exchange import Exchange
from shardwise.gradient import Slot, Tape
from shardwise.head import Head
from shardwise.layout import Layout, Split
from shardwise.loss import Loss, logits_of
from shardwise.mesh import Mesh
from shardwise.plan import Plan
from shardwise.tensor_parallel import huggingface
from shardwise.tensor_parallel import rules as tables
from shardwise.tensor_parallel.cross_entropy import Shared, divided_cross_entropy
from shardwise.tensor_parallel.embedding import Table
from shardwise.tensor_parallel.linear import Columns, Row
from shardwise.tensor_parallel.region import Landing, Region
from shardwise.tensor_parallel.rules import Assigned, Rules
from shardwise.tensor_parallel.sequence import divide_positions, enter_whole, keep_whole, own_numbers, whole


class Division:
    """What `divide` made of a model for this rank.

    Attributes:
        layouts: by id of parameter; a parameter without one is whole on every rank, with the whole gradient.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self.layouts: dict[int, Layout] = {}
        self.vocabulary = 0  # columns of the logits, if they are divided
        self.output: nn.Module | None = None  # the matrix that makes them
        self._landings: dict[int, Landing] = {}

    def layout(self, parameter: nn.Parameter) -> Layout:
        """Where the pieces of a parameter (still whole) are."""
        return self.layouts.get(id(parameter)) or Layout(tuple(parameter.shape))

    def writes(self, module: nn.Module) -> bool:
        """Whether the module writes the gradients of its parameters itself."""
        return id(module) in self._landings

    def layer(self, module: nn.Module) -> object:
        """What computes the module in its divided form, None if it is not divided."""
        landing = self._landings.get(id(module))
        return landing.layer if landing is not None else None

    def attach(self, module: nn.Module, slots: dict[str, Slot], tape: Tape) -> bool:
        """Have a divided module write its gradients into `slots`; False if it is not divided."""
        landing = self._landings.get(id(module))
        if landing is None:
            return False
        landing.attach(slots, tape)
        return True

    def loss(self, loss: Loss) -> Loss:
        """The loss of this rank's output: over divided logits if the model's are, from whole ones if it is not known
        how to divide it."""
        if not self.vocabulary:
            return loss
        terms, region, vocabulary = loss.terms, self.region, self.vocabulary

        def divided(output: Any, targets: Any) -> Tensor:
            logits = logits_of(output)
            if terms is not None:
                return divided_cross_entropy(logits, targets, terms, region, vocabulary)
            gathered = whole(logits, region, logits.ndim - 1, vocabulary)
            if logits is output:
                return loss.sum(gathered, targets)
            output.logits = gathered
            return loss.sum(output, targets)

        return Loss(divided, loss.count)

    def head(self) -> Head | None:
        """The output matrix, to be computed with its loss; once the modules are attached."""
        if self.output is None:
            return None
        landing = self._landings[id(self.output)]
        slots = {name: slot for name, slot in landing.slots.items() if slot.direct}
        return Head(self.output, slots, landing.tape, Shared(self.region, self.vocabulary))

    def take(self, module: nn.Module, landing: Landing, forward: Callable[..., Tensor]) -> None:
        """Have a module compute `forward`."""
        module.forward = forward
        self._landings[id(module)] = landing

    def leave(self) -> None:
        """Tell the other ranks that this one will not come again."""
        self.region.exchange.leave()

    def close(self) -> None:
        """Close what connects the ranks."""
        self.region.exchange.close()

    def declare(self, path: str, module: nn.Module, layouts: Mapping[str, Layout]) -> None:
        """Note the layouts of a module's own parameters, by attribute.

        Raises:
            ValueError: a parameter that another module has too is divided otherwise there.
        """
        for attribute, layout in layouts.items():
            parameter = module._parameters.get(attribute)
            if parameter is None:
                continue
            known = self.layouts.setdefault(id(parameter), layout)
            if known != layout:
                raise ValueError(
                    f"parameter {f'{path}.{attribute}'!r} is shared with another module that is divided otherwise; "
                    "give both the same style, or untie them"
                )


def divide(model: nn.Module, plan: Plan, mesh: Mesh, rules: Rules | None) -> Division:
    """Divide a model's layers over the tensor axis; no value is moved. Collective over the job.

    Args:
        model: the whole model, still undivided; its modules are changed in place.
        plan: with `tensor` and `sequence`.
        mesh: the job's mesh.
        rules: the user's own rules, which come before all others.

    Raises:
        ValueError: a layer is not covered, cannot be divided so, or has heads that the ranks do not divide.
    """
    axis = mesh.axis("tensor")
    assigned = tables.assign(model, rules)
    region = Region(axis, plan.sequence, Exchange(axis, mesh.device()))
    division = Division(region)
    modules = dict(model.named_modules())
    theirs = huggingface.is_hugging_face(model)
    if plan.sequence and theirs:
        huggingface.divide_between_layers(model, assigned, region)
    columns = [path for path in modules if path in assigned and assigned[path].style.kind == "column"]
    for paths in tables.groups(assigned, columns):
        _divide_columns(division, modules, assigned, paths)
    for path, module in modules.items():
        found = tables.nearest(assigned, path)
        if found is None or found.style.kind == "sequence":
            _keep(division, path, module, found)
        elif found.style.kind == "row":
            _divide_row(division, path, module)
        elif found.style.kind == "vocabulary":
            _divide_vocabulary(division, path, module, whole=theirs)
        elif found.style.kind == "head":
            _share_heads(division, path, module)
        elif found.style.kind == "entrance":
            if theirs:
                _share_heads(division, path, module)
            if plan.sequence:
                enter_whole(module, region)
        elif found.style.kind == "replicated":
            division.declare(
                path, module, {name: Layout(tuple(p.shape)) for name, p in module._parameters.items() if p is not None}
            )
            if plan.sequence and path in assigned:
                keep_whole(module, region)
    if plan.sequence and not division.vocabulary:
        raise ValueError(
            "plan.sequence: no rule divides the output matrix over the vocabulary, where the split sequence ends; "
            'pass rules={PATH: "vocabulary"}, or set plan.sequence to false'
        )
    return division


def _require(path: str, module: nn.Module, kind: str, *types: type[nn.Module]) -> None:
    if type(module) not in types and not (
        nn.Linear in types and kind != "vocabulary" and huggingface.is_conv1d(module)
    ):
        names = " or ".join(known.__name__ for known in types)
        raise ValueError(
            f"rules: {path!r} is a {type(module).__name__}, and {kind!r} divides a {names} only, since a "
            "subclass may compute something else; choose another style"
        )


def _weight_shape(module: nn.Module) -> tuple[int, ...]:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return tuple(weight.shape)


def _divide_columns(
    division: Division, modules: Mapping[str, nn.Module], assigned: Mapping[str, Assigned], paths: list[str]
) -> None:
    region, size = division.region, division.region.axis.size
    styles = []
    transposed = huggingface.is_conv1d(modules[paths[0]])
    for path in paths:
        module = modules[path]
        _require(path, module, "column", nn.Linear)
        parent = modules[path.rpartition(".")[0]]
        outputs = _weight_shape(module)[-1 if transposed else 0]
        styles.append(tables.resolve(assigned[path].style, path, parent, outputs))
    units = [sum(style.sections) // style.unit for style in styles]  # type: ignore[arg-type,operator]
    entered = region.sequence and tables.entered(assigned, paths[0])
    columns = Columns(region, [modules[path] for path in paths], entered, transposed)
    for position, (path, style, num) in enumerate(zip(paths, styles, units, strict=True)):
        module = modules[path]
        copies = 1
        assert isinstance(style.unit, int)
        assert isinstance(style.sections, tuple)
        if style.unit > 1 and any(length % (style.unit * size) for length in style.sections):
            if (
                num < max(units)
                and len(style.sections) == 1
                and size % num == 0
                and num * style.unit == style.sections[0]
            ):
                copies = size // num
            else:
                raise ValueError(
                    f"plan.tensor = {size} does not divide the {num} heads of {path!r}, and a head is never split; "
                    f"choose a divisor of {num}"
                    + (f", or a multiple of {num} that divides {max(units)}" if num < max(units) else "")
                )
        sections = style.sections if len(style.sections) > 1 else ()
        partial = ("tensor",) if copies > 1 else ()
        split, across = (Split("tensor", dim, sections, copies) for dim in (0, 1 if transposed else 0))
        shape = _weight_shape(module)
        bias = Layout((sum(style.sections),), (split,), partial)
        division.declare(path, module, {"weight": Layout(shape, (across,), partial), "bias": bias})
        if copies > 1:
            _regroup(modules[path.rpartition(".")[0]], max(units) // size)

        parent = modules[path.rpartition(".")[0]]
        if len(style.sections) > 1 and hasattr(parent, "split_size"):
            # Hugging Face's GPT-2 cuts the fused output into queries, keys and values of so many columns.
            parent.split_size = style.sections[0] // size  # type: ignore[assignment]

        def forward(input: Tensor, position: int = position) -> Tensor:
            return columns(position, input)

        division.take(module, columns.landings[position], forward)


def _regroup(parent: nn.Module, queries_a_rank: int) -> None:
    """A rank has one key and value head for all its queries: Hugging Face's attention keeps their ratio as a number."""
    if hasattr(parent, "num_key_value_groups"):
        parent.num_key_value_groups = queries_a_rank  # type: ignore[assignment]


def _divide_row(division: Division, path: str, module: nn.Module) -> None:
    _require(path, module, "row", nn.Linear)
    shape, transposed = _weight_shape(module), huggingface.is_conv1d(module)
    outputs = shape[-1 if transposed else 0]
    split = Split("tensor", 0 if transposed else 1)
    division.declare(path, module, {"weight": Layout(shape, (split,)), "bias": Layout((outputs,))})
    row = Row(division.region, module, transposed)
    division.take(module, row.landing, row.__call__)


def _divide_vocabulary(division: Division, path: str, module: nn.Module, whole: bool) -> None:
    _require(path, module, "vocabulary", nn.Embedding, nn.Linear)
    shape = _weight_shape(module)
    split = Split("tensor", 0)
    division.declare(path, module, {"weight": Layout(shape, (split,)), "bias": Layout(shape[:1], (split,))})
    if isinstance(module, nn.Embedding):
        if module.sparse or module.scale_grad_by_freq or module.max_norm is not None:
            raise ValueError(
                f"rules: embedding {path!r} is sparse, renormalises its rows or scales gradients by frequency, which "
                'needs the whole table; mark it "replicated"'
            )
        table = Table(division.region, module, shape[0], whole)
        division.take(module, table.landing, table.__call__)
        return
    columns = Columns(division.region, [module])
    division.vocabulary, division.output = shape[0], module
    division.take(module, columns.landings[0], lambda input: columns(0, input))


def _share_heads(division: Division, path: str, module: nn.Module) -> None:
    partial = {
        name: Layout(tuple(p.shape), partial=("tensor",)) for name, p in module._parameters.items() if p is not None
    }
    division.declare(path, module, partial)
    if any(isinstance(getattr(module, name, None), float) for name in ("p", "dropout", "attention_dropout")):
        own_numbers(module, division.region)


def _keep(division: Division, path: str, module: nn.Module, found: Assigned | None) -> None:
    """A module that is the same on every rank, on the rank's positions if the sequence is split."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    large = next((name for name, parameter in own.items() if parameter.ndim > 1), None)
    if found is None and large is not None:
        what = "linear layer" if isinstance(module, nn.Linear) else f"{type(module).__name__} with parameter {large!r},"
        where = f"{what} {path!r}" if path else f"parameter {large!r}"
        raise ValueError(
            f"plan.tensor: no rule says how {where} is divided; pass "
            f'parallelize(..., rules={{{path!r}: "column"}}) (or row, vocabulary), or "replicated" to keep it whole '
            "on every rank"
        )
    partial = ("tensor",) if division.region.sequence else ()
    division.declare(path, module, {name: Layout(tuple(p.shape), partial=partial) for name, p in own.items()})
    if not division.region.sequence:
        return
    if isinstance(module, nn.Embedding):
        divide_positions(module, division.region)
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
        own_numbers(module, division.region)
