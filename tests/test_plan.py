"""A plan is data: what it accepts, refuses and says."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise import plan_rules
from shardwise.models.config import ModelConfig
from shardwise.pipeline_parallel import schedule as schedules
from shardwise.plan import Plan, PlanError
from shardwise.plan_rules import BUILT
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


def keys(plan: Plan, **job: Any) -> set[str]:
    """The keys that `check` objects to, other than for being unbuilt."""
    return {problem.key for problem in plan.check(**job) if "not built yet" not in problem.reason}


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
        ({"offload": "cpu"}, "plan.offload: 'cpu' is not possible; give a table"),
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
    monkeypatch.setattr(plan_rules, "BUILT", {key: default})
    (problem,) = Plan(**{key: value}, **beside).check()
    assert problem.key.startswith(f"plan.{key}")
    assert problem.reason.endswith("is not built yet")

    kinds: tuple[object, ...] = (value.partition(":")[0],) if isinstance(value, str) else (value,)
    monkeypatch.setattr(plan_rules, "BUILT", {key: tuple(value) if isinstance(value, dict) else kinds})
    assert Plan(**{key: value}, **beside).check() == []


def test_every_key_of_the_table_is_a_key_of_the_plan_and_its_default_is_built() -> None:
    assert BUILT.keys() <= Plan.model_fields.keys()
    assert Plan().check() == []


@pytest.mark.parametrize(
    "plan", [Plan(replicate=2, shard=3), Plan(precision="fp64"), Plan(pipeline=3), Plan(tensor=4, sequence=True)]
)
def test_what_is_built_is_accepted(plan: Plan) -> None:
    assert plan.check(num_ranks=plan.num_ranks, batch=6) == []


@pytest.mark.parametrize("schedule", schedules.FAMILIES)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_chunks_follow_the_schedule(schedule: str, chunks: int) -> None:
    right = {"interleaved": chunks >= 2, "zbv": chunks == 2, "dualpipev": chunks == 2}.get(schedule, chunks == 1)
    plan = Plan(pipeline=2, schedule=schedule, chunks=chunks, microbatches=4)
    assert keys(plan) == (set() if right else {"plan.chunks"})


def test_a_mend_for_chunks_works() -> None:
    (problem,) = Plan(pipeline=2, schedule="zbv", microbatches=2).check()
    assert str(problem).startswith("plan.chunks: zbv has 2 model chunks per rank, not 1; set it to 2, or plan.schedule")
    assert Plan(pipeline=2, schedule="zbv", microbatches=2, chunks=2).check() == []


def test_a_schedule_file_must_exist(tmp_path: Path) -> None:
    assert keys(Plan(pipeline=2, schedule=str(tmp_path / "mine.csv"))) == {"plan.schedule"}


def test_two_weight_versions_need_a_microbatch_for_each_stage() -> None:
    assert keys(Plan(pipeline=4, schedule="pipedream-2bw", microbatches=3)) == {"plan.microbatches"}
    assert keys(Plan(pipeline=4, schedule="pipedream-2bw", microbatches=4)) == set()
    assert keys(Plan(pipeline=4, schedule="1f1b", microbatches=1)) == set()


def test_a_schedule_file_has_the_numbers_of_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    schedules.save(schedules.build("interleaved", 2, 4, 3), path)
    right = {"pipeline": 2, "schedule": str(path), "chunks": 3, "microbatches": 4}
    assert keys(Plan(**right)) == set()
    for key in ("pipeline", "chunks", "microbatches"):
        (problem,) = Plan(**{**right, key: 1}).check()
        assert problem.key == "plan.schedule"
        assert problem.reason.startswith(f"{path} is a schedule for {right[key]} ")
    path.write_text("F0, F1\n")
    (problem,) = Plan(**right).check()
    assert problem.reason.startswith(f"{path}: ")


@pytest.mark.parametrize("schedule", schedules.FAMILIES)
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
def test_a_plan_is_refused_exactly_when_its_schedule_does_not_exist(
    schedule: str, chunks: int, microbatches: int
) -> None:
    refused = keys(Plan(pipeline=3, schedule=schedule, chunks=chunks, microbatches=microbatches)) != set()
    if refused:
        with pytest.raises(ValueError, match=schedule):
            schedules.build(schedule, 3, microbatches, chunks)
    else:
        schedules.build(schedule, 3, microbatches, chunks)


@pytest.mark.parametrize("schedule", schedules.FAMILIES)
def test_an_asynchronous_schedule_does_not_share_a_parameter_between_stages(schedule: str) -> None:
    asynchronous = schedules.build(schedule, 2, 4, schedules.FAMILIES[schedule].least_chunks).asynchronous
    plan = Plan(pipeline=2, schedule=schedule, microbatches=4, chunks=schedules.FAMILIES[schedule].least_chunks)
    assert keys(plan, model=ModelConfig(tied=True)) == ({"plan.schedule"} if asynchronous else set())
    assert keys(plan, model=ModelConfig(tied=False)) == set()


def test_vertical_sync_is_pipedreams() -> None:
    assert keys(Plan(pipeline=2, vertical_sync=True)) == {"plan.vertical_sync"}
    assert keys(Plan(pipeline=2, schedule="pipedream", vertical_sync=True)) == set()


def test_the_number_of_ranks_must_be_the_plans() -> None:
    (problem,) = Plan(pipeline=2, replicate=2).check(num_ranks=8)
    assert str(problem) == (
        "plan: pipeline 2 x replicate 2 needs 4 ranks and there are 8; start 4, or set plan.replicate to 4"
    )
    (problem,) = Plan(pipeline=2).check(num_ranks=3)
    assert problem.mend == "start 2"
    (problem,) = Plan(pipeline=4).check(num_ranks=2)
    assert problem.mend == "start 4"


@pytest.mark.parametrize("replicate", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("batch", range(1, 17))
def test_a_batch_is_refused_exactly_when_some_part_would_be_empty(
    replicate: int, microbatches: int, batch: int
) -> None:
    plan = Plan(replicate=replicate, microbatches=microbatches)
    shares = [(rank + 1) * batch // replicate - rank * batch // replicate for rank in range(replicate)]
    problems = plan.check(batch=batch)
    assert bool(problems) == any(share < microbatches for share in shares)
    for problem in problems:
        need = int(problem.mend.split("raise data.batch to ")[1].split()[0])
        assert plan.check(batch=need) == []
        assert plan.check(batch=need - 1) != []


def test_zero_needs_ranks_to_divide_over() -> None:
    assert keys(Plan(replicate=2, zero=1)) == {"plan.zero"}
    assert keys(Plan(shard=2, zero=1)) == set()
    assert keys(Plan(context=2, zero=1)) == set()


def test_sequence_parallelism_needs_the_tensor_axis() -> None:
    assert keys(Plan(sequence=True)) == {"plan.sequence"}
    assert keys(Plan(sequence=True, tensor=2)) == set()


def test_experts_divide_the_data_and_context_ranks() -> None:
    assert keys(Plan(replicate=3, expert=2)) == {"plan.expert"}
    assert keys(Plan(replicate=2, shard=2, context=2, expert=8)) == set()
    assert keys(Plan(tensor=2, expert=2)) == {"plan.expert"}


def test_averaging_needs_copies() -> None:
    assert keys(Plan(shard=2, averaging="delayed")) == {"plan.averaging"}
    assert keys(Plan(replicate=2, averaging="delayed")) == set()


def test_compression_needs_something_to_compress() -> None:
    assert keys(Plan(pipeline=2, compress_gradients="int8")) == {"plan.compress_gradients"}
    assert keys(Plan(shard=2, compress_gradients="int8")) == set()
    assert keys(Plan(precision="bf16", compress_activations="fp16")) == {"plan.compress_activations"}
    assert keys(Plan(precision="fp32", compress_activations="fp16")) == set()


def test_master_weights_exist_only_in_low_precision() -> None:
    assert keys(Plan(offload={"master": "cpu"})) == {"plan.offload.master"}
    assert keys(Plan(precision="bf16", offload={"master": "cpu"})) == set()


def test_parameters_of_several_versions_stay_where_they_are() -> None:
    offload = {"parameters": "cpu"}
    problems = keys(Plan(shard=2, zero=3, schedule="pipedream", offload=offload))
    assert problems >= {"plan.offload.parameters"}
    assert Plan(pipeline=2, shard=2, zero=3, precision="fp16", schedule="pipedream").check() == []


def test_stages_are_no_more_than_the_blocks_of_a_sequential() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    assert keys(Plan(pipeline=3), model=model) == set()
    assert keys(Plan(pipeline=4), model=model) == {"plan.pipeline"}
    assert keys(Plan(pipeline=2, chunks=2, schedule="interleaved"), model=model) == {"plan.chunks"}


class Listed(nn.Module):
    stages = ("first", "blocks.*", "last")

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.last = nn.Linear(2, 2)


def test_blocks_of_a_module_that_lists_its_stages() -> None:
    assert keys(Plan(pipeline=3), model=Listed()) == set()
    assert keys(Plan(pipeline=5), model=Listed()) == set()
    assert keys(Plan(pipeline=6), model=Listed()) == {"plan.pipeline"}
    (problem,) = Plan(pipeline=6).check(model=Listed())
    assert problem.reason == "pipeline 6 makes 6 stages of a model with 5 parts, 3 of them blocks"


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


def test_a_module_that_cannot_be_cut_is_refused_only_where_it_would_be() -> None:
    assert keys(Plan(replicate=2), model=nn.Linear(2, 2)) == set()
    (problem,) = Plan(pipeline=2).check(model=nn.Linear(2, 2))
    assert problem.key == "plan.pipeline"
    assert "Linear does not say where it may be cut" in problem.reason


def test_a_listed_cut_fits_the_stages_and_the_model() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    assert keys(Plan(pipeline=2, cut=[1, 3]), model=model) == set()
    assert keys(Plan(pipeline=2, cut=[1, 2]), model=model) == {"plan.cut"}
    assert keys(Plan(pipeline=2, cut=[4]), model=model) == {"plan.cut"}
    assert keys(Plan(pipeline=2, cut=[0, 3]), model=Listed()) == set()
    assert keys(Plan(pipeline=3, cut=[2, 0, 1]), model=Listed()) == {"plan.cut"}
    assert keys(Plan(cut=[4])) == set()


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


def test_every_rule_is_in_force() -> None:
    rules = {
        value
        for name, value in vars(plan_rules).items()
        if getattr(value, "__annotations__", {}).get("return") == "Iterator[Problem]"
    }
    assert rules == set(plan_rules.RULES)
