"""A chunk's weight versions: how many memories they take, and what is left when nothing is in flight."""

from typing import Any

import pytest
import torch

from shardwise.optimizers import SGD
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from tests import user_models
from tests.pool import run_ranks


def stored(plan: dict[str, Any]) -> tuple[int, int]:
    """Bytes of this rank's weight versions beside the newest while they are in use, and of the newest."""
    parallel = parallelize(
        user_models.make("linears"), Plan(**plan), loss=user_models.squares, optimizer=SGD(lr=0.01), bucket_bytes=1
    )
    (batch,) = user_models.batches(1, 2 * plan["microbatches"])
    for _ in range(5):
        parallel.step(parallel.share(batch))
    (chunk,) = parallel.chunks
    found = chunk.version_bytes, sum(bucket.memory()["parameters"] for bucket in chunk.buckets.buckets)
    parallel.drain()
    parallel.close()
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_version_takes_what_zero_leaves_of_the_parameters(zero: int) -> None:
    """At stage 3 versions are fragments as well."""
    plan = {"pipeline": 2, "shard": 2, "zero": zero, "schedule": "pipedream", "microbatches": 2}
    everyone = run_ranks(stored, 4, plan)
    for rank, (beside, newest) in enumerate(everyone):
        assert beside == (newest if rank < 2 else 0)
    if zero == 3:
        whole = run_ranks(stored, 4, plan | {"zero": 2})
        assert all(0.5 <= part[1] / all_[1] < 0.6 for part, all_ in zip(everyone, whole, strict=True))


def memories(plan: dict[str, Any], steps: int) -> tuple[int, int, list[bool]]:
    """How many places the weights of this rank's stage are seen at in all forwards, and what is true after a drain."""
    model = user_models.make("linears")
    parallel = parallelize(model, Plan(**plan), loss=user_models.squares, optimizer=SGD(lr=0.01))
    (chunk,) = parallel.chunks
    linear = next(module for module in chunk.module.modules() if isinstance(module, torch.nn.Linear))
    seen: set[int] = set()
    linear.register_forward_pre_hook(lambda module, given: seen.add(linear.weight.data_ptr()))
    (batch,) = user_models.batches(1, plan["microbatches"])
    parallel.step(batch)
    for _ in range(steps):
        parallel.step(batch)
    parallel.drain()
    facts = [
        chunk.num_versions == 1,
        chunk.current == 0,
        # The module and the state look at the same memory.
        linear.weight.untyped_storage().data_ptr()
        in {bucket.values.untyped_storage().data_ptr() for bucket, _ in parallel._state.entries()},
    ]
    before = len(seen)
    for _ in range(2):
        parallel.step(batch)
    parallel.drain()
    return before, len(seen) - before, facts


@pytest.mark.parametrize(
    ("schedule", "p", "m", "expected"),
    [("pipedream", 3, 2, [3, 2, 1]), ("pipedream-2bw", 2, 3, [2, 2]), ("1f1b", 2, 2, [1, 1]), ("pipedream", 1, 2, [1])],
)
def test_weights_take_as_many_memories_as_there_are_versions_however_long_it_runs(
    schedule: str, p: int, m: int, expected: list[int]
) -> None:
    plan = {"pipeline": p, "schedule": schedule, "microbatches": m}
    found = run_ranks(memories, p, plan, 8)
    assert [places for places, _, _ in found] == expected
    assert [more for _, more, _ in found] == [0] * p  # after a drain it begins in the memory it has
    assert all(all(facts) for _, _, facts in found), found


def drained() -> list[bool]:
    parallel = parallelize(
        user_models.make("linears"),
        Plan(pipeline=2, schedule="pipedream", microbatches=2),
        loss=user_models.squares,
        optimizer=SGD(lr=0.01, momentum=0.9),
    )
    (batch,) = user_models.batches(1, 2)
    parallel.drain()  # nothing to do
    parallel.step(batch)
    parallel.step(batch)
    parallel.drain()
    first = parallel.full_parameters()
    parallel.drain()
    again = parallel.full_parameters()
    # In-place loading into what the state dictionary gives reaches the weights that the next forward uses.
    state = parallel.state_dict()
    own = [name for name in state if name.startswith("model/")]
    with torch.no_grad():
        for name in own:
            state[name].zero_()
    parallel.loaded()
    loss = parallel.step(batch, lr=0.0).loss
    parallel.drain()
    return [
        all(torch.equal(first[name], value) for name, value in again.items()),
        abs(loss - float(batch[1].square().sum() / 2)) < 1e-4,  # all outputs are zero
        int(parallel.step_count) == 6,
    ]


def test_draining_twice_and_loading_in_place() -> None:
    assert run_ranks(drained, 2) == [[True] * 3] * 2
