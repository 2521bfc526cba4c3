"""State that lives in host memory or on disk between its uses (ZeRO-Offload, Ren et al., arXiv 2101.06840;
ZeRO-Infinity, Rajbhandari et al., arXiv 2104.07857).

A `Tier` is one key of `plan.offload`; a `Shelf` is a group of tensors in it that are used together, and `Shelves` are
those of one bucket. On a CPU host memory is the device's own, so "cpu" changes nothing there. Where an accelerator
computes, what it uses are copies (`CopiedShelf`), and what only an update needs does not leave the host if optimizer
state lives there.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.memory import offload_tier
from shardwise.memory.offload_shelf import CopiedShelf, Shelf
from shardwise.memory.offload_tier import Side, Tier, Traffic
from shardwise.optimizers.optimizer import Fragment, Optimizer
from shardwise.plan_values import Offload


class Shelves:
    """What of one bucket lives elsewhere, by kind: a key of `plan.offload`.

    Args:
        tiers: by kind. A kind without one is left where it is.
    """

    def __init__(self, tiers: "dict[str, Tier]") -> None:
        self._tiers = tiers
        self._shelves: dict[str, Shelf] = {}
        optimizer = tiers.get("optimizer")
        # State that lives in host memory is updated there.
        self.updates_on_host = optimizer is not None and optimizer.copies
        self._point: dict[str, Callable[[list[Tensor]], None]] = {}

    def put(self, kind: str, like: Sequence[Tensor], point: Callable[[list[Tensor]], None]) -> bool:
        """Make room for the tensors of a kind; False if it is not to live elsewhere.

        Args:
            point: is given the tensors whenever they come, and what stands for them when they go.
        """
        if kind not in self._tiers:
            return False
        tier = self._tiers[kind]
        self._shelves[kind] = CopiedShelf(tier, like) if tier.copies and kind != "optimizer" else Shelf(tier, like)
        self._point[kind] = point
        point(self._shelves[kind].away)
        return True

    def put_states(self, fragments: list[Fragment], optimizer: Optimizer, device: torch.device) -> None:
        """Give fragments their state: on `device`, or on a shelf of the kind "optimizer"."""
        tier = self._tiers.get("optimizer")
        if tier is None:
            for fragment in fragments:
                # What is not there now has its place on the device.
                fragment.state = optimizer.state(standing_in(fragment, device))
            return
        for fragment in fragments:
            fragment.state = optimizer.state(standing_in(fragment, torch.device("meta")))

        def point(tensors: list[Tensor]) -> None:
            found = iter(tensors)
            for fragment in fragments:
                fragment.state = {name: next(found) for name in fragment.state}

        self.put("optimizer", [moment for fragment in fragments for moment in fragment.state.values()], point)
        with self.here("optimizer"):
            for fragment in fragments:
                for name, moment in optimizer.state(standing_in(fragment, torch.device("cpu"))).items():
                    if moment.any():
                        fragment.state[name].copy_(moment)

    @contextlib.contextmanager
    def beside(self, masters: Tensor, gradients: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Masters and gradients in the memory in which the optimizer state is, inside; copies on the way if that is not
        theirs."""
        if not self.updates_on_host:
            yield masters, gradients
            return
        parameters, landed = _on_host(masters), _on_host(gradients)
        if parameters is not masters or landed is not gradients:
            torch.accelerator.current_stream().synchronize()
        yield parameters, landed
        if parameters is not masters:
            masters.copy_(parameters, non_blocking=True)

    def of(self, kind: str) -> Shelf | None:
        """The shelf of a kind."""
        return self._shelves.get(kind)

    def copied(self, kind: str) -> CopiedShelf | None:
        """The shelf of a kind that is used in copies on the device."""
        shelf = self._shelves.get(kind)
        return shelf if isinstance(shelf, CopiedShelf) else None

    def prefetch(self, *kinds: str) -> None:
        """Begin to bring kinds to where they are updated."""
        for kind in kinds:
            copied = self.copied(kind)
            if copied is not None and not self.updates_on_host:
                copied.prefetch_near()
            elif kind in self._shelves:
                self._shelves[kind].prefetch()

    def bring(self, *kinds: str, host: bool = False) -> None:
        """Have kinds there until `give_back`: on the device, or, if `host`, in host memory."""
        for kind in kinds:
            if kind in self._shelves:
                copied = None if host else self.copied(kind)
                self._point[kind](self._shelves[kind].fetch() if copied is None else copied.near())

    def give_back(self, *kinds: str, changed: bool = True, host: bool = False) -> None:
        """One user fewer of kinds."""
        for kind in kinds:
            if kind in self._shelves:
                shelf, copied = self._shelves[kind], None if host else self.copied(kind)
                if shelf.give_back(changed) if copied is None else copied.give_back_near(changed):
                    self._point[kind](shelf.away)

    @contextlib.contextmanager
    def here(self, *kinds: str, changed: bool = True, host: bool = False) -> Iterator[None]:
        """Have kinds there inside."""
        self.bring(*kinds, host=host)
        try:
            yield
        finally:
            self.give_back(*kinds, changed=changed, host=host)


def standing_in(fragment: Fragment, device: torch.device) -> Fragment:
    """A fragment of the same shape, whose parameter has no values: no state depends on them."""
    parameter = fragment.parameter
    return replace(fragment, parameter=torch.empty(parameter.shape, dtype=parameter.dtype, device=device))


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def tiers_of(offload: Offload, device: torch.device, traffic: Traffic) -> dict[str, Tier]:
    """The tiers of a plan, by key; without those that are the device's own memory anyway.

    Raises:
        OffloadError: a folder cannot be used.
    """
    places = offload.model_dump(exclude_none=True)
    kept = {key: place for key, place in places.items() if place != "cpu" or offload_tier.has_own_memory(device)}
    reader, writer = (ThreadPoolExecutor(1, f"shardwise-offload-{name}") for name in ("reader", "writer"))
    up, down = Side(device), Side(device)
    return {key: Tier(key, place, device, traffic, reader, writer, up, down) for key, place in kept.items()}
