"""Schedules as CSV and JSON files, so anyone can bring their own.

CSV: one line per rank in order, one cell per action: the kind, the microbatch and, with several chunks per rank, `@`
and the global stage: `F0@0, F0@4, BW0@4`. Empty cells and dots are idle. Lines of the form `# key = value` may set
`name`, `asynchronous` (true or false), `weights` (latest, vertical or double) and `slices` (a number). Updates may be
left out of synchronous schedules: each chunk then updates at the end. JSON: the fields of `Schedule`, rows as lists of
such cells.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwise.pipeline_parallel.actions import Action, Kind, Row, Rows, Schedule, ScheduleError, Weights, updates
from shardwise.pipeline_parallel.checker import check

_CELL = re.compile(r"(BW|[FBWU])(-?\d+)(?:@(\d+))?")
_IDLE = {"", ".", "-"}


def save(schedule: Schedule, path: str | Path) -> None:
    """Writes a schedule as `.csv` or `.json`.

    Raises:
        ValueError: another suffix, or a CSV of a schedule with rounds, which only JSON can hold.
    """
    path = Path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(to_json(schedule), indent=1) + "\n")
    elif path.suffix != ".csv":
        raise ValueError(f"{path}: schedules are saved as .csv or .json")
    elif schedule.rounds is not None:
        raise ValueError(f"{path}: {schedule.name} continues between steps, which CSV cannot hold; save it as .json")
    else:
        path.write_text(_to_csv(schedule))


def load(path: str | Path) -> Schedule:
    """Reads and checks a schedule file.

    Raises:
        ScheduleError: one line with the file, the rank and what is wrong.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise ScheduleError(f"{path}: cannot be read: {error.strerror}; give a schedule file that is there") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"{path}: is not text; give a schedule as .csv or .json") from None
    try:
        if path.suffix == ".json":
            schedule = from_json(json.loads(text))
        elif path.suffix == ".csv":
            schedule = _from_csv(text, path.stem)
        else:
            raise ScheduleError("schedules are read from .csv or .json")
        check(schedule)
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{path}: not JSON: {error}") from None
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    return schedule


def to_json(schedule: Schedule) -> dict[str, Any]:
    """Plain data for `json.dump`; `from_json` reads it."""
    data: dict[str, Any] = {
        "name": schedule.name,
        "num_stages": schedule.num_stages,
        "num_chunks": schedule.num_chunks,
        "num_microbatches": schedule.num_microbatches,
        "placement": [list(stages) for stages in schedule.placement],
        "asynchronous": schedule.asynchronous,
        "weights": schedule.weights.value,
        "slices": schedule.slices,
        "rows": _cells(schedule, schedule.rows),
    }
    if schedule.rounds is not None:
        data["rounds"] = [_cells(schedule, rows) for rows in schedule.rounds]
    return data


def from_json(data: Any) -> Schedule:
    """What `to_json` gave, also under the key `schedule` (as `shardwise schedule --out` writes it); not checked.

    Raises:
        ScheduleError: a missing field or an unknown action.
    """
    if not isinstance(data, dict):
        raise ScheduleError("a schedule is an object with name, num_stages, num_chunks, num_microbatches and rows")
    data = data.get("schedule", data)
    if unknown := data.keys() - set(Schedule.__dataclass_fields__):
        raise ScheduleError(f"unknown field {min(unknown)!r}; use {', '.join(Schedule.__dataclass_fields__)}")
    try:
        placement = tuple(tuple(int(stage) for stage in stages) for stages in data["placement"])
        rounds = data.get("rounds")
        return Schedule(
            name=str(data["name"]),
            num_stages=int(data["num_stages"]),
            num_chunks=int(data["num_chunks"]),
            num_microbatches=int(data["num_microbatches"]),
            placement=placement,
            rows=_rows(data["rows"], placement),
            asynchronous=bool(data.get("asynchronous", False)),
            weights=_weights(data.get("weights", Weights.LATEST)),
            rounds=None if rounds is None else _rounds(rounds, placement),
            slices=int(data.get("slices", 1)),
        )
    except KeyError as error:
        raise ScheduleError(f"missing field {error}; a schedule file has name, num_stages, rows and so on") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, ScheduleError):
            raise
        raise ScheduleError(f"a field has the wrong type: {error}") from None


def _cells(schedule: Schedule, rows: Rows) -> list[list[str]]:
    """Rows of cells as they stand in files."""
    return [
        [
            f"{a.kind.value}{a.microbatch}" + (f"@{schedule.stage(rank, a.chunk)}" if schedule.num_chunks > 1 else "")
            for a in row
        ]
        for rank, row in enumerate(rows)
    ]


