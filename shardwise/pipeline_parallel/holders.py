"""Who holds a parameter: which stages, and so which pipeline ranks."""

from collections.abc import Sequence

from torch import nn

from shardwise.pipeline_parallel.schedule import Schedule


class Holders:
    """The stages and pipeline ranks that hold each parameter of a model.

    Args:
        model: the whole model.
        stages: what of it each stage holds.
        schedule: the placement of stages.

    Attributes:
        names: by id of parameter, its name in the whole model, in the model's order.
        first: by name, the pipeline rank that answers for it.
    """

    def __init__(self, model: nn.Module, stages: Sequence[nn.Module], schedule: Schedule) -> None:
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._ranks = [schedule.owner(stage)[0] for stage in range(schedule.total_stages)]
        self._stages: dict[int, list[int]] = {}
        for number, stage in enumerate(stages):
            for parameter in stage.parameters():
                self._stages.setdefault(id(parameter), []).append(number)
        self.first = {self.names[key]: self._ranks[numbers[0]] for key, numbers in self._stages.items()}

    def shared(self, parameter: nn.Parameter) -> bool:
        """Whether several stages hold it."""
        return len(self._stages.get(id(parameter), ())) > 1

    def ranks(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The pipeline ranks that hold it, in order."""
        return tuple(sorted({self._ranks[stage] for stage in self._stages.get(id(parameter), ())}))

    def refuse_shared(self, schedule: str) -> None:
        """Raises ValueError if stages share a parameter, for an asynchronous schedule."""
        for key, numbers in self._stages.items():
            if len(numbers) > 1:
                raise ValueError(
                    f"plan.schedule = {schedule!r} updates each stage at its own time, so {self.names[key]!r}, which "
                    f"stages {numbers} share, would differ between them: untie it (model.tied = false), or use a "
                    "synchronous schedule such as 1f1b"
                )
