"""How far a preparation is, and a bar that shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class PrepareProgress(NamedTuple):
    """One report: the phase, and bytes of the source `done` of `total` (0: unknown)."""

    phase: Literal["waiting", "training the tokenizer", "tokenizing"]
    done: int
    total: int


ProgressCallback = Callable[[PrepareProgress], None]


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[ProgressCallback]:
    """A rich progress bar: `with progress_bar() as progress: prepare(config, progress=progress)`."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console or Console(stderr=True)) as bar:
        tasks: dict[str, TaskID] = {}

        def show(report: PrepareProgress) -> None:
            if report.phase not in tasks:
                tasks[report.phase] = bar.add_task(report.phase, total=None)
            bar.update(tasks[report.phase], completed=report.done, total=report.total or None)

        yield show
