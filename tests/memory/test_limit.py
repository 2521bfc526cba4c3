"""A limit in bytes of what a rank keeps for backward, against the memory that tensors take while it trains."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import SGD
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.plan_values import bytes_of
from tests.pool import run_ranks

LENGTH, HIDDEN = 64, 64


class Living(TorchDispatchMode):
    """Sees every tensor that operations make, and knows which memory is still somebody's."""

    def __init__(self, beside: set[int]) -> None:
        super().__init__()
        self.beside = beside
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.beside:
                storage = tensor.untyped_storage()
                self.found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return values

    @property
    def num_bytes(self) -> int:
        self.found = {key: found for key, found in self.found.items() if not found[0].expired()}
        return sum(size for _, size in self.found.values())


def make(how: str, plan: dict[str, Any]) -> tuple[Parallel, Any]:
    config = ModelConfig(family="gpt2", layers=4, hidden=HIDDEN, heads=4, sequence=LENGTH, tied=False)
    full = Plan(recompute=how, **plan)
    parallel = parallelize(build(config, 8), full, optimizer=SGD(lr=0.1))
    tokens = torch.arange(2 * full.microbatches * full.data_parallel * LENGTH).view(-1, LENGTH) % 8
    return parallel, parallel.share(({"tokens": tokens}, tokens))


def held(how: str, plan: dict[str, Any]) -> tuple[int, int, int]:
    """The most bytes alive behind a forward of the third step, beside parameters; what blocks keep of them by the
    report; and what they would keep if nothing was computed again."""
    parallel, batch = make(how, plan)
    for _ in range(2):
        parallel.step(batch)
    report = parallel.recomputed
    assert report is not None
    living = Living({p.untyped_storage().data_ptr() for p in parallel.model.parameters()})
    seen: list[int] = []
    for chunk in parallel.chunks:
        chunk.module.register_forward_hook(lambda *_: seen.append(living.num_bytes))
    with living:
        parallel.step(batch)
    parallel.close()
    return max(seen), report.kept_bytes, report.without_bytes


PIPELINE: dict[str, Any] = {"pipeline": 2, "microbatches": 4}


@pytest.mark.parametrize(
    ("how", "plan"),
    [
        ("700KiB", {}),
        ("3MiB", {}),
        ("300KiB", {"precision": "bf16"}),
        ("300KiB", {"tensor": 2, "sequence": True}),
        ("700KiB", {**PIPELINE, "schedule": "1f1b"}),
        ("1.2MiB", {**PIPELINE, "schedule": "1f1b"}),
        ("700KiB", {**PIPELINE, "schedule": "interleaved", "chunks": 2}),
        ("700KiB", {**PIPELINE, "schedule": "zbv", "chunks": 2}),
    ],
    ids=str,
)
def test_a_limit_in_bytes_is_kept_over_all_microbatches_in_flight(how: str, plan: dict[str, Any]) -> None:
    limit, ranks = bytes_of(how), Plan(**plan).num_ranks
    assert limit is not None
    pairs = zip(run_ranks(held, ranks, how, plan), run_ranks(held, ranks, "full", plan), strict=True)
    for (most, kept, without), (least, inputs, _) in pairs:
        outside = least - inputs  # embeddings, the head, what is on its way: no choice of blocks
        assert most - outside <= kept <= limit
        # And the room is used, up to the parts of one block.
        assert kept >= 0.8 * min(limit, without)


def test_of_one_schedule_every_byte_is_counted() -> None:
    for plan in ({}, PIPELINE):
        ranks = Plan(**plan).num_ranks
        (most, kept, _), (least, inputs, _) = (run_ranks(held, ranks, how, plan)[0] for how in ("700KiB", "full"))
        assert most - least == kept - inputs


def told(how: str, plan: dict[str, Any]) -> str:
    parallel, batch = make(how, plan)
    try:
        for _ in range(3):
            parallel.step(batch)
    except ValueError as error:
        return str(error)
    finally:
        parallel.close()
    return ""


def test_a_limit_that_is_too_small_is_refused_on_every_rank_with_the_least_that_would_do() -> None:
    # Two blocks of the first stage with two microbatches in flight; of the last stage's one.
    least = 2 * 2 * (2 * LENGTH * HIDDEN * 4)
    expected = (
        'plan.recompute = "100KiB": even with every block computed again, their inputs take more on a rank; '
        f'set it to "{least // 1024}KiB" or more, or plan.microbatches higher, whose inputs are smaller'
    )
    assert run_ranks(told, 2, "100KiB", PIPELINE) == [expected] * 2
    assert run_ranks(told, 2, f"{least // 1024}KiB", PIPELINE) == [""] * 2