def _to_csv(schedule: Schedule) -> str:
    out = io.StringIO()
    out.write(f"# name = {schedule.name}\n")
    if schedule.asynchronous:
        out.write(f"# asynchronous = true\n# weights = {schedule.weights.value}\n")
    if schedule.slices > 1:
        out.write(f"# slices = {schedule.slices}\n")
    csv.writer(out, lineterminator="\n").writerows(_cells(schedule, schedule.rows))
    return out.getvalue()


def _from_csv(text: str, stem: str) -> Schedule:
    """A schedule whose shape is read off its cells."""
    settings = {"name": stem, "asynchronous": "false", "weights": "latest", "slices": "1"}
    table: list[list[tuple[Kind, int, int | None]]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#"):
            key, equals, value = (part.strip() for part in line[1:].partition("="))
            if equals and key not in settings:
                raise ScheduleError(f"line {number}: unknown key {key!r}; use {', '.join(settings)}")
            settings |= {key: value} if equals else {}
        elif line.strip():
            cells = [cell.strip() for cell in next(csv.reader([line]))]
            table.append([_parse(cell, len(table), at) for at, cell in enumerate(cells) if cell not in _IDLE])
    if not table:
        raise ScheduleError("holds no rows; give one line of actions per rank, such as F0,F1,BW0,BW1")
    placement = tuple(
        tuple(sorted({stage for _, _, stage in row if stage is not None})) or (rank,) for rank, row in enumerate(table)
    )
    rows = tuple(_place(row, rank, placement) for rank, row in enumerate(table))
    asynchronous = settings["asynchronous"].lower() == "true"
    num_microbatches = 1 + max((a.microbatch for row in rows for a in row), default=0)
    if not asynchronous and not any(action.kind is Kind.U for row in rows for action in row):
        flush = updates(num_microbatches, len(placement[0]))
        rows = tuple((*row, *flush) for row in rows)
    return Schedule(
        name=settings["name"],
        num_stages=len(rows),
        num_chunks=len(placement[0]),
        num_microbatches=num_microbatches,
        placement=placement,
        rows=rows,
        asynchronous=asynchronous,
        weights=_weights(settings["weights"]),
        slices=_slices(settings["slices"]),
    )


def _parse(cell: str, rank: int, at: int) -> tuple[Kind, int, int | None]:
    """Kind, microbatch and stage (None where not given) of a cell."""
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"rank {rank} cell {at}: unknown action {cell!r}; write F, B, W, BW or U and the microbatch, such as F3, "
            "with @stage if ranks hold several chunks"
        )
    kind, microbatch, stage = match.groups()
    return Kind(kind), int(microbatch), None if stage is None else int(stage)


def _place(row: Iterable[tuple[Kind, int, int | None]], rank: int, placement: tuple[tuple[int, ...], ...]) -> Row:
    """The actions of a row with stages turned into the rank's chunks."""
    stages = placement[rank]
    actions = []
    for kind, microbatch, stage in row:
        if stage is None and len(stages) > 1:
            raise ScheduleError(f"rank {rank}: {kind.value}{microbatch} needs @stage, one of {stages}")
        if stage is not None and stage not in stages:
            raise ScheduleError(f"rank {rank}: {kind.value}{microbatch}@{stage} is not one of its stages {stages}")
        actions.append(Action(kind, microbatch, 0 if stage is None else stages.index(stage)))
    return tuple(actions)


def _rows(table: Any, placement: tuple[tuple[int, ...], ...]) -> Rows:
    """Rows of JSON cells."""
    if len(table) != len(placement):
        raise ScheduleError(f"{len(table)} rows for {len(placement)} ranks; give one row per rank")
    return tuple(
        _place([_parse(str(cell), rank, at) for at, cell in enumerate(row)], rank, placement)
        for rank, row in enumerate(table)
    )


def _rounds(rounds: Any, placement: tuple[tuple[int, ...], ...]) -> tuple[Rows, Rows, Rows]:
    if len(rounds) != 3:
        raise ScheduleError(f"rounds are first, next and drain, not {len(rounds)} sets of rows")
    first, following, drain = (_rows(table, placement) for table in rounds)
    return first, following, drain


def _slices(value: str) -> int:
    if not value.isdigit():
        raise ScheduleError(f"slices = {value!r} is not a number; write into how many slices a sequence is cut")
    return int(value)


def _weights(value: str) -> Weights:
    try:
        return Weights(value)
    except ValueError:
        raise ScheduleError(f"unknown weights {value!r}; use {', '.join(Weights)}") from None
