"""Pipeline schedules as data: the types, the families by name, the checker and the derived transfers in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.pipeline_parallel.actions import (
    Action,
    Kind,
    Row,
    Rows,
    Schedule,
    ScheduleError,
    Weights,
    drain_rows,
    hand_on_early,
    linear,
    passes,
    round_rows,
    unroll,
    vee,
)
from shardwise.pipeline_parallel.automatic import automatic
from shardwise.pipeline_parallel.checker import Report, check, versions
from shardwise.pipeline_parallel.dualpipe import dualpipev
from shardwise.pipeline_parallel.files import load, save
from shardwise.pipeline_parallel.gpipe import gpipe
from shardwise.pipeline_parallel.interleaved import interleaved
from shardwise.pipeline_parallel.one_f_one_b import one_f_one_b
from shardwise.pipeline_parallel.pipedream import pipedream, pipedream_2bw
from shardwise.pipeline_parallel.simulator import Costs, Memory
from shardwise.pipeline_parallel.transfers import Receive, Send, Step, all_transfers, transfers
from shardwise.pipeline_parallel.zero_bubble import zb_h1, zb_h2, zbv
from shardwise.problems import nearest

__all__ = [
    "FAMILIES",
    "SLICED",
    "Action",
    "Family",
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
    "from_file",
    "hand_on_early",
    "linear",
    "load",
    "passes",
    "round_rows",
    "save",
    "transfers",
    "unroll",
    "vee",
    "versions",
]


@dataclass(frozen=True)
class Family:
    """A schedule `build` knows by name: how many chunks a rank may hold (None is any number), its generator, and that
    for sequences cut into slices (p, m, slices), where there is one."""

    least_chunks: int
    most_chunks: int | None
    make: Callable[[int, int, int], Schedule]
    sliced: Callable[[int, int, int], Schedule] | None = None


FAMILIES: dict[str, Family] = {
    "gpipe": Family(1, 1, lambda p, m, _: gpipe(p, m), gpipe),
    "1f1b": Family(1, 1, lambda p, m, _: one_f_one_b(p, m), one_f_one_b),
    "interleaved": Family(2, None, interleaved),
    "zb-h1": Family(1, 1, lambda p, m, _: zb_h1(p, m)),
    "zb-h2": Family(1, 1, lambda p, m, _: zb_h2(p, m)),
    "zbv": Family(2, 2, lambda p, m, _: zbv(p, m)),
    "dualpipev": Family(2, 2, lambda p, m, _: dualpipev(p, m)),
    "pipedream": Family(1, 1, lambda p, m, _: pipedream(p, m)),
    "pipedream-2bw": Family(1, 1, lambda p, m, _: pipedream_2bw(p, m)),
    "auto": Family(1, 1, lambda p, m, _: automatic(p, m)),
}

SLICED = [name for name, family in FAMILIES.items() if family.sliced is not None]


def build(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    slices: int = 1,
    vertical_sync: bool = False,
    costs: Costs | None = None,
    memory: Memory | None = None,
    limit: int | tuple[int, ...] | None = None,
    barrier: bool = False,
) -> Schedule:
    """The schedule of a family, or of a file, for p stages, m microbatches and v chunks per rank.

    Args:
        name: one of `FAMILIES`, or the path of a .csv or .json file (`files`), whose numbers must be those given.
        slices: n, into which every microbatch's sequences are cut; the schedule then has m * n microbatches.
        vertical_sync: of pipedream, use one weight version across stages.
        costs, memory, limit, barrier: of auto, what `automatic` takes.

    Raises:
        ValueError: an unknown name, or numbers for which the schedule does not exist, with the mend.
    """
    sizes = {"stages": num_stages, "microbatches": num_microbatches, "chunks": num_chunks, "slices": slices}
    for what, number in sizes.items():
        if number < 1:
            raise ValueError(f"{what} = {number} is too small; use at least 1")
    if name.endswith((".csv", ".json")):
        return from_file(name, num_stages, num_microbatches, num_chunks, slices)
    family = FAMILIES.get(name)
    if family is None:
        near = nearest(name, FAMILIES)
        meant = f"did you mean {near}?" if near else f"use one of {', '.join(FAMILIES)} or a .csv or .json file"
        raise ValueError(f"unknown schedule {name!r}; {meant}")
    if num_chunks < family.least_chunks or num_chunks > (family.most_chunks or num_chunks):
        wanted = (
            "2 or more chunks" if family.most_chunks is None else ("one chunk", "2 chunks")[family.least_chunks - 1]
        )
        raise ValueError(f"{name} has {wanted} per rank, not {num_chunks}; set chunks = {family.least_chunks}")
    if slices > 1 and family.sliced is None:
        raise ValueError(
            f"{name} does not know that a sequence's slices go forward in order and backward in the opposite one; use "
            f"{' or '.join(SLICED)}, or slices = 1"
        )
    if slices > 1 and family.sliced is not None:
        return family.sliced(num_stages, num_microbatches * slices, slices)
    if vertical_sync and name != "pipedream":
        raise ValueError(f"{name} has no vertical sync; use pipedream or leave it out")
    if vertical_sync:
        return pipedream(num_stages, num_microbatches, vertical_sync=True)
    if name == "auto":
        return automatic(num_stages, num_microbatches, costs=costs, memory=memory, limit=limit, barrier=barrier)
    return family.make(num_stages, num_microbatches, num_chunks)


def from_file(
    path: str,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    num_chunks: int | None = None,
    slices: int | None = None,
) -> Schedule:
    """The schedule in a .csv or .json file, with the numbers asked for, where any are.

    Raises:
        ValueError: the file cannot be read, its schedule cannot run, or it is for other numbers.
    """
    schedule = load(path)
    for what, asked, found in (
        ("pipeline ranks", num_stages, schedule.num_stages),
        ("slices of a sequence", slices, schedule.slices),
        ("microbatches", num_microbatches, schedule.num_microbatches // schedule.slices),
        ("chunks per rank", num_chunks, schedule.num_chunks),
    ):
        if asked not in (None, found):
            raise ValueError(f"{path} is a schedule for {found} {what}, not {asked}; ask for {found}")
    return schedule
