"""Every rule on what goes with what in a plan.

A rule is a pure function of a plan and the job; it yields a problem for each thing that cannot be. The rules on one
subject are in one file.
"""

from shardwise.plan_rules import axes, built, context, pipeline, precision, state
from shardwise.plan_rules.job import Job

RULES = (*built.RULES, *axes.RULES, *context.RULES, *pipeline.RULES, *precision.RULES, *state.RULES)

__all__ = ["RULES", "Job"]
