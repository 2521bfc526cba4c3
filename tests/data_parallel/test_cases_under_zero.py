"""CASES.md 16 to 18 under every ZeRO stage."""

import pytest
import torch
from torch import Tensor

from shardwise.memory.precision import FIRST
from shardwise.optimizers import AdamW
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from tests.pool import run_ranks
from tests.small_models import build, make_batches


def begun(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Parameters before and after one step of AdamW, and its gradients."""
    plan = Plan(precision="fp64", **({"shard": 2, "zero": stage} if stage >= 0 else {}))
    optimizer = AdamW(lr=1e-3, weight_decay=0.0, eps=0.0)
    parallel = parallelize(build({"num_blocks": 4}), plan, optimizer=optimizer, bucket_bytes=600, seed=9)
    before = {name: value.clone() for name, value in parallel.full_parameters().items()}
    parallel.step(parallel.share(make_batches(1, 6, 4)[0]))
    found = before, parallel.full_parameters(), parallel.full_gradients()
    parallel.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_cases_16_and_18_the_same_start_and_a_first_step_as_long_as_the_learning_rate(stage: int) -> None:
    whole, _, _ = begun(-1)
    blocks = [value for name, value in whole.items() if name.startswith("blocks") and name.endswith("down.weight")]
    assert not any(torch.equal(one, other) for one, other in zip(blocks[:-1], blocks[1:], strict=True))
    for before, after, gradients in run_ranks(begun, 2, stage):
        assert all(torch.equal(value, before[name]) for name, value in whole.items())
        for name, gradient in gradients.items():
            moved = (after[name] - before[name])[gradient != 0]
            torch.testing.assert_close(moved, -1e-3 * gradient[gradient != 0].sign(), rtol=1e-6, atol=0)


def overflow(stage: int) -> list[tuple[bool, float | None, int, str | None, list[Tensor]]]:
    plan = Plan(shard=2, zero=stage, precision="fp16")
    parallel = parallelize(build({"num_blocks": 3}), plan, optimizer=AdamW(lr=1e-2), bucket_bytes=600)
    found = []
    for number, batch in enumerate(make_batches(3, 12, 4)):
        handle = None
        if number == 1 and parallel.data_rank == 1:
            handle = parallel.model.head.register_full_backward_hook(lambda *given: (given[1][0] * float("inf"),))
        metrics = parallel.step(parallel.share(batch))
        if handle is not None:
            handle.remove()
        values = [value.clone() for value in parallel.full_parameters().values()]
        found.append((metrics.skipped, metrics.loss_scale, int(parallel.step_count), parallel.replicas_agree(), values))
    parallel.close()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_case_17_one_rank_overflows_and_all_skip(stage: int) -> None:
    """The scale falls once, weights stay as they are, and the count of updates, which the schedule of the learning rate
    follows, does not advance."""
    for before, at, after in run_ranks(overflow, 2, stage):
        assert [step[:4] for step in (before, at, after)] == [
            (False, FIRST, 1, None),
            (True, FIRST / 2, 1, None),
            (False, FIRST / 2, 2, None),
        ]
        assert all(torch.equal(a, b) for a, b in zip(before[4], at[4], strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(at[4], after[4], strict=True))


def nonfinite(stage: int, clip: float | None) -> list[tuple[bool, int | None, str | None]]:
    plan = Plan(shard=2, zero=stage)
    parallel = parallelize(build({"num_blocks": 4}), plan, optimizer=AdamW(), clip=clip, bucket_bytes=600)
    found = []
    for number, batch in enumerate(make_batches(2, 12, 4)):
        handle = None
        if number == 0 and parallel.data_rank == 1:
            handle = parallel.model.blocks[2].register_full_backward_hook(
                lambda module, given, output: (given[0] * float("nan"), *given[1:])
            )
        metrics = parallel.step(parallel.share(batch), lr=0.0)
        found.append((metrics.skipped, metrics.faulty_rank, metrics.faulty_parameter))
        if handle is not None:
            handle.remove()
        if clip is None:
            break  # its moments are spoilt
    parallel.close()
    return found


@pytest.mark.parametrize("clip", [None, 1.0])
def test_gradients_that_are_not_finite_are_named_with_clipping_and_without(clip: float | None) -> None:
    for stage in (0, 2):
        for found in run_ranks(nonfinite, 2, stage, clip):
            # The loss is fine; everything before the third block has no finite gradient.
            assert found[0] == (clip is not None, None, "embedding.tokens.weight")
            assert found[1:] == [(False, None, None)] * len(found[1:])
