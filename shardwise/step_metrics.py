"""What a training step did."""

from collections.abc import Callable, Sequence

from torch import Tensor

from shardwise.memory.offload_tier import Traffic


class StepMetrics:
    """What a step did. Reading `loss` or `gradient_norm`, or printing it, waits for the ranks that know it.

    Attributes:
        number: of the step, from 1, since the model was made parallel.
        loss: mean over the step's targets, over all ranks.
        gradient_norm: of the summed gradients before clipping, over all parameters (with an asynchronous schedule, of
            the last update of this rank's last stage); None if it was not computed.
        tokens: targets in the step, over all ranks.
        skipped: True if the gradients were not finite, in which case no parameter and no optimizer state has changed
            (with an asynchronous schedule: if those of any stage's update in the step before were not, and that stage
            left that update out).
        loss_scale: fp16's factor on the loss after the step; None in other precisions.
        faulty_rank: the first rank whose own loss was not finite, if any.
        faulty_parameter: the first parameter, in the model's order, whose summed gradient was not finite, if any.
        offload: what this rank moved to and from where `plan.offload` keeps state, and how long it waited; None if
            nothing is offloaded.
    """

    def __init__(
        self,
        number: int,
        totals: Callable[[], Tensor],
        tokens: Callable[[], int],
        norm: float | None,
        skipped: bool,
        loss_scale: float | None = None,
        offload: Traffic | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.number = number
        self.loss_scale = loss_scale
        self.offload = offload
        self._totals, self._tokens, self._names = totals, tokens, names
        self.gradient_norm = norm
        self.skipped = skipped

    def __repr__(self) -> str:
        norm = "" if self.gradient_norm is None else f", norm {self.gradient_norm:.3g}"
        skipped = ", skipped" if self.skipped else ""
        return f"step {self.number}: loss {self.loss:.4f}{norm}, {self.tokens:,} tokens{skipped}"

    @property
    def loss(self) -> float:
        return float(self._totals()[0]) / max(1, self.tokens)

    @property
    def tokens(self) -> int:
        return self._tokens()

    @property
    def faulty_rank(self) -> int | None:
        flags = self._totals()[1:].view(3, -1)[0]
        return int(flags.argmax()) if bool(flags.any()) else None

    @property
    def faulty_parameter(self) -> str | None:
        places = [int(place) for place in self._totals()[1:].view(3, -1)[2] if place]
        return self._names[min(places) - 1] if places else None
