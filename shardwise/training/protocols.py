"""What training asks of the model and of the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from shardwise.memory.offload_tier import Traffic
from shardwise.memory.report import Report
from shardwise.pipeline_parallel.timeline import Timeline


class StepMetrics(Protocol):
    """What a step tells; reading the loss may wait for other ranks, so that is left until it is needed.

    `loss` is in nats per target, `tokens` counts the targets of the global batch, `gradient_norm` is of all gradients,
    `skipped` steps changed nothing, `faulty_rank` is the first whose own loss was not finite, `faulty_parameter` the
    first whose gradient was not, `loss_scale` is fp16's factor on the loss after the step, and `offload` is what this
    rank moved for `plan.offload`.
    """

    @property
    def loss(self) -> float: ...

    @property
    def gradient_norm(self) -> float | None: ...

    @property
    def tokens(self) -> int: ...

    @property
    def skipped(self) -> bool: ...

    @property
    def faulty_rank(self) -> int | None: ...

    @property
    def faulty_parameter(self) -> str | None: ...

    @property
    def loss_scale(self) -> float | None: ...

    @property
    def offload(self) -> Traffic | None: ...


class Trainable(Protocol):
    """A `Parallel`, as far as training needs it."""

    @property
    def data_rank(self) -> int: ...

    @property
    def recomputed(self) -> Report | None: ...

    def step(self, batch: Any, lr: float | None = None) -> StepMetrics: ...

    def evaluate(self, batch: Any) -> tuple[float, int]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def loaded(self) -> None: ...

    def drain(self) -> None: ...

    def record(self) -> None: ...

    def timeline(self) -> Timeline | None: ...

    def close(self) -> None: ...


class Samples(Protocol):
    """An endless order of samples, as `corpus.Loader` gives it: what a position holds never changes."""

    @property
    def batch_size(self) -> int:
        """Samples of a step over all ranks."""
        ...

    def stream(self, position: int, prefetch: int) -> Iterator[Any]:
        """This rank's batches, from the sample at `position` on."""
        ...
