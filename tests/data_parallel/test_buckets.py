"""Flat buckets: which parameters lie together, and which rank has which part of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.optimizers import SGD, AdamW
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from tests import user_models
from tests.pool import run_ranks

SHAPES = {"a": (3, 4), "b": (4,), "c": (2, 5), "d": (), "e": (0, 3), "f": (7,)}


class Shapes(nn.Module):
    """Parameters of all kinds of shapes; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.stack([p.sum() for name, p in self.named_parameters() if name != "f"]).sum()
        return x * total


def spread(plan: dict[str, Any], **settings: Any) -> Parallel:
    return parallelize(
        Shapes(),
        Plan(**plan),
        **{"loss": user_models.squares, "optimizer": AdamW(), "bucket_bytes": 1 << 20, **settings},
    )


def names(parallel: Parallel) -> list[list[str]]:
    return [[entry.name for entry in bucket.entries] for bucket in parallel.chunks[0].buckets.buckets]


def test_the_last_parameters_come_first_and_those_treated_alike_side_by_side() -> None:
    assert [sorted(bucket) for bucket in names(spread({}))] == [list("abcdef")]
    (bucket,) = names(spread({}))
    assert [set(bucket[:3]), set(bucket[3:])] == [set("ace"), set("bdf")]  # with weight decay, and without
    # A bucket is closed once it is large enough, backward fills the first one first.
    assert [sorted(bucket) for bucket in names(spread({}, bucket_bytes=44))] == [list("cdef"), list("ab")]
    assert [sorted(bucket) for bucket in names(spread({}, bucket_bytes=4))][-1] == ["a"]


@pytest.mark.parametrize("bucket_bytes", [1, 44, 1 << 20])
def test_views_cover_a_bucket_without_gaps(bucket_bytes: int) -> None:
    for bucket in spread({}, bucket_bytes=bucket_bytes).chunks[0].buckets.buckets:
        flat = torch.arange(bucket.numel)
        seen = torch.cat([bucket.view(flat, entry).reshape(-1) for entry in bucket.entries])
        assert torch.equal(seen, flat[: bucket.used])
        assert all(bucket.view(flat, entry).shape == SHAPES[entry.name] for entry in bucket.entries)


def divided(stage: int) -> list[tuple[int, int, int, int]]:
    """By bucket: where this rank's part begins and ends, elements of parameters in all, and elements it updates."""
    parallel = spread({"shard": 3, "zero": stage}, bucket_bytes=44)
    found = []
    for bucket in parallel.chunks[0].buckets.buckets:
        assert bucket.own.numel() == bucket.own_gradient.numel() == bucket.stop - bucket.start
        updated = sum(fragment.stop - fragment.start for fragment in bucket.fragments)
        assert sum(moment.numel() for fragment in bucket.fragments for moment in fragment.state.values()) == 2 * updated
        found.append((bucket.start, bucket.stop, bucket.used, updated))
    parallel.step((torch.ones(2, 1), torch.zeros(2, 1)))
    bits = {name: tuple(value.flatten().tolist()) for name, value in parallel.full_parameters().items()}
    assert len({bits[name][0] for name in "ac"}) == 1  # equal gradients, equal updates, whoever made them
    assert bits["f"] == (1.0,) * 7  # unused: its gradient is zero, and it has no decay
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_element_is_updated_by_one_rank(stage: int) -> None:
    for ranks in zip(*run_ranks(divided, 3, stage), strict=True):
        assert [start for start, *_ in ranks] == [0, *(stop for _, stop, *_ in ranks[:-1])]
        assert len({stop - start for start, stop, *_ in ranks}) == 1
        assert sum(updated for *_, updated in ranks) == ranks[0][2]


class Nothing(nn.Module):
    """Without a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_model_without_parameters_has_no_buckets_and_steps() -> None:
    parallel = parallelize(Nothing(), Plan(), loss=user_models.squares, optimizer=SGD(lr=0.1), clip=1.0)
    metrics = parallel.step((torch.ones(2, 1), torch.ones(2, 1)))
    assert parallel.chunks[0].buckets.buckets == []
    assert metrics.loss == 1.0
    assert metrics.gradient_norm == 0.0
