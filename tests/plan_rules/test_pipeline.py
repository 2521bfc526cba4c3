"""The schedule fits the plan, and the stages fit the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from shardwise.models.config import ModelConfig
from shardwise.pipeline_parallel import schedule as schedules
from shardwise.plan import Plan
from tests.plan_rules.objections import keys


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
    problems = plan.check(model=ModelConfig(tied=True))
    assert [problem.key for problem in problems] == (["plan.schedule"] if asynchronous else [])
    assert keys(plan, model=ModelConfig(tied=False)) == set()


def test_vertical_sync_is_pipedreams() -> None:
    assert keys(Plan(pipeline=2, vertical_sync=True)) == {"plan.vertical_sync"}
    assert keys(Plan(pipeline=2, schedule="pipedream", vertical_sync=True)) == set()


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
