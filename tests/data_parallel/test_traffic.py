"""What a step moves: elements, counted where they are sent, and how often parameters are gathered."""

from typing import Any
from unittest.mock import patch

import pytest

from shardwise.data_parallel import units
from shardwise.data_parallel.reducer import Reducer
from shardwise.optimizers import AdamW
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from tests.pool import apart, run_ranks
from tests.small_models import build, make_batches

BLOCKS = 4
PARTS = BLOCKS + 2  # the embedding and the head are units too


def traffic(plan: dict[str, Any], own_machines: bool, kept_bytes: int) -> tuple[float, int, int, int, list[float]]:
    """Of a step on this rank: elements it moves, gathers, then elements of all buckets with their padding, of the last
    unit's, and the losses."""
    with patch.object(units, "KEPT_BYTES", kept_bytes), apart(own_machines):
        parallel = parallelize(
            build({"num_blocks": BLOCKS}), Plan(**plan), optimizer=AdamW(lr=1e-2), clip=1.0, bucket_bytes=600
        )
    reducer: Reducer = parallel._assembly.reducer
    losses = []
    for batch in make_batches(3, 16, 4):
        before = reducer.elements, reducer.gathers
        losses.append(parallel.step(parallel.share(batch)).loss)
    elements, gathers = reducer.elements - before[0], reducer.gathers - before[1]
    buckets = [bucket for chunk in parallel.chunks for bucket in chunk.buckets.buckets]
    assert not any(bucket.there or bucket.users for bucket in buckets)  # nothing is gathered between steps
    last = max(bucket.unit for bucket in buckets)
    found = sum(bucket.numel for bucket in buckets), sum(bucket.numel for bucket in buckets if bucket.unit == last)
    parallel.close()
    return elements, gathers, *found, losses


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 3)])
def test_a_step_moves_2_psi_and_at_stage_3_3_psi(stage: int, ranks: int) -> None:
    """The paper's volumes, less the unit that backward begins with; in shared memory parameters do not move."""
    plan = {"shard": ranks, "zero": stage}
    for own_machines in (True, False):
        for elements, gathers, psi, last, _ in run_ranks(traffic, ranks, plan, own_machines, 0):
            whole = (2, 2, 2, 3)[stage] * psi - (last if stage == 3 else 0)
            if not own_machines and stage:
                whole = psi
            assert elements == pytest.approx(whole * (ranks - 1) / ranks)
            assert gathers == (2 * PARTS - 1 if stage == 3 and own_machines else 0)


def test_hybrid_sharding_sums_a_fragment_once_more_between_the_copies() -> None:
    for elements, _, psi, last, _ in run_ranks(traffic, 4, {"shard": 2, "replicate": 2, "zero": 3}, True, 0):
        assert elements == pytest.approx((3 * psi - last) / 2 + 2 * (psi / 2) / 2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_a_step_gathers_once_where_memory_allows_whatever_its_microbatches(schedule: str) -> None:
    plan = {"shard": 2, "zero": 3, "pipeline": 2, "microbatches": 4, "schedule": schedule}
    plan["chunks"] = 2 if schedule == "interleaved" else 1
    kept = run_ranks(traffic, 4, plan, True, 64 << 20)
    short = run_ranks(traffic, 4, plan, True, 0)
    assert sum(gathers for _, gathers, *_ in kept) == 2 * PARTS  # by two ranks of each stage
    # Else every pass gathers its chunk's units, but for the one that is kept for the backward.
    assert sum(gathers for _, gathers, *_ in short) > 4 * 2 * PARTS
    assert kept[0][-1] == pytest.approx(short[0][-1], rel=1e-5)


def test_what_does_not_fit_is_gathered_again_and_the_rest_is_not() -> None:
    plan = {"shard": 2, "zero": 3, "microbatches": 3}
    counts = [run_ranks(traffic, 2, plan, True, kept)[0][1] for kept in (0, 1200, 64 << 20)]
    assert counts[0] > counts[1] > counts[2] == PARTS
