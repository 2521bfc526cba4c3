"""A small stand-in for `Parallel`: one matrix, its momentum divided over the ranks by rows, gradients averaged."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise.pipeline_parallel.timeline import Timeline


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def share(length: int, rank: int, size: int) -> tuple[int, int]:
    return rank * length // size, (rank + 1) * length // size


@dataclass
class Rows:
    """Some rows of a global tensor, with torch's _Checkpointable protocol."""

    local: Tensor
    start: int
    shape: tuple[int, ...]

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size((self.start, 0)), self.local.shape)

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        data = TensorWriteData(self._chunk(), TensorProperties.create_from_tensor(self.local), torch.Size(self.shape))
        return [WriteItem(MetadataIndex(fqn, self._chunk().offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local


@dataclass(frozen=True)
class StepMetrics:
    loss: float
    gradient_norm: float
    tokens: int
    skipped: bool
    faulty_rank: int | None = None
    faulty_parameter: str | None = None
    loss_scale: float | None = None
    offload: None = None


class FakeParallel:
    """Least squares with momentum; noise on the input draws from torch's generator, as dropout would."""

    def __init__(self, rows: int = 5, columns: int = 3, noise: float = 0.1) -> None:
        self.rank, self.size = world()
        self.data_rank, self.num_data_ranks = self.rank, self.size
        self.device = torch.device("cpu")
        self.noise = noise
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(rows, columns, generator=generator)
        self.first, self.last = share(rows, self.rank, self.size)
        self.momentum = torch.zeros(self.last - self.first, columns)
        self.steps = torch.zeros((), dtype=torch.int64)
        self.loads = 0
        self.recomputed = None

    def step(self, batch: tuple[Tensor, Tensor], lr: float | None = None) -> StepMetrics:
        inputs, targets = batch
        noisy = inputs + self.noise * torch.randn(inputs.shape)
        error = noisy @ self.weight.T - targets
        total = torch.cat([(error.T @ noisy).flatten(), (error**2).sum().view(1), torch.tensor([float(error.numel())])])
        if self.size > 1:
            dist.all_reduce(total)
        gradient = total[:-2].view_as(self.weight) / total[-1]
        norm = gradient.norm().item()
        loss = (total[-2] / total[-1]).item()
        if not torch.isfinite(total).all():
            mine = not torch.isfinite(error).all()
            return StepMetrics(loss, norm, int(total[-1]), True, self._first_with(mine))
        self.momentum.mul_(0.9).add_(gradient[self.first : self.last])
        change = torch.zeros_like(self.weight)
        change[self.first : self.last] = (lr or 0.1) * self.momentum
        if self.size > 1:
            dist.all_reduce(change)
        self.weight -= change
        self.steps += 1
        return StepMetrics(loss, norm, int(total[-1]), False)

    def _first_with(self, mine: bool) -> int | None:
        flags: list[bool] = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(flags, mine)
        return flags.index(True) if any(flags) else None

    def evaluate(self, batch: tuple[Tensor, Tensor]) -> tuple[float, int]:
        inputs, targets = batch
        total = torch.stack([((inputs @ self.weight.T - targets) ** 2).sum(), torch.tensor(float(targets.numel()))])
        if self.size > 1:
            dist.all_reduce(total)
        return total[0].item(), int(total[1])

    def state_dict(self) -> dict[str, Any]:
        momentum = Rows(self.momentum, self.first, tuple(self.weight.shape))
        return {"model/weight": self.weight, "optimizer/weight/momentum": momentum, "step": self.steps}

    def loaded(self) -> None:
        self.loads += 1

    def record(self) -> None:
        self.recording = True

    def timeline(self) -> Timeline | None:
        return None

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class FakeSamples:
    """Sample n is drawn from a generator seeded by n."""

    batch_size: int = 8
    poison: int = -1  # the sample whose target is nan

    def stream(self, position: int, prefetch: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.at(position, self.batch_size)
            position += self.batch_size

    def at(self, position: int, batch: int) -> tuple[Tensor, Tensor]:
        first, last = (position + part for part in share(batch, *world()))
        return self.rows(range(first, last))

    def rows(self, numbers: range) -> tuple[Tensor, Tensor]:
        inputs, targets = torch.zeros(len(numbers), 3), torch.zeros(len(numbers), 5)
        for row, number in enumerate(numbers):
            generator = torch.Generator().manual_seed(number)
            inputs[row] = torch.randn(3, generator=generator)
            targets[row] = torch.randn(5, generator=generator)
            if number == self.poison:
                targets[row] = float("nan")
        return inputs, targets

    def once(self, num_batches: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Five samples, so the last batch is a partial one."""
        for position in range(0, 5, 2)[:num_batches]:
            yield self.at(position, min(2, 5 - position))
