"""Pipeline schedules as data: the types, the families by name, the checker and the derived transfers in one place."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.pipeline_parallel.actions import (
    Action,
    Kind,
    Row,
    Rows,
    Schedule,
    ScheduleError,
    Weights,
    drain_rows,
    linear,
    passes,
    round_rows,
    unroll,
    vee,
)
from shardwise.pipeline_parallel.checker import Report, check, versions
from shardwise.pipeline_parallel.gpipe import gpipe
from shardwise.pipeline_parallel.one_f_one_b import one_f_one_b
from shardwise.pipeline_parallel.transfers import Receive, Send, Step, all_transfers, transfers

__all__ = [
    "Action",
    "Kind",
    "Receive",
    "Report",
    "Row",
    "Rows",
    "Schedule",
    "ScheduleError",
    "Send",
    "Step",
    "Weights",
    "all_transfers",
    "build",
    "check",
    "drain_rows",
    "linear",
    "names",
    "passes",
    "round_rows",
    "transfers",
    "unroll",
    "vee",
    "versions",
]

_ONE_CHUNK: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def names() -> list[str]:
    """The names that `build` knows."""
    return list(_ONE_CHUNK)


def build(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule of a family for p stages, m microbatches and v chunks per rank.

    Raises:
        ValueError: an unknown name or numbers for which the schedule does not exist, with the mend.
    """
    for what, number in (("stages", num_stages), ("microbatches", num_microbatches), ("chunks", num_chunks)):
        if number < 1:
            raise ValueError(f"{what} = {number} is too small; use at least 1")
    if name not in _ONE_CHUNK:
        raise ValueError(f"unknown schedule {name!r}; use one of {', '.join(names())}")
    if num_chunks != 1:
        raise ValueError(f"{name} holds one chunk per rank, not {num_chunks}; use interleaved or chunks = 1")
    return _ONE_CHUNK[name](num_stages, num_microbatches)
