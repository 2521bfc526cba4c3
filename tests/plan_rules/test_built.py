"""What is not built is refused, and every rule is in force."""

from __future__ import annotations

import importlib
from pkgutil import iter_modules
from typing import Any

import pytest

from shardwise import plan_rules
from shardwise.plan import Plan
from shardwise.plan_rules import built

TECHNIQUES: list[tuple[str, Any, dict[str, Any]]] = [
    ("zero", 1, {"shard": 2}),
    ("tensor", 2, {}),
    ("sequence", True, {"tensor": 2}),
    ("context", 2, {}),
    ("expert", 2, {"replicate": 2}),
    ("averaging", "local:4", {"replicate": 2}),
    ("recompute", "full", {}),
    ("recompute", 0.5, {}),
    ("precision", "bf16", {}),
    ("offload", {"optimizer": "cpu"}, {}),
    ("compress_gradients", "powersgd:4", {"replicate": 2}),
    ("compress_activations", "int8", {}),
]


@pytest.mark.parametrize(("key", "value", "beside"), TECHNIQUES)
def test_a_technique_is_refused_until_the_table_says_that_it_is_built(
    key: str, value: Any, beside: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    default = () if key == "offload" else (getattr(Plan(), key),)
    monkeypatch.setattr(built, "BUILT", {key: default})
    (problem,) = Plan(**{key: value}, **beside).check()
    assert problem.key.startswith(f"plan.{key}")
    assert problem.reason.endswith("is not built yet")

    kinds: tuple[object, ...] = (value.partition(":")[0],) if isinstance(value, str) else (value,)
    monkeypatch.setattr(built, "BUILT", {key: tuple(value) if isinstance(value, dict) else kinds})
    assert Plan(**{key: value}, **beside).check() == []


@pytest.mark.parametrize(
    "values", [{"expert": 2}, {"averaging": "delayed"}, {"compress_gradients": "int8"}], ids=lambda values: str(*values)
)
def test_a_value_that_is_not_built_is_one_problem(values: dict[str, Any]) -> None:
    (problem,) = Plan(**values).check()
    assert problem.reason.endswith("is not built yet")


def test_every_key_of_the_table_is_a_key_of_the_plan_and_its_default_is_built() -> None:
    assert built.BUILT.keys() <= Plan.model_fields.keys()
    assert Plan().check() == []


@pytest.mark.parametrize(
    "plan", [Plan(replicate=2, shard=3), Plan(precision="fp64"), Plan(pipeline=3), Plan(tensor=4, sequence=True)]
)
def test_what_is_built_is_accepted(plan: Plan) -> None:
    assert plan.check(num_ranks=plan.num_ranks, batch=6) == []


def test_every_rule_is_in_force() -> None:
    files = [
        importlib.import_module(f"{plan_rules.__name__}.{file.name}") for file in iter_modules(plan_rules.__path__)
    ]
    rules = {
        value
        for file in files
        for value in vars(file).values()
        if getattr(value, "__annotations__", {}).get("return") == "Iterator[Problem]"
    }
    assert rules == set(plan_rules.RULES)
