"""How long a schedule takes and how much it holds, on a clock of given costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from shardwise.pipeline_parallel.actions import Action, Kind, Row, Schedule, passes, round_rows, unroll
from shardwise.pipeline_parallel.clock import Need, Time, run
from shardwise.pipeline_parallel.timeline import Event, Timeline, stage_seconds


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) of each pass on each global stage, and of what passes between ranks.

    With integers and fractions the simulation is exact.

    Args:
        forward, backward, weight: F, B (the input half) and W of one microbatch, one entry per global stage.
        full: BW of one microbatch per stage; None is B + W.
        update: U of one chunk.
        latency: from the end of an action until its output is on another rank, besides the bytes.
        boundary_bytes: bytes that cross the boundary behind each stage, forward and backward; None is none.
        bandwidth: bytes per second of each direction between two ranks; transfers of one direction queue.
        overlapped: a forward and a full backward of two chunks that stand next to each other and run together
            (DualPipe's F&B); None runs them one after the other.
    """

    forward: tuple[Time, ...]
    backward: tuple[Time, ...]
    weight: tuple[Time, ...]
    full: tuple[Time, ...] | None = None
    update: Time = 0
    latency: Time = 0
    boundary_bytes: tuple[int, ...] | None = None
    bandwidth: float | None = None
    overlapped: Time | None = None

    @classmethod
    def uniform(
        cls, total_stages: int, forward: Time = 1, backward: Time = 1, weight: Time = 1, latency: Time = 0
    ) -> Costs:
        """The same on every stage."""
        n = total_stages
        return cls((forward,) * n, (backward,) * n, (weight,) * n, latency=latency)

    @classmethod
    def per_rank(
        cls, num_stages: int, num_chunks: int, forward: Time, backward: Time, weight: Time, latency: Time = 0
    ) -> Costs:
        """Every rank's whole share of one microbatch costs this, divided equally over its chunks."""
        f, b, w = (_divide(time, num_chunks) for time in (forward, backward, weight))
        return cls.uniform(num_stages * num_chunks, f, b, w, latency)

    @classmethod
    def measured(cls, timeline: Timeline, total_stages: int, latency: Time = 0) -> Costs:
        """The median times of a recorded run; where only BW ran it counts half as B and half as W.

        Raises:
            ValueError: a stage of which no forward or no backward is recorded.
        """
        columns = {kind: stage_seconds(timeline, kind, total_stages) for kind in Kind}
        forward, backward, weight, full = [], [], [], []
        for stage in range(total_stages):
            f, b, w, bw, _ = (columns[kind][stage] for kind in (Kind.F, Kind.B, Kind.W, Kind.BW, Kind.U))
            if f is None or (bw is None and (b is None or w is None)):
                raise ValueError(f"the timeline has no complete forward and backward of stage {stage}")
            whole = bw if bw is not None else (b or 0.0) + (w or 0.0)
            forward.append(f)
            backward.append(whole / 2 if b is None else b)
            weight.append(whole / 2 if w is None else w)
            full.append(whole)
        update = max((time for time in columns[Kind.U] if time is not None), default=0.0)
        return cls(tuple(forward), tuple(backward), tuple(weight), tuple(full), update, latency)

    def of(self, action: Action, stage: int) -> Time:
        """How long an action takes on a stage."""
        match action.kind:
            case Kind.F:
                return self.forward[stage]
            case Kind.B:
                return self.backward[stage]
            case Kind.W:
                return self.weight[stage]
            case Kind.BW:
                return self.full[stage] if self.full else self.backward[stage] + self.weight[stage]
        return self.update


@dataclass(frozen=True)
class Memory:
    """Bytes that one microbatch holds on each global stage.

    Args:
        activation: from its forward until its input backward has run.
        deferred: from its input backward until its weight backward has run; None is the same.
    """

    activation: tuple[int, ...]
    deferred: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Simulation:
    """A schedule on the clock.

    Two bubbles are told apart. `bubble` is what the papers' closed forms give: the idle time between a rank's first and
    last action, the most of any rank, over the ideal time. Steps that follow each other without a barrier repeat after
    that time. `flush_bubble` counts from the first start to the last end of any rank, as when all ranks meet between
    steps (a global gradient norm); the two differ only for schedules that end later where they begin later.

    Args:
        timeline: every action's start and end.
        ideal: the busiest rank's computing time.
        busy, span: per rank computing time and time from first start to last end.
        makespan: from the first start to the last end of any rank.
        peak_bytes: per rank the most bytes held, where a `Memory` was given.
    """

    timeline: Timeline
    ideal: Time
    busy: tuple[Time, ...]
    span: tuple[Time, ...]
    makespan: Time
    peak_bytes: tuple[int, ...] | None

    @property
    def bubble(self) -> Fraction | float:
        """(longest span - ideal) / ideal; a fraction when the costs are exact."""
        return _ratio(max(self.span) - self.ideal, self.ideal)

    @property
    def flush_bubble(self) -> Fraction | float:
        """(makespan - ideal) / ideal."""
        return _ratio(self.makespan - self.ideal, self.ideal)

    @property
    def bubble_rate(self) -> float:
        """Idle over longest span instead of over ideal: the bubble rate of 2401.10241 table 5."""
        return 1 - float(self.ideal) / float(max(self.span))


