"""The sizes of the axes fit the ranks, the batch and each other."""

from __future__ import annotations

import pytest

from shardwise.plan import Plan
from tests.plan_rules.objections import keys


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
        need = int(problem.mend.split("raise data.batch to ")[1].split()[0].rstrip(","))
        assert plan.check(batch=need) == []
        assert plan.check(batch=need - 1) != []


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
