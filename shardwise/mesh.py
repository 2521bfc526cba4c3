"""Named axes of ranks.

A `Mesh` arranges the job's ranks as a grid, outermost axis first: pipeline, replicate, shard, context, tensor; so
tensor ranks are neighbours. Code asks for an `Axis` by name and passes it on. There is no global process-group state.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import choices
from shardwise.choices import SHIPPED, Choices

AXES = ("pipeline", "replicate", "shard", "context", "tensor")

# Views over several axes that code asks for by one name.
FOLDED: dict[str, tuple[str, ...]] = {
    "data": ("replicate", "shard"),  # ranks that read different rows
    "zero": ("shard", "context"),  # ranks that ZeRO divides state over
    "gradient": ("replicate", "shard", "context"),  # ranks whose gradients of a replicated parameter are summed
    "stage": ("replicate", "shard", "context", "tensor"),  # ranks that hold the same layers, or parts of them
}


class HasAxes(Protocol):
    """What a mesh needs to know of a plan."""

    @property
    def axes(self) -> dict[str, int]: ...


@dataclass(frozen=True, eq=False)
class Axis:
    """One named axis, as this rank sees it: `rank` of `size`, the global `ranks` along it, their process group (None if
    size is 1), and how they make collectives."""

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    choices: Choices = SHIPPED


class Mesh:
    """The job's ranks on named axes.

    Args:
        plan: anything with `axes`, an ordered mapping from axis name to size (a `Plan`), or such a mapping.
        device: the device type, "cpu" or "cuda"; by default the accelerator torch finds, else "cpu".

    Raises:
        ValueError: the world has another number of ranks, or several ranks are asked for and torch.distributed is not
            initialised, or rank 0 has a hardware file that is none.
    """

    def __init__(self, plan: HasAxes | dict[str, int], device: str | None = None) -> None:
        sizes = dict(plan if isinstance(plan, dict) else plan.axes)
        self.sizes = {name: sizes.get(name, 1) for name in AXES}
        self.num_ranks = 1
        for size in self.sizes.values():
            self.num_ranks *= size
        self.device_type = device or default_device_type()
        world = dist.get_world_size() if dist.is_initialized() else 1
        self._choices = SHIPPED
        self._agree(world)
        if world != self.num_ranks:
            how = (
                "torch.distributed is not initialised: start with torchrun or `shardwise train`"
                if world == 1
                else "change the plan or the launch"
            )
            raise ValueError(
                f"the plan needs {self.num_ranks} ranks ({_product(self.sizes)}), the job has {world}; {how}"
            )
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._device_mesh: DeviceMesh | None = None
        self._axes: dict[str, Axis] = {}
        if self.num_ranks > 1:
            # An axis of size 1 would cost a group, with its threads and sockets, for every rank.
            large = {name: size for name, size in self.sizes.items() if size > 1}
            self._device_mesh = init_device_mesh(self.device_type, tuple(large.values()), mesh_dim_names=tuple(large))
        for name in AXES:
            self._axes[name] = self._single(name)
        for name, members in FOLDED.items():
            self._axes[name] = self._fold(name, members)
        self._axes["world"] = Axis(
            "world",
            self.rank,
            self.num_ranks,
            tuple(range(self.num_ranks)),
            dist.group.WORLD if self.num_ranks > 1 else None,
            self._choices,
        )

    def _agree(self, world: int) -> None:
        """Groups made in different orders would wait for each other for ever."""
        if world == 1:
            return
        everyone: list[tuple[dict[str, int], Choices | ValueError]] = [({}, SHIPPED)] * world
        dist.all_gather_object(everyone, (self.sizes, _choices()))
        first, chosen = everyone[0]
        for rank, (other, _) in enumerate(everyone):
            if other != first:
                raise ValueError(
                    f"the ranks do not hold the same plan: rank 0 has {_product(first)}, rank {rank} has "
                    f"{_product(other)}; start all ranks with one plan"
                )
        if isinstance(chosen, ValueError):
            raise chosen
        self._choices = chosen

    def _single(self, name: str) -> Axis:
        if self.sizes[name] == 1 or self._device_mesh is None:
            return Axis(name, 0, 1, (self.rank,))
        part = self._device_mesh[name]
        return self._axis(name, part)

    def _fold(self, name: str, members: Iterable[str]) -> Axis:
        large = [member for member in members if self.sizes[member] > 1]
        if not large or self._device_mesh is None:
            return Axis(name, 0, 1, (self.rank,))
        if len(large) == 1:
            single = self._axes[large[0]]
            return replace(single, name=name)
        flat = self._device_mesh[tuple(large)]._flatten("_".join(large))
        return self._axis(name, flat)

    def _axis(self, name: str, part: DeviceMesh) -> Axis:
        ranks = tuple(part.mesh.tolist())
        return Axis(name, part.get_local_rank(), part.size(), ranks, part.get_group(), self._choices)

    def axis(self, name: str) -> Axis:
        """The axis `name`: one of the five, a folded one ("data", "zero", "gradient", "stage"), or "world"."""
        return self._axes[name]

    def private_group(self, axis: Axis) -> dist.ProcessGroup | None:
        """A second group over the same ranks, for traffic that must not queue behind the axis's own. Collective over
        the whole job."""
        return self._group(axis.ranks) if axis.size > 1 else None

    def subgroup(self, axis_name: str, positions: Iterable[int]) -> Axis | None:
        """The ranks at `positions` along one axis, for every position on the others; None on ranks outside. Collective
        over the job."""
        axis = self.axis(axis_name)
        chosen = sorted(set(positions))
        member = axis.rank in chosen
        ranks = tuple(axis.ranks[position] for position in chosen) if member else ()
        group = self._group(ranks) if len(chosen) > 1 else None
        return Axis(axis_name, chosen.index(axis.rank), len(ranks), ranks, group, self._choices) if member else None

    def _group(self, mine: tuple[int, ...]) -> dist.ProcessGroup | None:
        # Every rank must create every group, in the same order: learn them all first.
        everyone: list[tuple[int, ...]] = [()] * self.num_ranks
        dist.all_gather_object(everyone, mine)
        found = None
        for ranks in sorted({ranks for ranks in everyone if ranks}):
            group = dist.new_group(list(ranks))
            if ranks == mine:
                found = group
        return found

    def device(self) -> torch.device:
        """This rank's device: for an accelerator the one of its local rank."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, self.rank % max(1, torch.accelerator.device_count()))

    def __repr__(self) -> str:
        return f"Mesh({_product(self.sizes)}, rank {self.rank} of {self.num_ranks})"


def _choices() -> Choices | ValueError:
    try:
        return choices.load()
    except ValueError as error:
        return error


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one device"


def default_device_type() -> str:
    """The accelerator torch finds, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "cpu"
