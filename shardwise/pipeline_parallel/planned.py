"""The schedule of a plan, by its name or the best one for measured times, and the stages that it runs."""

from torch import nn

from shardwise import collectives
from shardwise.batch import Batch
from shardwise.loss import Loss
from shardwise.mesh import Mesh
from shardwise.pipeline_parallel import schedule as schedules
from shardwise.pipeline_parallel.schedule import Kind, Schedule, round_rows
from shardwise.pipeline_parallel.simulator import Costs, Memory
from shardwise.pipeline_parallel.stages import Stage, Whole, cut, parts_of
from shardwise.pipeline_parallel.timeline import Timeline
from shardwise.plan import Plan
from shardwise.plan_values import SCHEDULE_FILES


def build_schedule(plan: Plan) -> Schedule:
    """The schedule a plan names, as ranks run it; for "auto" the one it begins with, until times have been measured.

    Raises:
        ValueError: it does not exist for the plan's numbers, or its file does not fit them.
    """
    name = "zb-h1" if plan.schedule == "auto" else plan.schedule
    schedule = schedules.build(
        name,
        plan.pipeline,
        plan.microbatches,
        plan.chunks,
        slices=plan.slices,
        vertical_sync=plan.vertical_sync,
    )
    schedules.check(schedule)
    # A file says exactly what to run. From ZeRO stage 2 on, gradients that two passes make cost further memory.
    as_it_is = plan.schedule.endswith(SCHEDULE_FILES) or plan.zero >= 2
    return schedule if as_it_is else schedules.hand_on_early(schedule)


def search_schedule(timeline: Timeline | None, plan: Plan, mesh: Mesh, barrier: bool) -> Schedule:
    """The schedule with the least bubble for the times of F, B and W of every stage. Collective over the job.

    Args:
        timeline: as measured; needed on the first rank.
        barrier: whether the ranks meet at every step's end, to agree on a gradient norm.
    """
    chosen = None
    if mesh.rank == 0:
        assert timeline is not None
        chosen = schedules.build(
            "auto",
            plan.pipeline,
            plan.microbatches,
            costs=Costs.measured(timeline, plan.pipeline),
            memory=Memory((1,) * plan.pipeline),
            limit=plan.in_flight or None,
            barrier=barrier,
        )
        schedules.check(chosen)
    found = collectives.broadcast_object(chosen, mesh.axis("world"))
    assert isinstance(found, Schedule)
    return found


def build_stages(
    model: nn.Module, plan: Plan, schedule: Schedule, example: Batch | None, loss: Loss, mesh: Mesh
) -> list[nn.Module]:
    """Every stage's part of the model. Collective over the job.

    Raises:
        ValueError: the model cannot be cut so.
    """
    if schedule.total_stages == 1 and plan.recompute != "sqrt":
        return [Whole(model)]
    parts = parts_of(model)
    if schedule.total_stages == 1:
        return [Stage(parts, first=True, last=True)]
    chosen: list[range] | ValueError | None = None
    if mesh.rank == 0:  # measured times differ from rank to rank
        try:
            chosen = cut(parts, schedule.placement, plan.cut, example, loss.sum)
        except ValueError as error:
            chosen = error
    ranges = collectives.broadcast_object(chosen, mesh.axis("world"))
    if isinstance(ranges, ValueError):
        raise ranges
    last = len(ranges) - 1
    return [Stage([parts[index] for index in held], number == 0, number == last) for number, held in enumerate(ranges)]


def takes_losses_back(schedule: Schedule) -> bool:
    """Whether the last stage's backwards follow their forwards in the same step, so that its losses may be computed in
    them."""
    rank, chunk = schedule.owner(schedule.total_stages - 1)
    for number in (0, 1):
        row = [action for action in round_rows(schedule, number)[rank] if action.chunk == chunk]
        forwards = {action.microbatch for action in row if action.kind is Kind.F}
        if forwards != {action.microbatch for action in row if action.kind in (Kind.B, Kind.BW)}:
            return False
    return True
