"""`shardwise schedule`: what a pipeline schedule costs, and what it looks like."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shardwise.pipeline_parallel import files
from shardwise.pipeline_parallel.clock import Time
from shardwise.pipeline_parallel.drawing import figure, save_trace, terminal
from shardwise.pipeline_parallel.page import save_page
from shardwise.pipeline_parallel.schedule import (
    FAMILIES,
    Report,
    Schedule,
    build,
    check,
    from_file,
    hand_on_early,
    unroll,
)
from shardwise.pipeline_parallel.simulator import Costs, Simulation, simulate, steady_bubble, steady_timeline
from shardwise.pipeline_parallel.timeline import Comparison, Timeline, compare, load_timeline

_FORMATS = (".png", ".svg", ".html", ".json", ".csv", ".trace.json")


@dataclass(frozen=True)
class _Result:
    """Everything there is to show about one schedule."""

    schedule: Schedule
    report: Report
    simulation: Simulation
    steady: Fraction | float | None
    measured: Timeline | None
    comparison: Comparison | None

    @property
    def title(self) -> str:
        s = self.schedule
        chunks = f" × {s.num_chunks} chunks" if s.num_chunks > 1 else ""
        slices = f" of {s.slices} slices" if s.slices > 1 else ""
        microbatches = _count(s.num_microbatches // s.slices, "microbatch", "es")
        return f"{s.name} · {_count(s.num_stages, 'rank')}{chunks} · {microbatches}{slices}"

    @property
    def timelines(self) -> list[Timeline]:
        return [self.simulation.timeline, *([self.measured] if self.measured else [])]


def schedule(
    name: Annotated[str, typer.Argument(help=f"{', '.join(FAMILIES)}, or a .csv or .json file.")],
    stages: Annotated[int | None, typer.Option("--stages", "-p", help="Pipeline ranks.", show_default=False)] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", "-m", help="Microbatches per step.", show_default=False)
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option("--chunks", "-v", help="Model chunks per rank.", show_default="as few as the schedule takes"),
    ] = None,
    slices: Annotated[
        int | None,
        typer.Option("--slices", help="Slices each sequence is cut into; they pass one by one.", show_default="1"),
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(
            help="Time of F, B (gradient of the input) and W (of the weights) of a rank's whole share.",
            show_default="1,1,1",
        ),
    ] = None,
    comm: Annotated[float, typer.Option(help="Time from one rank to the next.")] = 0.0,
    limit: Annotated[
        int | None,
        typer.Option(help="For auto: microbatches each rank may hold.", show_default="the number of stages"),
    ] = None,
    barrier: Annotated[
        bool, typer.Option("--barrier", help="For auto: all ranks meet between steps, as for clipping.")
    ] = False,
    vertical_sync: Annotated[
        bool, typer.Option("--vertical-sync", help="For pipedream: one weight version across stages.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Steps to draw one after the other.")] = 1,
    measured: Annotated[
        Path | None,
        typer.Option(
            help="A recorded timeline (log.timeline) to put beside; unless costs are given its times are the costs, "
            "also for the search of auto."
        ),
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(help=f"Also write a file: {', '.join(_FORMATS)}. Repeat for several.", show_default=False),
    ] = None,
) -> None:
    """Show a pipeline schedule: its bubble, peak activations and weight versions, and a drawing.

    Examples:

      shardwise schedule 1f1b --stages 4 --microbatches 8

      shardwise schedule interleaved --stages 4 --chunks 2 --microbatches 8 --out interleaved.html

      shardwise schedule 1f1b --stages 4 --microbatches 2 --slices 4

      shardwise schedule auto --stages 8 --microbatches 24 --costs 29.7,29.4,19.9 --comm 0.5 --limit 16

      shardwise schedule mine.csv --out mine.png --out mine.trace.json
    """
    try:
        paths = [_check_format(path) for path in out or []]
        asked = _Asked(
            name, stages, microbatches, chunks, slices, costs, comm, limit, barrier, vertical_sync, steps, measured
        )
        result = _result(asked)
        _show(result, Console())
        for path in paths:
            _write(result, path)
            typer.echo(f"wrote {path}")
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@dataclass(frozen=True)
class _Asked:
    """The command line."""

    name: str
    stages: int | None
    microbatches: int | None
    chunks: int | None
    slices: int | None
    costs: str | None
    comm: float
    limit: int | None
    barrier: bool
    vertical_sync: bool
    steps: int
    measured: Path | None


def _result(asked: _Asked) -> _Result:
    """Builds, checks and simulates what the command line asks for."""
    if asked.steps < 1:
        raise ValueError(f"--steps {asked.steps} is too few; draw at least 1")
    if asked.comm < 0:
        raise ValueError(f"--comm {asked.comm:g} is negative; give the time of a transfer")
    if asked.limit is not None and asked.limit < 1:
        raise ValueError(f"--limit {asked.limit} holds no microbatch; give at least 1")
    recorded = None if asked.measured is None else _recorded(asked.measured)
    plain = _build(asked, recorded)
    if recorded is not None:
        plain = _as_run(plain, recorded)
    costs = _costs(asked, recorded, plain.num_stages, plain.num_chunks, plain.slices)
    unit = recorded.unit if recorded else ""
    step = recorded.typical_step() if recorded else None
    full = unroll(plain, asked.steps) if asked.steps > 1 else plain
    return _Result(
        schedule=full,
        report=check(full),
        simulation=simulate(full, costs, unit=unit),
        steady=steady_bubble(plain, costs) if plain.rounds is not None else None,
        measured=step,
        comparison=compare(steady_timeline(plain, costs, unit), step) if step and asked.name != "auto" else None,
    )


def _recorded(path: Path) -> Timeline:
    try:
        return load_timeline(path)
    except ValueError as error:
        raise ValueError(f"--measured {error}") from None


def _as_run(schedule: Schedule, recorded: Timeline) -> Schedule:
    """The schedule with backwards in one piece or two, as they were when it was recorded."""
    early = hand_on_early(schedule)
    ran = {(event.rank, event.action.kind) for event in recorded.events}
    return early if ran == {(rank, action.kind) for rank, row in enumerate(early.rows) for action in row} else schedule


def _costs(asked: _Asked, recorded: Timeline | None, p: int, v: int, slices: int = 1) -> Costs:
    """The costs asked for, or else those recorded, or else one unit for each pass; a slice's are its share."""
    latency = int(asked.comm) if asked.comm.is_integer() else asked.comm
    if recorded is not None and asked.costs is None:
        return Costs.measured(recorded, p * v, latency)
    whole = (Fraction(time) if isinstance(time, int) else time for time in _parse_costs(asked.costs or "1,1,1"))
    forward, backward, weight = (time / slices for time in whole)
    return Costs.per_rank(p, v, forward, backward, weight, latency)