def simulate(
    schedule: Schedule, costs: Costs | None = None, memory: Memory | None = None, unit: str = ""
) -> Simulation:
    """Runs a schedule's rows on a clock; every rank waits only for what an action needs, transfers run beside compute.

    Args:
        schedule: any valid one (`check`).
        costs: one unit for every F, B and W unless given.
        memory: bytes held, for `Simulation.peak_bytes`.
        unit: "s" if the costs are seconds.

    Raises:
        ValueError: costs or memory for another number of stages.
        ScheduleError: a cycle.
    """
    costs = costs or Costs.uniform(schedule.total_stages)
    _check_lengths(schedule, costs, memory)
    spans = run(
        schedule.rows,
        schedule.placement,
        lambda rank, action: costs.of(action, schedule.stage(rank, action.chunk)),
        _Links(costs),
        costs.overlapped,
    )
    events = tuple(
        Event(rank, action, schedule.stage(rank, action.chunk), span.start, span.end)
        for rank, row in enumerate(schedule.rows)
        for action, span in zip(row, spans[rank], strict=True)
    )
    timeline = Timeline(schedule.name, "simulated", unit, events, schedule.slices)
    peak = None
    if memory is not None:
        peak = tuple(_peak_bytes(schedule, rank, row, memory) for rank, row in enumerate(schedule.rows))
    busy = timeline.busy
    return Simulation(timeline, max(busy), busy, timeline.span, timeline.makespan, peak)


def steady_step(schedule: Schedule, costs: Costs | None = None) -> Time:
    """The time per step when steps follow each other without a barrier: what asynchronous schedules reach.

    Simulates enough steps to fill the pipeline twice over and takes the increase of as many more.
    """
    extra = 2 * -(-schedule.num_stages // schedule.num_microbatches) + 1
    short, long = (simulate(unroll(schedule, count), costs).makespan for count in (2 * extra, 3 * extra))
    return _divide(long - short, extra)


def steady_bubble(schedule: Schedule, costs: Costs | None = None) -> Fraction | float:
    """(time per step - ideal) / ideal when steps follow each other without a barrier."""
    ideal = simulate(schedule, costs).ideal
    return _ratio(steady_step(schedule, costs) - ideal, ideal)


def steady_timeline(schedule: Schedule, costs: Costs | None = None, unit: str = "") -> Timeline:
    """One step as it repeats: of a schedule with rounds the events of a later step, numbered as that step numbers them.

    Synchronous schedules repeat as they are.
    """
    if schedule.rounds is None:
        return simulate(schedule, costs, unit=unit).timeline
    m, step = schedule.num_microbatches, 2 * -(-schedule.num_stages // schedule.num_microbatches) + 1
    rows = simulate(unroll(schedule, step + 2), costs, unit=unit).timeline
    first = [sum(len(round_rows(schedule, number)[rank]) for number in range(step)) for rank in range(len(rows.rows))]
    events = tuple(
        event._replace(action=event.action._replace(microbatch=event.action.microbatch - step * m), step=step)
        for rank, row in enumerate(rows.rows)
        for event in row[first[rank] : first[rank] + len(schedule.rounds[1][rank])]
    )
    return replace(rows, events=events).from_zero()


class _Links:
    """Arrival times: each direction between two ranks carries one transfer's bytes after the other's."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.free: dict[tuple[int, int], Time] = {}

    def __call__(self, sender: int, receiver: int, what: Need, end: Time) -> Time:
        costs = self.costs
        if costs.bandwidth is None or costs.boundary_bytes is None:
            return end + costs.latency
        boundary = what.stage if what.kind is Kind.F else what.stage - 1
        start = max(end, self.free.get((sender, receiver), end))
        self.free[sender, receiver] = start + costs.boundary_bytes[boundary] / costs.bandwidth
        return self.free[sender, receiver] + costs.latency


def _check_lengths(schedule: Schedule, costs: Costs, memory: Memory | None) -> None:
    """Everything per stage has one entry per stage."""
    columns = {"forward": costs.forward, "backward": costs.backward, "weight": costs.weight, "full": costs.full}
    if memory is not None:
        columns |= {"activation": memory.activation, "deferred": memory.deferred}
    for name, column in columns.items():
        if column is not None and len(column) != schedule.total_stages:
            raise ValueError(f"{name} has {len(column)} entries; {schedule.name} has {schedule.total_stages} stages")
    if costs.boundary_bytes is not None and len(costs.boundary_bytes) != schedule.total_stages - 1:
        raise ValueError(
            f"boundary_bytes has {len(costs.boundary_bytes)} entries; between {schedule.total_stages} stages there are "
            f"{schedule.total_stages - 1} boundaries"
        )


def _peak_bytes(schedule: Schedule, rank: int, row: Row, memory: Memory) -> int:
    """The most bytes a rank's row holds at once."""
    held = peak = 0
    for action in row:
        stage = schedule.stage(rank, action.chunk)
        full = memory.activation[stage]
        deferred = full if memory.deferred is None else memory.deferred[stage]
        for kind in passes(action):
            held += {Kind.F: full, Kind.B: deferred - full, Kind.W: -deferred}.get(kind, 0)
        peak = max(peak, held)
    return peak


def _exact(time: Time) -> bool:
    return isinstance(time, int | Fraction)


def _divide(time: Time, by: int) -> Time:
    """Exact division of exact times."""
    if not _exact(time):
        return time / by
    part = Fraction(time) / by
    return int(part) if part.denominator == 1 else part


def _ratio(part: Time, whole: Time) -> Fraction | float:
    """Part over whole, exact when both are; 0 of nothing."""
    if not whole:
        return Fraction(0)
    return Fraction(part) / Fraction(whole) if _exact(part) and _exact(whole) else float(part) / float(whole)
