"""How many ranks there are, and what the sizes of the axes divide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.plan_rules.job import Job
from shardwise.problems import Problem

if TYPE_CHECKING:
    from shardwise.plan import Plan


def _ranks(plan: Plan, job: Job) -> Iterator[Problem]:
    if job.num_ranks is None or job.num_ranks == plan.num_ranks:
        return
    sizes = " x ".join(f"{name} {size}" for name, size in plan.axes.items() if size > 1) or "one device"
    copies, rest = divmod(job.num_ranks, plan.num_ranks // plan.replicate)
    fitting = f", or set plan.replicate to {copies}" if copies and not rest else ""
    yield Problem(
        "plan",
        f"{sizes} needs {plan.num_ranks} ranks and there are {job.num_ranks}",
        f"start {plan.num_ranks}{fitting}",
    )


def _batch(plan: Plan, job: Job) -> Iterator[Problem]:
    if job.batch is None or job.batch // plan.data_parallel >= plan.microbatches:
        return
    fewer = job.batch // plan.data_parallel
    if not fewer:
        yield Problem(
            "plan",
            f"a batch of {job.batch} sequences has not one for each of {plan.data_parallel} data-parallel ranks",
            f"raise data.batch to {plan.data_parallel * plan.microbatches}, or lower plan.replicate or plan.shard",
        )
        return
    yield Problem(
        "plan.microbatches",
        f"{plan.microbatches} microbatches on {plan.data_parallel} data-parallel ranks "
        f"cannot each have a sequence of a batch of {job.batch}",
        f"raise data.batch to {plan.data_parallel * plan.microbatches} or lower plan.microbatches to {fewer}",
    )


def _sequence(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.sequence and plan.tensor == 1:
        yield Problem(
            "plan.sequence",
            "splits the sequence over the tensor axis, which has one rank",
            "set plan.tensor above 1 or plan.sequence to false",
        )


def _tensor(plan: Plan, job: Job) -> Iterator[Problem]:
    heads = job.setting("heads")
    if heads and heads % plan.tensor:
        yield Problem(
            "plan.tensor",
            f"{plan.tensor} ranks do not divide {heads} attention heads, and a head is never split",
            "choose a divisor of model.heads",
        )
    shared = job.setting("kv_heads")
    if shared and not heads % plan.tensor and shared % plan.tensor and plan.tensor % shared:
        yield Problem(
            "plan.tensor",
            f"{plan.tensor} ranks cannot each have whole ones, or one, of {shared} key and value heads",
            "choose a divisor or a multiple of model.kv_heads",
        )


def _expert(plan: Plan, job: Job) -> Iterator[Problem]:
    ranks = plan.replicate * plan.shard * plan.context
    if ranks % plan.expert:
        yield Problem(
            "plan.expert",
            f"{plan.expert} does not divide the {ranks} ranks of replicate x shard x context that share the experts",
            f"choose a divisor of {ranks}",
        )


def _averaging(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.averaging != "every-step" and plan.replicate == 1:
        yield Problem(
            "plan.averaging",
            f"{plan.averaging} averages the copies of the replicate axis, and there is one",
            "set plan.replicate above 1 or plan.averaging to every-step",
        )


RULES = (
    _ranks,
    _batch,
    _sequence,
    _tensor,
    _expert,
    _averaging,
)