def _build(asked: _Asked, recorded: Timeline | None) -> Schedule:
    """The schedule by name or from a file."""
    name, p, m = asked.name, asked.stages, asked.microbatches
    for option, given, home in (
        ("--limit", asked.limit is not None, "auto"),
        ("--barrier", asked.barrier, "auto"),
        ("--vertical-sync", asked.vertical_sync, "pipedream"),
    ):
        if given and name != home:
            raise ValueError(f"{option} goes with {home}, not with {name}; leave it out")
    if name.endswith((".csv", ".json")):
        return from_file(name, p, m, asked.chunks, asked.slices)
    if p is None or m is None:
        raise ValueError(f"{name} needs --stages and --microbatches, such as --stages 4 --microbatches 8")
    chunks = asked.chunks
    if chunks is None:
        chunks = FAMILIES[name].least_chunks if name in FAMILIES else 1
    costs = _costs(asked, recorded, p, 1) if name == "auto" and p > 0 else None
    return build(
        name,
        p,
        m,
        chunks,
        slices=1 if asked.slices is None else asked.slices,
        vertical_sync=asked.vertical_sync,
        costs=costs,
        limit=asked.limit,
        barrier=asked.barrier,
    )


def _parse_costs(text: str) -> tuple[Time, Time, Time]:
    """Three times, exact where they are whole numbers."""
    try:
        forward, backward, weight = (int(part) if part.strip().isdigit() else float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--costs {text!r} must be three times F,B,W, such as 1,1,1") from None
    if min(forward, backward, weight) < 0 or not forward + backward + weight > 0:
        raise ValueError(f"--costs {text!r} must not be negative, nor all zero")
    return forward, backward, weight


def _check_format(path: Path) -> Path:
    if not path.name.endswith(_FORMATS):
        raise ValueError(f"--out {path}: unknown format; use one of {', '.join(_FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}; make it, or name one that exists")
    if path.is_dir():
        raise ValueError(f"--out {path}: is a folder; name a file in it")
    return path


def _show(result: _Result, console: Console) -> None:
    """Prints the facts, a table by rank and the drawing."""
    console.print(result.title, style="bold", highlight=False)
    for fact in _facts(result):
        console.print(fact, highlight=False)
    head, *rows = _table(result)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in head:
        table.add_column(name, justify="left" if name in ("rank", "stages") else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False)
    for timeline in result.timelines:
        if result.measured:
            console.print(timeline.source, style="dim")
        console.print(terminal(timeline, console.width, console.color_system is not None), highlight=False)
    for line in result.comparison.lines() if result.comparison else []:
        console.print(line, highlight=False)


def _facts(result: _Result) -> list[str]:
    """The bubble and the times, a line each."""
    simulation, unit = result.simulation, result.simulation.timeline.unit
    unit = f" {unit}" if unit else ""
    facts = [_bubble(simulation.bubble)]
    if result.steady is not None:
        facts = [f"{_bubble(result.steady)} in steady state", f"{_bubble(simulation.bubble)} with filling and draining"]
    elif simulation.flush_bubble != simulation.bubble:
        facts.append(f"{_bubble(simulation.flush_bubble)} if all ranks meet between steps")
    facts.append(f"time {_number(simulation.makespan)}{unit}, ideal {_number(simulation.ideal)}{unit}")
    return facts


def _table(result: _Result) -> list[list[str]]:
    """Per rank what it holds and how long it computes."""
    s, report, simulation = result.schedule, result.report, result.simulation
    head = ["rank", "stages", "peak activations", "until B", "weight versions", "busy", "idle"]
    rows = []
    for rank, stages in enumerate(s.placement):
        rows.append(
            [
                str(rank),
                ", ".join(map(str, stages)),
                _number(report.peak_activations[rank] / s.num_chunks / s.slices),
                _number(report.peak_until_input[rank] / s.num_chunks / s.slices),
                str(report.peak_versions[rank]),
                _number(simulation.busy[rank]),
                _number(simulation.makespan - simulation.busy[rank]),
            ]
        )
    return [head, *rows]


def _write(result: _Result, path: Path) -> None:
    """One output file, by its suffix."""
    facts = _facts(result)
    if path.name.endswith(".trace.json"):
        save_trace(result.timelines, path)
    elif path.suffix == ".csv":
        files.save(result.schedule, path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(_json(result)) + "\n")
    elif path.suffix == ".html":
        save_page(result.timelines, path, result.title, facts, _table(result), result.comparison)
    else:
        figure(result.timelines, path, f"{result.title} · {facts[0]}")


def _json(result: _Result) -> dict[str, object]:
    """The schedule, its timeline and its marks; the file can be loaded as a schedule and as a timeline."""
    simulation = result.simulation
    data: dict[str, object] = {
        "schedule": files.to_json(result.schedule),
        "bubble": float(simulation.bubble if result.steady is None else result.steady),
        "bubble_fraction": _fraction(simulation.bubble if result.steady is None else result.steady),
        "flush_bubble": float(simulation.flush_bubble),
        "makespan": float(simulation.makespan),
        "ideal": float(simulation.ideal),
        "peak_activations": result.report.peak_activations,
        "peak_until_input": result.report.peak_until_input,
        "peak_versions": result.report.peak_versions,
        "timeline": simulation.timeline.to_json(),
    }
    if result.measured:
        data["measured"] = result.measured.to_json()
    return data


def _fraction(value: Fraction | float) -> str | None:
    return str(value) if isinstance(value, Fraction) else None


def _bubble(value: Fraction | float) -> str:
    """A bubble, as a fraction where it is exact, and as a percentage."""
    exact = str(value) if isinstance(value, Fraction) else f"{value:.4f}"
    return f"bubble {exact} of ideal time" + (f" ({float(value):.2%})" if value else "")


def _number(time: Time) -> str:
    return f"{float(time):.6g}"


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"
