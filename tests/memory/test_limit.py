"""A limit in bytes of what a rank keeps for backward, against the memory that tensors take while it trains."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.chunk import ModelChunk
from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import SGD
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.pipeline_parallel.halves import Half
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

    def num_bytes(self, chunks: Sequence[ModelChunk]) -> int:
        """Of all but the chunks' gradients."""
        slots = [item.slot for chunk in chunks for _, item in chunk.buckets]
        gradients = {slot.view.untyped_storage()._cdata for slot in slots if slot.view is not None}
        self.found = {key: found for key, found in self.found.items() if not found[0].expired()}
        return sum(size for key, (_, size) in self.found.items() if key not in gradients)


def make(how: str, plan: dict[str, Any], layers: int = 4) -> tuple[Parallel, Any]:
    config = ModelConfig(family="gpt2", layers=layers, hidden=HIDDEN, heads=4, sequence=LENGTH, tied=False)
    full = Plan(recompute=how, **plan)
    parallel = parallelize(build(config, 8), full, optimizer=SGD(lr=0.1))
    tokens = torch.arange(2 * full.microbatches * full.data_parallel * LENGTH).view(-1, LENGTH) % 8
    return parallel, parallel.share(({"tokens": tokens}, tokens))


class Held(NamedTuple):
    """What a rank holds in a step beside parameters and gradients, behind each of its passes."""

    seen: list[int]  # bytes alive
    counted: list[int]  # of blocks, by the report
    kept: int  # at most, by the report
    without: int  # if nothing was computed again


def held(how: str, plan: dict[str, Any], layers: int = 4) -> Held:
    """What the third step holds."""
    parallel, batch = make(how, plan, layers)
    for _ in range(2):
        parallel.step(batch)
    report = parallel.recomputed
    assert report is not None
    living = Living({p.untyped_storage().data_ptr() for p in parallel.model.parameters()})
    found = Held([], [], report.kept_bytes, report.without_bytes)
    now: dict[int, int] = {}  # by chunk, what its blocks hold

    def passed(number: int, change: int) -> None:
        now[number] = now.get(number, 0) + change
        found.seen.append(living.num_bytes(parallel.chunks))
        found.counted.append(sum(now.values()))

    for number, chunk in enumerate(parallel.chunks):
        paths = getattr(chunk.module, "paths", None)
        pairs = [(c, o) for c, o in zip(report.blocks, report.chosen, strict=True) if paths is None or c.path in paths]
        size, put_off = sum(option.size for _, option in pairs), sum(costs.put_off for costs, _ in pairs)

        def ahead(*_: object, number: int = number, size: int = size) -> None:
            passed(number, size)

        def back(
            half: Half, number: int = number, size: int = size, put_off: int = put_off, end: Any = chunk.end_backward
        ) -> None:
            end(half)
            passed(number, put_off * (half.backward - half.weights) - size * half.backward)

        chunk.module.register_forward_hook(ahead)
        chunk.end_backward = back  # type: ignore[method-assign]
    with living:
        parallel.step(batch)
    parallel.close()
    return found


def each(hows: Sequence[str], plan: dict[str, Any]) -> list[Held]:
    return [held(how, plan) for how in hows]


PIPELINE: dict[str, Any] = {"pipeline": 2, "microbatches": 4}


@pytest.mark.parametrize(
    ("limits", "plan"),
    [
        (["700KiB", "3MiB"], {}),
        (["300KiB"], {"precision": "bf16"}),
        (["300KiB"], {"tensor": 2, "sequence": True}),
        (["1.1MiB", "1.2MiB"], {**PIPELINE, "schedule": "1f1b"}),
        (["2MiB"], {**PIPELINE, "schedule": "zb-h1"}),
        (["1.2MiB"], {**PIPELINE, "schedule": "interleaved", "chunks": 2}),
        (["1.8MiB"], {**PIPELINE, "schedule": "zbv", "chunks": 2}),
    ],
    ids=str,
)
def test_a_limit_in_bytes_is_kept_over_all_microbatches_in_flight(limits: list[str], plan: dict[str, Any]) -> None:
    for full, *others in run_ranks(each, Plan(**plan).num_ranks, ["full", *limits], plan):
        # Embeddings, the head, what is on its way: no choice of blocks.
        outside = [seen - counted for seen, counted in zip(full.seen, full.counted, strict=True)]
        for how, found in zip(limits, others, strict=True):
            limit = bytes_of(how)
            assert limit is not None
            assert max(found.counted) == found.kept <= limit
            # And the room is used, up to the parts of one block.
            assert found.kept >= 0.8 * min(limit, found.without)
            # Every byte is counted.
            assert [s - o for s, o in zip(found.seen, outside, strict=True)] == found.counted


def more(how: str, plan: dict[str, Any]) -> tuple[int, int]:
    """What one more block on every rank holds, as measured and by the report."""
    less, most = (held(how, plan, layers) for layers in (2, 4))
    return max(most.seen) - max(less.seen), most.kept - less.kept


def test_what_w_needs_is_counted_to_the_byte() -> None:
    for measured, counted in run_ranks(more, 2, "selective", {**PIPELINE, "schedule": "zb-h1"}):
        assert measured == counted


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
    # Of the last stage's two blocks, from B to its W: inputs of their linear layers (7 channels) and gradients (9).
    least = 2 * 16 * (2 * LENGTH * HIDDEN * 4)
    expected = (
        'plan.recompute = "100KiB": even with every block computed again, their inputs and what W needs take more on a '
        "rank; "
        f'set it to "{least // 1024}KiB" or more, or plan.microbatches higher, whose inputs are smaller'
    )
    assert run_ranks(told, 2, "100KiB", PIPELINE) == [expected] * 2
    assert run_ranks(told, 2, f"{least // 1024}KiB", PIPELINE) == [""] * 2
