"""A plan is data: what it accepts, refuses and says."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.pipeline_parallel import schedule as schedules
from shardwise.plan import Plan, PlanError
from shardwise.plan_values import CUTS
from shardwise.problems import Problem

FRACTIONS = st.floats(0, 1, allow_nan=False)
PLACES = st.sampled_from(["cpu", "disk:/scratch/a b"])
PLANS = st.builds(
    Plan,
    replicate=st.integers(1, 9),
    shard=st.integers(1, 9),
    zero=st.integers(0, 3),
    tensor=st.integers(1, 9),
    sequence=st.booleans(),
    context=st.integers(1, 9),
    context_method=st.sampled_from(["ring", "ulysses"]),
    pipeline=st.integers(1, 9),
    schedule=st.sampled_from([*schedules.FAMILIES, "mine.csv", "a folder/it's.json"]),
    chunks=st.integers(1, 4),
    microbatches=st.integers(1, 64),
    slices=st.integers(1, 8),
    cut=st.one_of(st.sampled_from(CUTS), st.lists(st.integers(0, 9), min_size=1)),
    vertical_sync=st.booleans(),
    expert=st.integers(1, 9),
    averaging=st.sampled_from(["every-step", "delayed", "local:1", "local:16"]),
    recompute=st.one_of(st.sampled_from(["none", "full", "selective"]), FRACTIONS),
    precision=st.sampled_from(["fp64", "fp32", "bf16", "bf16-pure", "fp16", "fp8"]),
    offload=st.fixed_dictionaries({}, optional={"optimizer": PLACES, "activations": PLACES}),
    compress_gradients=st.sampled_from(["none", "int8", "powersgd:4", "topk:0.01"]),
    compress_activations=st.sampled_from(["none", "gist", "int4"]),
)


def test_default_plan_is_one_device_and_has_no_problem() -> None:
    assert Plan().num_ranks == 1
    assert Plan().check(num_ranks=1, batch=1) == []


def test_axes_are_ordered_from_the_outermost() -> None:
    plan = Plan(pipeline=2, replicate=3, shard=5, context=7, tensor=11)
    assert list(plan.axes.items()) == [("pipeline", 2), ("replicate", 3), ("shard", 5), ("context", 7), ("tensor", 11)]
    assert plan.num_ranks == 2 * 3 * 5 * 7 * 11
    assert plan.data_parallel == 15


@given(PLANS)
def test_toml_and_pickle_give_the_plan_back(plan: Plan) -> None:
    assert Plan.from_toml(plan.to_toml()) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(Plan.from_toml(plan.to_toml())) == hash(plan)


@given(PLANS)
def test_every_problem_has_a_key_a_reason_and_a_mend(plan: Plan) -> None:
    for problem in plan.check(num_ranks=4, batch=8):
        assert problem.key.startswith("plan")
        assert problem.reason
        assert problem.mend
        assert "\n" not in str(problem)


def test_from_toml_leaves_other_tables_alone_and_needs_its_own() -> None:
    assert Plan.from_toml("[model]\nlayers = 3\n[plan]\nreplicate = 2\n") == Plan(replicate=2)
    with pytest.raises(PlanError, match=r"no \[plan\] table"):
        Plan.from_toml("replicate = 2")
    with pytest.raises(PlanError, match="not TOML"):
        Plan.from_toml("[plan")


def test_diff_names_what_differs() -> None:
    assert Plan(replicate=2).diff(Plan(zero=1)) == {"replicate": (2, 1), "zero": (0, 1)}
    assert Plan(replicate=2).diff(Plan(replicate=2)) == {}


def test_replace_validates() -> None:
    plan = Plan(replicate=2).replace(shard=3)
    assert plan == Plan(replicate=2, shard=3)
    with pytest.raises(PlanError, match=r"plan\.shard: 0 is not possible; give at least 1"):
        plan.replace(shard=0)


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Plan().replicate = 2


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"tenser": 2}, "plan.tenser: no such key; did you mean plan.tensor?"),
        ({"replicate": 0}, "plan.replicate: 0 is not possible; give at least 1"),
        ({"replicate": True}, "plan.replicate: true is not possible; give a whole number"),
        ({"replicate": "2"}, "plan.replicate: '2' is not possible; give a whole number"),
        ({"replicate": 2.0}, "plan.replicate: 2.0 is not possible; give a whole number"),
        ({"zero": 4}, "plan.zero: 4 is not possible; give at most 3"),
        ({"sequence": 1}, "plan.sequence: 1 is not possible; give true or false"),
        (
            {"precision": "float32"},
            "plan.precision: 'float32' is not known; choose one of fp64, fp32, bf16, bf16-pure, fp16, fp8",
        ),
        (
            {"context_method": "rings"},
            "plan.context_method: 'rings' is not known; did you mean ring? choose one of ring, ulysses",
        ),
        (
            {"offload": "cpu"},
            "plan.offload: 'cpu' is not possible; set what is in it: plan.offload.optimizer, plan.offload.master, "
            "plan.offload.parameters, plan.offload.gradients, plan.offload.activations",
        ),
        (
            {"offload": {"optimiser": "cpu"}},
            "plan.offload.optimiser: no such key; did you mean plan.offload.optimizer?",
        ),
        (
            {"offload": {"optimizer": "disk:"}},
            "plan.offload.optimizer: 'disk:' is not a place; choose cpu, or disk:FOLDER such as disk:/scratch/state",
        ),
    ],
)
def test_a_wrong_value_is_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**values)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("schedule", "1f1"),
        ("schedule", "mine.txt"),
        ("schedule", ".csv"),
        ("cut", "equal"),
        ("cut", []),
        ("cut", [1, -1]),
        ("cut", [1, True]),
        ("averaging", "local"),
        ("averaging", "local:0"),
        ("averaging", "never"),
        ("recompute", 1.5),
        ("recompute", -0.1),
        ("recompute", True),
        ("recompute", float("nan")),
        ("recompute", "half"),
        ("compress_gradients", "powersgd"),
        ("compress_gradients", "powersgd:0"),
        ("compress_gradients", "topk:0"),
        ("compress_gradients", "topk:1.5"),
        ("compress_gradients", "topk:x"),
    ],
)
def test_a_value_outside_its_grammar_is_refused_with_the_choices(key: str, wrong: object) -> None:
    with pytest.raises(PlanError, match=rf"plan\.{key}: .*; .*choose") as caught:
        Plan(**{key: wrong})
    assert len(caught.value.problems) == 1


def test_an_unknown_schedule_suggests_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"did you mean interleaved\?"):
        Plan(schedule="interleave")


def test_all_wrong_values_are_reported_together() -> None:
    with pytest.raises(PlanError) as caught:
        Plan(tenser=2, replicate=0, precision="fp31")
    assert {problem.key for problem in caught.value.problems} == {"plan.tenser", "plan.replicate", "plan.precision"}
    assert len(str(caught.value).splitlines()) == 3


def test_an_error_survives_pickling() -> None:
    error = PlanError([Problem("plan.zero", "reason", "mend")])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is PlanError
    assert copy.problems == error.problems
    assert str(copy) == str(error)


def test_require_raises_every_problem() -> None:
    with pytest.raises(PlanError) as caught:
        Plan(chunks=2, vertical_sync=True).require(num_ranks=3)
    assert len(caught.value.problems) == 3
    Plan().require(num_ranks=1)


def test_rules_change_nothing() -> None:
    plan = Plan(zero=1, pipeline=2, chunks=3)
    before = plan.model_dump()
    plan.check(num_ranks=3, batch=1)
    assert plan.model_dump() == before
