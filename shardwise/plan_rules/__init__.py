"""Every rule on what goes with what in a plan.

A rule is a pure function of a plan and the job; it yields a problem for each thing that cannot be. The rules on one
subject are in one file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.plan_rules import axes, built, context, pipeline, precision, state
from shardwise.plan_rules.job import Job
from shardwise.problems import Problem

if TYPE_CHECKING:
    from shardwise.plan import Plan

RULES = (*built.RULES, *axes.RULES, *context.RULES, *pipeline.RULES, *precision.RULES, *state.RULES)


def problems(plan: Plan, job: Job) -> list[Problem]:
    """What all rules find. Of a value that is not built that alone: what else it would need changes nothing."""
    unbuilt = {problem.key for rule in built.RULES for problem in rule(plan, job)}
    found = ((rule, problem) for rule in RULES for problem in rule(plan, job))
    return [problem for rule, problem in found if rule in built.RULES or problem.key not in unbuilt]


__all__ = ["RULES", "Job", "problems"]
