"""What rules object to."""

from typing import Any
from unittest.mock import patch

from shardwise.plan import Plan
from shardwise.plan_rules import built


def keys(plan: Plan, **job: Any) -> set[str]:
    """The keys that `check` would object to if everything were built."""
    with patch.object(built, "BUILT", {}):
        return {problem.key for problem in plan.check(**job)}
