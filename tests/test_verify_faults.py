"""The oracle's own ability to fail: bugs are planted, and it must notice and name the parameter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise.loss import Loss
from shardwise.optimizers import SGD, AdamW
from shardwise.parallel import Parallel
from shardwise.plan import Plan
from shardwise.verify import Report, verify
from tests.pool import run_ranks
from tests.small_models import build, make_batches


def first_bucket_is_not_summed(parallel: Parallel) -> None:
    bucket = parallel.chunks[0].buckets.buckets[0]
    bucket.reducer = bucket.reducer.alone()


def the_count_is_one_too_large(parallel: Parallel) -> None:
    count = parallel._loss.count
    parallel._loss = Loss(parallel._loss.sum, lambda targets: count(targets) + 1)


def the_last_ranks_weights_are_off(parallel: Parallel) -> None:
    if parallel.mesh.rank == parallel.mesh.num_ranks - 1:
        (entry,) = [entry for _, entry in parallel.chunks[0].buckets if entry.name == "blocks.4.up.weight"]
        entry.value.view(-1)[0] += 1e-6


def one_rank_clips_otherwise(parallel: Parallel) -> None:
    if parallel.mesh.rank == 1:
        parallel._updates.clip = 0.0499999


def the_last_rank_loses_an_update(parallel: Parallel) -> None:
    if parallel.mesh.rank == parallel.mesh.num_ranks - 1:
        parallel.chunks[0].buckets.update = lambda *given, **named: None  # type: ignore[method-assign]


def the_first_stage_is_one_version_behind(parallel: Parallel) -> None:
    chunk = parallel.chunks[0]
    look_up = chunk._version_of
    assert look_up is not None
    if parallel.mesh.rank == 0:
        chunk._version_of = lambda microbatch: max(0, look_up(microbatch) - 1)


def the_first_stage_uses_its_newest_version(parallel: Parallel) -> None:
    chunk = parallel.chunks[0]
    bind = chunk._bind
    chunk._bind = lambda number: bind(max(chunk._versions))  # type: ignore[method-assign]


def ties_are_not_summed(parallel: Parallel) -> None:
    for buckets in parallel._assembly.shared:
        for bucket in buckets.buckets:
            bucket.further = ()


def steps_are_counted_from_two(parallel: Parallel) -> None:
    parallel.step_count += 1


def a_microbatch_is_forgotten(parallel: Parallel) -> None:
    """Gradients of the first microbatch are lost on the first stage, as when accumulation begins anew with each."""
    chunk = parallel.chunks[0]
    end = chunk.end_backward

    def forget(half: Any) -> None:
        end(half)
        if half.microbatch == 0:
            chunk.buckets.begin()

    chunk.end_backward = forget  # type: ignore[method-assign]


FAULTS: list[tuple[Callable[[Parallel], None], dict[str, Any], str, set[str]]] = [
    (first_bucket_is_not_summed, {"replicate": 2}, "gradient", {"head.output.weight"}),
    (first_bucket_is_not_summed, {"shard": 2, "zero": 2}, "gradient", {"head.output.weight"}),
    (first_bucket_is_not_summed, {"pipeline": 2, "replicate": 2}, "gradient", set()),
    (the_count_is_one_too_large, {"microbatches": 2}, "gradient", {"embedding.tokens.weight"}),
    (the_count_is_one_too_large, {"pipeline": 2, "microbatches": 3}, "gradient", {"embedding.tokens.weight"}),
    (the_last_ranks_weights_are_off, {"replicate": 2}, "gradient", set()),
    (the_last_ranks_weights_are_off, {"pipeline": 2}, "gradient", set()),
    (one_rank_clips_otherwise, {"replicate": 2}, "replicas", set()),
    (the_last_rank_loses_an_update, {"replicate": 2}, "replicas", set()),
    (the_last_rank_loses_an_update, {"pipeline": 2}, "parameter", set()),
    (
        the_first_stage_is_one_version_behind,
        {"pipeline": 3, "schedule": "pipedream", "microbatches": 3},
        "gradient",
        set(),
    ),
    (
        the_first_stage_uses_its_newest_version,
        {"pipeline": 2, "schedule": "pipedream-2bw", "microbatches": 3},
        "gradient",
        set(),
    ),
    (ties_are_not_summed, {"pipeline": 2, "microbatches": 2}, "gradient", {"embedding.tokens.weight"}),
    (steps_are_counted_from_two, {"replicate": 2}, "parameter", {"embedding.tokens.weight"}),
    (a_microbatch_is_forgotten, {"pipeline": 2, "microbatches": 3, "schedule": "gpipe"}, "gradient", set()),
]


def planted(number: int) -> tuple[Report, list[str]]:
    """The report, and the names of the first bucket's parameters on this rank."""
    fault, plan, _, _ = FAULTS[number]
    names: list[str] = []

    def plant(parallel: Parallel) -> None:
        names.extend(entry.name for entry in parallel.chunks[0].buckets.buckets[0].entries)
        fault(parallel)

    tied = fault is ties_are_not_summed
    report = verify(
        build({"tied": tied}),
        Plan(precision="fp64", **plan),
        make_batches(3, 8, 4),
        optimizer=AdamW(lr=0.01) if "schedule" not in plan else SGD(lr=0.1),
        clip=0.05 if fault is one_rank_clips_otherwise else None,
        bucket_bytes=1,
        sabotage=plant,
    )
    return report, names


@pytest.mark.parametrize(
    "number", range(len(FAULTS)), ids=lambda number: f"{FAULTS[number][0].__name__} {FAULTS[number][1]}"
)
def test_a_planted_bug_makes_it_fail_and_name_a_parameter(number: int) -> None:
    fault, plan, kind, expected = FAULTS[number]
    results = run_ranks(planted, Plan(**plan).num_ranks, number)
    report, names = results[0]
    assert not report.agrees
    assert all(other == report for other, _ in results)  # every rank says the same
    wrong = [d for d in report.differences if not d.error <= report.tolerance and d.name]
    assert wrong[0].kind == kind, report.describe()
    assert repr(wrong[0].name) in report.describe()
    if fault is first_bucket_is_not_summed:  # that bucket's parameters alone differ in the first step
        first = {d.name for d in wrong if d.step == 0 and d.kind == "gradient"}
        assert first <= {name for _, of_rank in results for name in of_rank}
        assert first & set(names)
    if expected:
        assert wrong[0].name in expected


def test_without_a_planted_bug_it_agrees() -> None:
    plans = {str(plan): plan for _, plan, _, _ in FAULTS}
    for plan in plans.values():
        report = run_ranks(clean, Plan(**plan).num_ranks, plan)[0]
        assert report.agrees, (plan, report.describe())


def clean(plan: dict[str, Any]) -> Report:
    return verify(
        build({}), Plan(precision="fp64", **plan), make_batches(3, 8, 4), optimizer=SGD(lr=0.1), bucket_bytes=1
    )


def test_the_fault_of_the_smallest_size_is_noticed() -> None:
    """A weight off by one part in ten million, which no loss curve would show."""
    (number,) = [
        n
        for n, (fault, plan, *_) in enumerate(FAULTS)
        if fault is the_last_ranks_weights_are_off and "replicate" in plan
    ]
    report, _ = run_ranks(planted, 2, number)[0]
    largest = max(d.error for d in report.differences if d.step == 0 and torch.isfinite(torch.tensor(d.error)))
    assert 1e-9 < largest < 1e-4
