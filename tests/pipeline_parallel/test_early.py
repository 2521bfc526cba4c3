"""Backwards in two halves, so that the other rank has its gradient earlier."""

import pytest

from shardwise.pipeline_parallel.schedule import Kind, build, check, hand_on_early, unroll
from shardwise.pipeline_parallel.simulator import simulate

NAMES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2), ("pipedream", 1)]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(("name", "chunks"), [*NAMES, ("pipedream-2bw", 1)])
def test_valid_and_never_slower(name: str, chunks: int, stages: int) -> None:
    schedule = build(name, stages, 8, chunks)
    early = hand_on_early(schedule)
    report, before = check(early), check(schedule)
    assert report.peak_activations == before.peak_activations
    assert report.peak_versions == before.peak_versions
    assert simulate(early).makespan <= simulate(schedule).makespan
    if schedule.rounds is not None:
        check(unroll(early, 3))


def test_only_what_another_rank_waits_for() -> None:
    schedule = hand_on_early(build("dualpipev", 2, 4, 2))
    for rank, row in enumerate(schedule.rows):
        for action in row:
            stage = schedule.stage(rank, action.chunk)
            waited_for = stage > 0 and schedule.owner(stage - 1)[0] != rank
            assert not (action.kind is Kind.BW and waited_for), (rank, action)


def test_the_bubble_of_1f1b_loses_its_weight_half() -> None:
    for stages in (2, 4):
        schedule = build("1f1b", stages, 8)
        saved = simulate(schedule).makespan - simulate(hand_on_early(schedule)).makespan
        assert saved == stages - 1  # one W a rank that waits
