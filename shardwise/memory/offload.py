"""State that lives in host memory or on disk between its uses (ZeRO-Offload, Ren et al., arXiv 2101.06840;
ZeRO-Infinity, Rajbhandari et al., arXiv 2104.07857).

A `Tier` is one key of `plan.offload`; a `Shelf` is a group of tensors in it that are used together, and `Shelves` are
those of one bucket. On a CPU host memory is the device's own, so "cpu" changes nothing there.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shardwise.memory.offload_files import DiskFile
from shardwise.optimizers.optimizer import Fragment, Optimizer
from shardwise.plan_values import Offload
from shardwise.problems import Problem

# Of tensors within a shelf: what vector instructions and other ranks' rounding want.
ALIGNMENT = 64
DISK = "disk:"


_counting = threading.Lock()


@dataclass
class Traffic:
    """What one rank moved, so far.

    Attributes:
        read, written: bytes brought to where they are used, and back.
        hidden: seconds of transfers beside the computation.
        waited: seconds that the computation waited for them.
    """

    read: int = 0
    written: int = 0
    hidden: float = 0.0
    waited: float = 0.0

    def add(self, read: int = 0, written: int = 0, hidden: float = 0.0, waited: float = 0.0) -> None:
        """Count more; from any thread."""
        with _counting:
            self.read += read
            self.written += written
            self.hidden += hidden
            self.waited += waited

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.read - other.read,
            self.written - other.written,
            self.hidden - other.hidden,
            self.waited - other.waited,
        )

    def copy(self) -> "Traffic":
        """As it is now."""
        return self - Traffic()


class Tier:
    """Where one kind of state lives.

    Args:
        key: of `plan.offload`.
        place: "cpu" or "disk:FOLDER".
        device: where the state is computed with.
        traffic: to be counted in.
        reader, writer: threads that read ahead and write behind, in the order in which they are asked to.

    Raises:
        OffloadError: the folder cannot be used.
    """

    def __init__(
        self,
        key: str,
        place: str,
        device: torch.device,
        traffic: Traffic,
        reader: ThreadPoolExecutor,
        writer: ThreadPoolExecutor,
    ) -> None:
        self.key, self.place, self.device = key, place, device
        self.traffic = traffic
        self.reader, self.writer = reader, writer
        self.file = DiskFile(Path(place.removeprefix(DISK)), key) if place.startswith(DISK) else None

    def settle(self, work: "Future[None]") -> None:
        """Wait for something that is written behind.

        Raises:
            OffloadError: it could not be written.
        """
        begin = time.perf_counter()
        if not work.cancelled():
            work.result()
        waited = time.perf_counter() - begin
        self.traffic.add(hidden=-waited, waited=waited)

    def shelf(self, like: Sequence[Tensor]) -> "Shelf":
        """Room for tensors of the shapes and dtypes of `like`; zeros."""
        return Shelf(self, like)


class Shelf:
    """Tensors that are brought and put back together.

    Attributes:
        away: what stands for the tensors while they are not there: the same shapes and dtypes without memory.
    """

    def __init__(self, tier: Tier, like: Sequence[Tensor]) -> None:
        self._tier = tier
        self.away = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in like]
        sizes = [tensor.numel() * tensor.element_size() for tensor in self.away]
        self._starts: list[int] = []
        end = 0
        for size in sizes:
            self._starts.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end
        self._offset = 0
        self._host: Tensor | None = None
        if tier.file is not None:
            self._offset = tier.file.take(end)
        else:
            self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=tier.device.type != "cpu")
        self._users = 0
        self._changed = False
        self._here: list[Tensor] = []
        self._ahead: Future[Tensor] | None = None

    def prefetch(self) -> None:
        """Begin to bring the tensors."""
        if self._host is None and self._users == 0 and self._ahead is None and self.num_bytes:
            self._ahead = self._tier.reader.submit(self._read)

    def fetch(self) -> list[Tensor]:
        """The tensors, until `give_back`; once more for every `fetch`."""
        self._users += 1
        if self._users == 1:
            self._here = self._views(self._bring())
        return self._here

    def give_back(self, changed: bool = True) -> bool:
        """One user fewer; whether it was the last one, after whom what was changed goes back."""
        self._users -= 1
        self._changed |= changed
        if self._users:
            return False
        self._here = []
        if self._changed and self._host is None:
            self._tier.traffic.add(written=self.num_bytes)
        self._changed = False
        return True

    def peek(self, index: int) -> Tensor:
        """One tensor by itself, for as long as anything refers to it; what is written to it stays."""
        like, start = self.away[index], self._starts[index]
        size = like.numel() * like.element_size()
        if self._host is not None or not size:
            return self._views(self._bring())[index]
        assert self._tier.file is not None
        return self._tier.file.map(self._offset + start, size).view(like.dtype).view(like.shape)

    @property
    def on_disk(self) -> bool:
        return self._host is None

    def _read(self) -> Tensor:
        assert self._tier.file is not None
        begin = time.perf_counter()
        memory = self._tier.file.map(self._offset, self.num_bytes)
        self._tier.file.populate(memory)
        self._tier.traffic.add(hidden=time.perf_counter() - begin)
        return memory

    def _bring(self) -> Tensor:
        if self._host is not None:
            return self._host
        if not self.num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        begin = time.perf_counter()
        memory = self._read() if self._ahead is None else self._ahead.result()
        self._ahead = None
        waited = time.perf_counter() - begin
        self._tier.traffic.add(read=self.num_bytes, hidden=-waited, waited=waited)
        return memory

    def _views(self, memory: Tensor) -> list[Tensor]:
        found = []
        for like, start in zip(self.away, self._starts, strict=True):
            part = memory[start : start + like.numel() * like.element_size()]
            found.append(part.view(like.dtype).view(like.shape))
        return found


class Shelves:
    """What of one bucket lives elsewhere, by kind: a key of `plan.offload`.

    Args:
        tiers: by kind. A kind without one is left where it is.
    """

    def __init__(self, tiers: "dict[str, Tier]") -> None:
        self._tiers = tiers
        self._shelves: dict[str, Shelf] = {}
        self._point: dict[str, Callable[[list[Tensor]], None]] = {}

    def put(self, kind: str, like: Sequence[Tensor], point: Callable[[list[Tensor]], None]) -> bool:
        """Make room for the tensors of a kind; False if it is not to live elsewhere.

        Args:
            point: is given the tensors whenever they come, and what stands for them when they go.
        """
        if kind not in self._tiers:
            return False
        self._shelves[kind] = self._tiers[kind].shelf(like)
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

    @property
    def keeps_gradients(self) -> bool:
        """Whether updates see copies of the gradients, so that these stay as they were."""
        tier = self._tiers.get("optimizer")
        return tier is not None and tier.device.type != "cpu"

    @contextlib.contextmanager
    def beside(self, masters: Tensor, gradients: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Masters and gradients in the memory in which the optimizer state is, inside; copies on the way if that is not
        theirs."""
        if not self.keeps_gradients:
            yield masters, gradients
            return
        parameters = _on_host(masters)
        landed = _on_host(gradients)
        torch.accelerator.synchronize()
        yield parameters, landed
        if parameters is not masters:
            masters.copy_(parameters, non_blocking=True)

    def of(self, kind: str) -> Shelf | None:
        """The shelf of a kind."""
        return self._shelves.get(kind)

    def prefetch(self, *kinds: str) -> None:
        """Begin to bring kinds."""
        for kind in kinds:
            if kind in self._shelves:
                self._shelves[kind].prefetch()

    def bring(self, *kinds: str) -> None:
        """Have kinds there until `give_back`."""
        for kind in kinds:
            if kind in self._shelves:
                self._point[kind](self._shelves[kind].fetch())

    def give_back(self, *kinds: str, changed: bool = True) -> None:
        """One user fewer of kinds."""
        for kind in kinds:
            if kind in self._shelves and self._shelves[kind].give_back(changed):
                self._point[kind](self._shelves[kind].away)

    @contextlib.contextmanager
    def here(self, *kinds: str, changed: bool = True) -> Iterator[None]:
        """Have kinds there inside."""
        self.bring(*kinds)
        try:
            yield
        finally:
            self.give_back(*kinds, changed=changed)


