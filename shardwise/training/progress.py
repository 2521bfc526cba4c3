"""How far a run is, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwise.training.evaluation import Evaluation


@dataclass
class Progress:
    """What a run has done, as its checkpoints keep it.

    The schedule of the learning rate follows `updates`, which a skipped step does not advance; the data follow
    `samples`. `row_loss` and `row_tokens` are the summed loss and the number of targets since the last row of metrics.
    """

    step: int = 0
    updates: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    row_loss: float = 0.0
    row_tokens: int = 0


@dataclass
class Timing:
    """Steps, targets and seconds since the last row of metrics, without evaluations and checkpoints."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
        run: its folder.
        step: steps taken.
        finished: all steps are taken; else a signal stopped the run, and it continues when it is started again.
        loss: of the last step, None if none was taken.
        evaluation: the last one, None if there was none.
    """

    run: Path
    step: int
    finished: bool
    loss: float | None = None
    evaluation: Evaluation | None = None
