"""What `examples/` holds runs as it stands."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from shardwise.plan import Plan
from tests.pool import run_ranks

SCRIPT = Path(__file__).parent.parent / "examples" / "own_module.py"


def last_loss(plan: Plan) -> float:
    loss = runpy.run_path(str(SCRIPT))["main"](plan, steps=60)
    assert isinstance(loss, float)
    return loss


def test_own_module_learns_the_same_in_every_layout() -> None:
    alone = last_loss(Plan())
    assert alone < 1.0  # four classes: 1.39 for a guess
    for plan in (Plan(replicate=2, microbatches=2), Plan(pipeline=2, microbatches=4, schedule="zb-h1")):
        assert run_ranks(last_loss, 2, plan) == [pytest.approx(alone, rel=1e-3)] * 2
