"""What a job shows while it runs; on rank 0 only."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

# A run of quick steps would fill the screen with rows; metrics.jsonl has them all.
SECONDS_BETWEEN_ROWS = 1.0


@dataclass(frozen=True)
class Row:
    """Numbers of a few steps: loss in nats per token, the rest as named."""

    step: int
    loss: float
    lr: float
    gradient_norm: float | None
    tokens_per_second: float
    utilisation: float | None
    seconds_left: float


class Display:
    """A progress bar with the newest numbers where there is a terminal, and lines of numbers everywhere.

    Args:
        steps: of the whole run.
        shown: False shows nothing.
        console: where to; by default standard output.
    """

    def __init__(self, steps: int, shown: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout, quiet=not shown, highlight=False, soft_wrap=True)
        self._steps = steps
        self._last_row = -SECONDS_BETWEEN_ROWS
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
            transient=True,
            disable=not (shown and self._console.is_terminal),
        )
        self._task = self._progress.add_task("training", total=steps, numbers="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def at(self, step: int) -> None:
        """Moves the bar."""
        self._progress.update(self._task, completed=step)

    def row(self, row: Row) -> None:
        """Shows the newest numbers."""
        self._progress.update(self._task, completed=row.step, numbers=_rates(row))
        now = time.monotonic()
        if now - self._last_row >= SECONDS_BETWEEN_ROWS or row.step == self._steps:
            self._last_row = now
            width = len(str(self._steps))
            norm = "" if row.gradient_norm is None else f"   norm {row.gradient_norm:.3g}"
            losses = f"loss {row.loss:.4f}{norm}   lr {row.lr:.2e}"
            self.line(f"step {row.step:>{width}}/{self._steps}   {losses}   {_rates(row)}")

    def line(self, text: str, style: str = "") -> None:
        """Shows a line."""
        self._console.print(escape(text), style=style or None)

    def warn(self, text: str) -> None:
        """Shows a warning."""
        self.line(f"warning: {text}", "yellow")


def start_line(num_ranks: int, about: str, peak: float, given: bool) -> str:
    """On how many ranks what is trained, and what its utilisation is measured against.

    Args:
        num_ranks: in the job.
        about: the plan and the model; "" leaves them out.
        peak: FLOP/s of all ranks together; 0 if no utilisation is told.
        given: whether `log.peak_tflops` says so.
    """
    parts = [f"{num_ranks} rank{'s' if num_ranks > 1 else ''}{': ' if about else ''}{about}"]
    if peak:
        how = "log.peak_tflops of every rank" if given else "all ranks' matrix products, measured now"
        parts.append(f"MFU against {peak / 1e12:.3g} TFLOP/s ({how})")
    return "; ".join(parts)


def _rates(row: Row) -> str:
    used = "" if row.utilisation is None else f"   MFU {row.utilisation:.1%}"
    return f"{count(row.tokens_per_second)} tokens/s{used}   {duration(row.seconds_left)} left"


def count(number: float) -> str:
    """A number with three digits and k, M, G or T."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


def duration(seconds: float) -> str:
    """Seconds as 12s, 3:05 or 1:02:03."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    hours, rest = divmod(whole, 3600)
    clock = f"{rest // 60}:{rest % 60:02d}"
    return f"{hours}:{clock.zfill(5)}" if hours else clock
