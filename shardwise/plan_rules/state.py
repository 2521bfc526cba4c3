"""Where parameters, gradients and optimizer state are between steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.plan_rules.job import Job
from shardwise.plan_values import ASYNCHRONOUS
from shardwise.problems import Problem

if TYPE_CHECKING:
    from shardwise.plan import Plan


def _zero(plan: Plan, job: Job) -> Iterator[Problem]:
    # Stages 2 and 3 are also what keeps gradients and parameters elsewhere, on one rank too.
    elsewhere = (plan.zero == 3 and plan.offload.parameters) or (plan.zero >= 2 and plan.offload.gradients)
    if plan.zero and plan.shard * plan.context == 1 and not elsewhere:
        yield Problem(
            "plan.zero", f"{plan.zero} divides state over one rank", "set plan.shard above 1 or plan.zero to 0"
        )


def _offload(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.offload.master and plan.precision in ("fp64", "fp32", "bf16-pure"):
        yield Problem(
            "plan.offload.master",
            f"precision {plan.precision} has no master weights beside its parameters",
            "offload parameters instead, or set plan.precision to bf16 or fp16",
        )
    if plan.offload.parameters and plan.zero < 3:
        yield Problem(
            "plan.offload.parameters",
            f"with zero {plan.zero} the whole parameters are in use from step to step",
            "set plan.zero to 3, which brings them block by block, on one rank too",
        )
    if plan.offload.gradients and plan.zero < 2:
        yield Problem(
            "plan.offload.gradients",
            f"with zero {plan.zero} whole gradients are in memory while backward adds to them",
            "set plan.zero to 2 or 3, which keep sums of them, on one rank too",
        )
    if plan.offload.parameters and plan.schedule in ASYNCHRONOUS:
        yield Problem(
            "plan.offload.parameters",
            f"{plan.schedule} keeps several weight versions, which are in memory",
            "set plan.schedule to a synchronous one such as 1f1b, or leave it out",
        )


RULES = (
    _zero,
    _offload,
)