def standing_in(fragment: Fragment, device: torch.device) -> Fragment:
    """A fragment of the same shape, whose parameter has no values: no state depends on them."""
    parameter = fragment.parameter
    return replace(fragment, parameter=torch.empty(parameter.shape, dtype=parameter.dtype, device=device))


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def refused(offload: Offload, device_type: str) -> Iterator[Problem]:
    """What only a CPU can keep elsewhere."""
    places = offload.model_dump(exclude_none=True)
    for key in ("parameters", "gradients"):
        if key in places and device_type != "cpu":
            yield Problem(
                f"plan.offload.{key}",
                f"{places[key]} is not built yet where an accelerator ({device_type}) computes",
                "leave it out, and offload optimizer, master or activations",
            )


def tiers_of(offload: Offload, device: torch.device, traffic: Traffic) -> dict[str, Tier]:
    """The tiers of a plan, by key; without those that are the device's own memory anyway.

    Raises:
        OffloadError: a folder cannot be used.
        ValueError: something that only a CPU can keep elsewhere.
    """
    for problem in refused(offload, device.type):
        raise ValueError(str(problem))
    places = offload.model_dump(exclude_none=True)
    kept = {key: place for key, place in places.items() if place != "cpu" or device.type != "cpu"}
    threads = [ThreadPoolExecutor(1, f"shardwise-offload-{name}") for name in ("reader", "writer")]
    return {key: Tier(key, place, device, traffic, *threads) for key, place in kept.items()}
