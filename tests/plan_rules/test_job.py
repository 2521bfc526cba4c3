"""What is known of the model."""

from __future__ import annotations

from torch import nn

from shardwise.models.config import ModelConfig
from shardwise.plan import Plan
from tests.plan_rules.objections import keys


def test_the_config_of_a_model_stands_for_it() -> None:
    model = ModelConfig(layers=3, hidden=12, heads=6)
    assert keys(Plan(pipeline=5), model=model) == set()
    assert keys(Plan(pipeline=6), model=model) == {"plan.pipeline"}
    assert keys(Plan(pipeline=2, cut=[1, 1]), model=model) == {"plan.cut"}
    assert keys(Plan(tensor=3), model=model) == set()
    assert keys(Plan(tensor=4), model=model) == {"plan.tensor"}
    shared = ModelConfig(family="llama", hidden=24, heads=6, kv_heads=3)
    assert keys(Plan(tensor=3), model=shared) == keys(Plan(tensor=6), model=shared) == set()
    assert keys(Plan(tensor=2), model=shared) == {"plan.tensor"}
    assert keys(Plan(tensor=2, context=3, context_method="ulysses"), model=model) == set()
    assert keys(Plan(tensor=2, context=2, context_method="ulysses"), model=model) == {"plan.context_method"}
    assert keys(Plan(context=2, context_method="ulysses"), model=ModelConfig(dropout=0.1)) == set()
    assert keys(Plan(context=2), model=ModelConfig(dropout=0.1)) == {"plan.context_method"}
    stretched = ModelConfig(family="llama", rope_scaling={"kind": "dynamic", "factor": 2.0, "original_sequence": 8})
    assert keys(Plan(context=2), model=stretched) == {"plan.context"}
    (problem,) = Plan(context=2).check(model=nn.Linear(2, 2))
    assert problem.key == "plan.context"
    assert "attention_cores" in problem.mend
    assert keys(Plan(context=9), model=ModelConfig(sequence=8)) == {"plan.context"}
