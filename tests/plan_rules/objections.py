"""What rules object to."""

from typing import Any

from shardwise.plan import Plan


def keys(plan: Plan, **job: Any) -> set[str]:
    """The keys that `check` objects to, other than for being unbuilt."""
    return {problem.key for problem in plan.check(**job) if "not built yet" not in problem.reason}
