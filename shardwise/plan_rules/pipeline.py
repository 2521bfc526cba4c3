"""The schedule, and the stages that it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel

from shardwise.pipeline_parallel.schedule import FAMILIES, Family, build
from shardwise.plan_rules.job import Job
from shardwise.plan_values import ASYNCHRONOUS
from shardwise.problems import Problem

if TYPE_CHECKING:
    from torch import nn

    from shardwise.models.config import ModelConfig
    from shardwise.plan import Plan


def _chunks(plan: Plan, job: Job) -> Iterator[Problem]:
    family = FAMILIES.get(plan.schedule)
    if family is None or _holds(family, plan.chunks):
        return
    having = ", ".join(name for name, other in FAMILIES.items() if _holds(other, plan.chunks))
    yield Problem(
        "plan.chunks",
        f"{plan.schedule} has {'2 or more' if family.most_chunks is None else family.least_chunks} model chunks "
        f"per rank, not {plan.chunks}",
        f"set it to {family.least_chunks}, or plan.schedule to one with {plan.chunks}: {having}",
    )


def _holds(family: Family, chunks: int) -> bool:
    return family.least_chunks <= chunks <= (family.most_chunks or chunks)


def _two_versions(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.schedule == "pipedream-2bw" and plan.microbatches < plan.pipeline:
        yield Problem(
            "plan.microbatches",
            f"two weight versions are enough for pipedream-2bw only with a microbatch for each of the "
            f"{plan.pipeline} stages, not {plan.microbatches}",
            f"set it to {plan.pipeline} or more, or plan.schedule to pipedream",
        )


def _tied(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.schedule in ASYNCHRONOUS and plan.pipeline > 1 and job.setting("tied"):
        yield Problem(
            "plan.schedule",
            f"{plan.schedule} updates each stage at its own time, so the embedding that first and last stage share "
            "would differ between them",
            "set model.tied to false, or plan.schedule to a synchronous one such as 1f1b",
        )


def _schedule_file(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.schedule in FAMILIES:
        return
    try:
        found = build(plan.schedule, plan.pipeline, plan.microbatches, plan.chunks, slices=plan.slices)
        if found.asynchronous and plan.slices > 1:
            raise ValueError("the file's schedule is asynchronous, which slices are not; set plan.slices to 1")
    except ValueError as error:
        problem = Problem.of("plan.schedule", error)
        yield problem if problem.mend else problem._replace(mend="mend the file or name another schedule")


def _vertical_sync(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.vertical_sync and plan.schedule != "pipedream":
        yield Problem(
            "plan.vertical_sync",
            f"{plan.schedule} keeps no weight versions that differ between stages",
            "set plan.schedule to pipedream or plan.vertical_sync to false",
        )


def _in_flight(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.in_flight and plan.schedule != "auto":
        yield Problem(
            "plan.in_flight",
            f"{plan.schedule} is not searched for: what it holds is fixed",
            "set plan.schedule to auto or plan.in_flight to 0",
        )


def _stages(plan: Plan, job: Job) -> Iterator[Problem]:
    num_stages = plan.pipeline * plan.chunks
    asked = f"pipeline {plan.pipeline} x chunks {plan.chunks}" if plan.chunks > 1 else f"pipeline {plan.pipeline}"
    listed = plan.cut if isinstance(plan.cut, tuple) else None
    if listed and len(listed) != num_stages:
        yield Problem(
            "plan.cut",
            f"lists {len(listed)} stages, but {asked} makes {num_stages}",
            f"list the layers of {num_stages} stages",
        )
    if listed and 0 in listed[1:-1]:
        yield Problem("plan.cut", "leaves a stage between others without layers", "give every stage at least one")
    parts = _num_parts(job.model) if num_stages > 1 else None
    if isinstance(parts, Problem):
        yield parts
        return
    if parts is None:
        return
    num_parts, num_blocks = parts
    if listed and sum(listed) not in parts:
        yield Problem(
            "plan.cut", f"lists {sum(listed)} layers, but the model has {num_blocks}", f"make the sum {num_blocks}"
        )
    if num_stages > num_parts:
        whole = f"{num_parts} parts" if num_parts == num_blocks else f"{num_parts} parts, {num_blocks} of them blocks"
        yield Problem(
            "plan.chunks" if plan.chunks > 1 and plan.pipeline <= num_parts else "plan.pipeline",
            f"{asked} makes {num_stages} stages of a model with {whole}",
            f"make no more than {num_parts} stages",
        )


def _num_parts(model: nn.Module | ModelConfig | None) -> tuple[int, int] | Problem | None:
    """How many parts a pipeline shares out and how many of them are blocks, or why the model cannot be cut."""
    if model is None:
        return None
    if isinstance(model, BaseModel):
        return model.layers + 2, model.layers  # the embedding and the head are parts too
    from shardwise.pipeline_parallel.stages import parts_of  # with torch, which most uses of a plan do without

    try:
        parts = parts_of(model)
    except ValueError as error:
        return Problem.of("plan.pipeline", error)
    return len(parts), sum(part.block for part in parts)


RULES = (
    _chunks,
    _two_versions,
    _tied,
    _schedule_file,
    _vertical_sync,
    _in_flight,
    _stages,
)
