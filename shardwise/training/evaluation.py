"""How good a model is on samples it has not seen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Once(Protocol):
    """Samples to evaluate on, as `corpus.Loader` gives them."""

    def once(self, num_batches: int | None = None) -> Iterator[Any]:
        """This rank's rows of every batch, each sample once; equally many batches on every rank."""
        ...


@dataclass(frozen=True)
class HeldOut:
    """What is kept for evaluation.

    Args:
        loader: its batches.
        bytes_per_token: of the text behind the targets; None where they are no text.
        compression: bits per byte that general compressors need for the same text, by name.
    """

    loader: Once
    bytes_per_token: float | None = None
    compression: Mapping[str, float] = field(default_factory=dict)


class Evaluates(Protocol):
    """What evaluation asks of a `Parallel`."""

    def evaluate(self, batch: Any) -> tuple[float, int]: ...


@dataclass(frozen=True)
class Evaluation:
    """Loss in nats per target, its exponential, and bits per byte of text (None where there is no text)."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    targets: int
    seconds: float


def evaluate(
    parallel: Evaluates, held_out: HeldOut, num_batches: int = 0, stopped: Callable[[], bool] | None = None
) -> Evaluation | None:
    """Evaluates on what is held out. Collective over the job.

    Args:
        parallel: the model.
        held_out: the samples.
        num_batches: at most these; 0 takes all.
        stopped: asked after every batch; True gives the evaluation up.

    Returns:
        None where there is nothing to evaluate on, or it was given up.
    """
    start = time.perf_counter()
    total, targets = 0.0, 0
    for batch in held_out.loader.once(num_batches or None):
        loss, count = parallel.evaluate(batch)
        total, targets = total + loss, targets + count
        if stopped is not None and stopped():
            return None
    if targets == 0:
        return None
    loss = total / targets
    density = held_out.bytes_per_token
    return Evaluation(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=loss / math.log(2) / density if density else None,
        targets=targets,
        seconds=time.perf_counter() - start,
    )


def described(evaluation: Evaluation, compression: Mapping[str, float]) -> str:
    """An evaluation in one line, beside what compressors make of the same text."""
    parts = [f"held-out loss {evaluation.loss:.4f}", f"perplexity {evaluation.perplexity:.4g}"]
    if evaluation.bits_per_byte is not None:
        others = ", ".join(f"{name} {bits:.3f}" for name, bits in compression.items())
        parts.append(f"bits per byte {evaluation.bits_per_byte:.3f}" + (f" ({others})" if others else ""))
    return "   ".join(parts)
