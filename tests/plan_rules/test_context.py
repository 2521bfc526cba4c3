"""Sequences cut over ranks or in time."""

from __future__ import annotations

from torch import nn

from shardwise.models.config import ModelConfig
from shardwise.pipeline_parallel import schedule as schedules
from shardwise.plan import Plan
from tests.plan_rules.objections import keys


def test_slices_go_with_schedules_that_know_them_and_causal_attention_that_holds_no_weights() -> None:
    for schedule in schedules.FAMILIES:
        chunks = schedules.FAMILIES[schedule].least_chunks
        wrong = set() if schedule in ("gpipe", "1f1b") else {"plan.schedule"}
        assert keys(Plan(slices=2, schedule=schedule, chunks=chunks)) == wrong
    (problem,) = Plan(slices=2, context=2).check()
    assert (problem.key, problem.mend) == ("plan.slices", "set plan.slices or plan.context to 1")
    assert keys(Plan(slices=9), model=ModelConfig(sequence=8)) == {"plan.slices"}
    assert keys(Plan(slices=2), model=ModelConfig(dropout=0.1)) == {"plan.slices"}
    stretched = ModelConfig(family="llama", rope_scaling={"kind": "dynamic", "factor": 2.0, "original_sequence": 8})
    assert keys(Plan(slices=2), model=stretched) == {"plan.slices"}
    (problem,) = Plan(slices=2).check(model=nn.Linear(2, 2))
    assert problem.key == "plan.slices"
    assert "attention_cores" in problem.mend
