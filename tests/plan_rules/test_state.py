"""State is where something can keep it."""

from __future__ import annotations

from shardwise.plan import Plan
from tests.plan_rules.objections import keys


def test_zero_needs_ranks_to_divide_over() -> None:
    assert keys(Plan(replicate=2, zero=1)) == {"plan.zero"}
    assert keys(Plan(shard=2, zero=1)) == set()
    assert keys(Plan(context=2, zero=1)) == set()


def test_master_weights_exist_only_in_low_precision() -> None:
    assert keys(Plan(offload={"master": "cpu"})) == {"plan.offload.master"}
    assert keys(Plan(precision="bf16", offload={"master": "cpu"})) == set()


def test_parameters_of_several_versions_stay_where_they_are() -> None:
    offload = {"parameters": "cpu"}
    problems = keys(Plan(shard=2, zero=3, schedule="pipedream", offload=offload))
    assert problems >= {"plan.offload.parameters"}
    assert Plan(pipeline=2, shard=2, zero=3, precision="fp16", schedule="pipedream").check() == []
