"""Where numbers go: a JSON line each, TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.training.config import LogConfig
from shardwise.training.run_folder import RunFolder

Row = dict[str, Any]


def read(path: Path) -> Iterator[Row]:
    """The rows of a metrics.jsonl; a line that a crash has cut short is left out."""
    if not path.exists():
        return
    with open(path) as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            yield row


class Metrics:
    """Records rows of one run. A row that cannot be written costs a warning, once, and never the training.

    Args:
        folder: of the run.
        config: which sinks.
        step: the step the run starts from; rows after it, of a part of the run that was lost, are dropped.
        settings: the configuration, for Weights & Biases.
        warn: takes one line for the user.

    Raises:
        ValueError: a sink was asked for whose package is not installed.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: LogConfig,
        step: int,
        settings: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self._warned = False
        self._path = folder.metrics
        self._guard(lambda: _keep_until(folder.metrics, step))
        self._board: Any = None
        self._wandb: Any = None
        wanted = config.tensorboard
        if wanted if wanted is not None else _installed("tensorboard"):
            _require("tensorboard", "log.tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            # Events after the step we start from belong to a part of the run that was lost.
            self._board = SummaryWriter(str(folder.tensorboard), purge_step=step + 1 if step else None)
        if config.wandb:
            _require("wandb", "log.wandb")
            import wandb

            self._wandb = wandb.init(
                project=config.wandb,
                id=folder.path.name,
                name=folder.path.name,
                dir=str(folder.path),
                config=dict(settings),
                resume="allow",
            )

    def write(self, kind: str, step: int, values: Mapping[str, float | int | None]) -> None:
        """Records one row.

        Args:
            kind: "train", "eval" or "event".
            step: steps taken.
            values: by name; numbers that are not finite are written as null.
        """
        row = {"kind": kind, "step": step} | {name: _finite(value) for name, value in values.items()}
        self._guard(lambda: self._append(row))
        numbers = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "step"}
        if self._board is not None:
            for name, value in numbers.items():
                self._guard(partial(self._board.add_scalar, f"{kind}/{name}", value, step))
        if self._wandb is not None:
            self._wandb.log({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        """Flushes and closes every sink."""
        if self._board is not None:
            self._guard(self._board.close)
        if self._wandb is not None:
            self._wandb.finish()

    def _append(self, row: Row) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(row) + "\n")

    def _guard(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            if not self._warned:
                self._warn(
                    f"metrics cannot be written to {self._path}: {error.strerror}; training goes on without them"
                )
            self._warned = True


def _keep_until(path: Path, step: int) -> None:
    """Drops the rows of steps after `step`, and a line that was cut short."""
    if not path.exists():
        return
    beside = path.with_name(f"{path.name}.part")
    with open(beside, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in read(path) if row["step"] <= step)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _finite(value: float | int | None) -> float | int | None:
    return value if value is not None and math.isfinite(value) else None


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _require(package: str, key: str) -> None:
    if not _installed(package):
        raise ValueError(f"{key}: {package} is not installed; pip install 'shardwise[tracking]', or leave {key} out")
