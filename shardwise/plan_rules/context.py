"""Sequences cut over ranks or in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel

from shardwise.pipeline_parallel.schedule import FAMILIES, SLICED
from shardwise.plan_rules.job import Job
from shardwise.problems import Problem

if TYPE_CHECKING:
    from shardwise.plan import Plan


def _context(plan: Plan, job: Job) -> Iterator[Problem]:
    length, heads = job.setting("sequence"), job.setting("heads")
    if length and plan.context > length:
        yield Problem("plan.context", f"{plan.context} ranks for {length} positions", f"set it to {length} or less")
    if heads and plan.context > 1 and plan.context_method == "ulysses" and heads % (plan.tensor * plan.context):
        yield Problem(
            "plan.context_method",
            f"ulysses gives each rank whole heads, and tensor {plan.tensor} x context {plan.context} ranks do not "
            f"divide {heads} heads",
            "use ring, or sizes that divide model.heads",
        )
    if plan.context == 1 or job.model is None:
        return
    if not isinstance(job.model, BaseModel):
        from shardwise.tensor_parallel import context  # with torch, which most uses of a plan do without

        try:
            context.check(job.model, plan.context_method)
        except ValueError as error:
            yield Problem.of("plan.context", error)
        return
    if job.model.dropout and plan.context_method == "ring":
        yield Problem(
            "plan.context_method",
            f"ring never holds the attention weights, of which model.dropout = {job.model.dropout} would drop some",
            "set it to ulysses, or model.dropout to 0",
        )
    if job.model.rope_scaling.kind == "dynamic":
        yield Problem(
            "plan.context",
            "dynamic rotary scaling turns positions by the length of the whole sequence, which no rank's part shows",
            "set model.rope_scaling.kind to yarn or llama3, or plan.context to 1",
        )


def _slices(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.slices == 1:
        return
    if plan.schedule in FAMILIES and plan.schedule not in SLICED:
        yield Problem(
            "plan.schedule",
            f"{plan.schedule} does not know that slices go forward in order and backward in the opposite one",
            f"set it to {' or '.join(SLICED)}, or plan.slices to 1",
        )
    if plan.context > 1:
        yield Problem(
            "plan.slices",
            f"{plan.slices} slices in time of what context {plan.context} has divided over ranks already is not built",
            "set plan.slices or plan.context to 1",
        )
    length = job.setting("sequence")
    if length and plan.slices > length:
        yield Problem("plan.slices", f"{plan.slices} slices of {length} positions", f"set it to {length} or less")
    if job.model is None:
        return
    if not isinstance(job.model, BaseModel):
        from shardwise.tensor_parallel import context  # with torch, which most uses of a plan do without

        try:
            context.check(job.model, "slices")
        except ValueError as error:
            yield Problem.of("plan.slices", error)
        return
    if job.model.dropout:
        yield Problem(
            "plan.slices",
            f"attention over slices never holds its weights, of which model.dropout = {job.model.dropout} would drop "
            "some",
            "set model.dropout to 0, or plan.slices to 1",
        )
    if job.model.rope_scaling.kind == "dynamic":
        yield Problem(
            "plan.slices",
            "dynamic rotary scaling turns positions by the length of the whole sequence, which no slice shows",
            "set model.rope_scaling.kind to yarn or llama3, or plan.slices to 1",
        )


RULES = (
    _context,
    _slices,
)
