"""The sums that a gradient goes through after that over the gradient axis: over the pipeline ranks that share its
parameter, and over the tensor ranks where it is partial."""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from shardwise.layout import Layout
from shardwise.mesh import Axis, Mesh
from shardwise.pipeline_parallel.holders import Holders

# What a rank has whole lies apart from its pieces of what is divided, whose sizes may differ between ranks: the
# optimizer rounds an element by where it lies in a flat tensor, and copies must stay equal to the bit.
DIVIDED = "divided"


class FurtherSums:
    """The further sums of a model's gradients, by name. Collective over the job.

    Args:
        mesh: the job's mesh.
        holders: of the model's parameters.
        model: the whole model.
        layouts: by name, of all parameters of the whole model.

    Attributes:
        axes: by name of a group of parameters that go through the same sums, the axes of these.
    """

    def __init__(self, mesh: Mesh, holders: Holders, model: nn.Module, layouts: Mapping[str, Layout]) -> None:
        self._holders = holders
        ties = _tie_axes(mesh, {holders.ranks(parameter) for parameter in model.parameters()})
        parts = _tensor_axes(mesh, layouts.values())
        self.axes: dict[str, Sequence[Axis]] = {
            _joined(tie, part, divided): [*ties.get(tie, ()), *((parts[part],) if part else ())]
            for tie in ("", *ties)
            for part in ("", *parts)
            for divided in ("", DIVIDED)
        }

    def name(self, parameter: nn.Parameter, layout: Layout) -> str:
        """The group of a parameter."""
        tie = _tie_name(self._holders.ranks(parameter))
        return _joined(tie, _tensor_name(layout), DIVIDED if layout.splits else "")


def _joined(*names: str) -> str:
    return " + ".join(filter(None, names))


def _tie_name(ranks: tuple[int, ...]) -> str:
    return "tie " + " ".join(map(str, ranks)) if len(ranks) > 1 else ""


def _tie_axes(mesh: Mesh, held: Iterable[tuple[int, ...]]) -> dict[str, Sequence[Axis]]:
    """The axis of a sum for every set of several pipeline ranks that hold the same parameter."""
    found: dict[str, Sequence[Axis]] = {}
    for ranks in sorted(ranks for ranks in held if len(ranks) > 1):
        between = mesh.subgroup("pipeline", ranks)
        found[_tie_name(ranks)] = () if between is None else (between,)
    return found


def _tensor_name(layout: Layout) -> str:
    """The name of the sum over the tensor axis that a parameter's gradient needs, "" if none."""
    if "tensor" not in layout.partial:
        return ""
    copies = next((split.copies for split in layout.splits if split.axis == "tensor"), 0)
    return f"tensor {copies}" if copies else "tensor"


def _tensor_axes(mesh: Mesh, layouts: Iterable[Layout]) -> dict[str, Axis]:
    """The ranks of every sum that `_tensor_name` names; the layouts must be those of the whole model."""
    found: dict[str, Axis] = {}
    axis = mesh.axis("tensor")
    for name in sorted({_tensor_name(layout) for layout in layouts} - {""}):
        found[name] = axis
        if name != "tensor":
            copies = int(name.removeprefix("tensor "))
            for start in range(0, axis.size, copies):
                group = mesh.subgroup("tensor", range(start, start + copies))
                found[name] = group if group is not None else found[name]
    return found
