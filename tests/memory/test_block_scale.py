"""A loss scale for every residual block."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import models
from shardwise.memory.block_scale import BACKOFF, FIRST, GROWTH, LARGEST, PAUSE, SMALLEST, BlockScales
from shardwise.optimizers import AdamW
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.verify import verify
from tests.models.cases import CONFIGS, VOCABULARY
from tests.pool import run_ranks
from tests.small_models import build
from tests.test_verify import packed

SCALED = {"precision": "fp16", "loss_scaling": "per-block"}


def agrees(name: str, plan: dict[str, Any]) -> str:
    report = verify(
        models.build(CONFIGS[name], VOCABULARY),
        Plan(**SCALED, **plan),
        [packed(6, length, length) for length in (9, 12)],
        optimizer=AdamW(lr=1e-2),
        clip=1.0,
        bucket_bytes=600,
    )
    return "" if report.agrees else report.describe()


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt2", {"pipeline": 2, "microbatches": 3, "schedule": "zb-h1"}),
        ("llama-tied", {"pipeline": 2, "microbatches": 2}),
        ("llama", {"shard": 2, "zero": 3, "microbatches": 2}),
        ("qwen3", {"shard": 2, "zero": 1, "reduce_dtype": "fp16"}),
        ("gpt2", {"context": 2, "recompute": "full"}),
    ],
    ids=str,
)
def test_it_follows_float64_in_every_layout(name: str, plan: dict[str, Any]) -> None:
    assert run_ranks(agrees, Plan(**plan).num_ranks, name, plan) == [""] * Plan(**plan).num_ranks


def make(**plan: Any) -> Parallel:
    return parallelize(
        models.build(CONFIGS["llama"], VOCABULARY), Plan(**SCALED, **plan), optimizer=AdamW(lr=1e-2), bucket_bytes=600
    )


def overflow(plan: dict[str, Any]) -> tuple[list[bool], int, list[float], list[str], str | None]:
    """What one rank's overflow in the second block leads to."""
    parallel = make(**plan)
    batch = parallel.share(packed(6, 9, 9))
    skipped = [parallel.step(batch).skipped]
    before = parallel.full_parameters()
    for name, module in parallel.model.named_modules():
        if name.endswith("blocks.1.feed_forward") and parallel.data_rank == 1:
            module.register_full_backward_hook(lambda *given: (given[1][0] * float("inf"),))
    skipped.append(parallel.step(batch).skipped)
    after = parallel.full_parameters()
    assert isinstance(parallel.loss_scale, BlockScales)
    found = parallel.loss_scale.state[:, 0].tolist()
    same = [name for name, value in before.items() if torch.equal(value, after[name])]
    result = skipped, parallel.skipped_blocks, found, same, parallel.replicas_agree()
    parallel.close()
    return result


@pytest.mark.parametrize("plan", [{"replicate": 2}, {"shard": 2, "zero": 2}], ids=str)
def test_one_ranks_overflow_in_a_block_leaves_that_block_out_on_all_ranks_and_nothing_else(
    plan: dict[str, Any],
) -> None:
    for skipped, blocks, scales, same, odd in run_ranks(overflow, 2, plan):
        assert skipped == [False, False]
        assert blocks == 1
        grown = 2 * FIRST * GROWTH
        assert scales == pytest.approx([grown * GROWTH, grown * GROWTH, grown / BACKOFF])
        assert same
        assert all(name.startswith("blocks.1.") for name in same)
        assert len(same) == 9
        assert odd is None


def test_scales_grow_fall_and_pause_as_the_paper_says() -> None:
    scales = BlockScales(2, 3)
    assert scales.state[:, 0].tolist() == [3 * FIRST] * 2
    one = torch.tensor([False, True])
    scales.count(one)
    assert [scales[0], scales[1]] == pytest.approx([3 * FIRST * GROWTH, 3 * FIRST / BACKOFF])
    for _ in range(PAUSE - 1):
        scales.count(one)
    assert scales[1] == pytest.approx(3 * FIRST / BACKOFF)  # no second division yet, and no growth
    scales.count(one)
    assert scales[1] == pytest.approx(3 * FIRST / 2)
    for _ in range(12_000):
        scales.count(one)
    assert [scales[0], scales[1]] == [3 * LARGEST, 3 * SMALLEST]

    def overflow_all() -> None:
        for _ in range(50 * PAUSE):
            scales.count(torch.tensor([True, True]))

    with pytest.raises(RuntimeError, match='every step is skipped; set plan.precision = "bf16"'):
        overflow_all()


def test_the_stream_is_float32_and_branches_are_not() -> None:
    parallel = make()
    seen: dict[str, set[torch.dtype]] = {"stream": set(), "branch": set(), "gradient": set()}

    def note(kind: str, tensor: Tensor) -> None:
        seen[kind].add(tensor.dtype)
        if kind == "stream":
            tensor.register_hook(lambda gradient: seen["gradient"].add(gradient.dtype))

    for name, module in parallel.model.named_modules():
        if name.rpartition(".")[0].endswith("blocks"):
            module.register_forward_hook(lambda module, given, output: note("stream", output))
        if name.endswith(("down", "attention.output")):
            module.register_forward_hook(lambda module, given, output: note("branch", output))
    parallel.step(packed(6, 9, 9))
    assert seen == {"stream": {torch.float32}, "branch": {torch.float16}, "gradient": {torch.float32}}
    assert torch.equal(parallel.state_dict()["loss_scale"], parallel.loss_scale.state)  # type: ignore[union-attr]


class Plain(nn.Module):
    stages = ("embedding", "blocks.*", "head")

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 5)


@pytest.mark.parametrize(
    ("plan", "model", "reason"),
    [
        ({"precision": "bf16"}, None, "is for fp16"),
        ({"precision": "fp16", "pipeline": 2, "schedule": "pipedream"}, None, "under way at all times"),
        ({"precision": "fp16", "tensor": 2}, None, "plan.tensor divides do not know"),
        ({"precision": "fp16"}, Plain(), "block 'blocks.0' \\(Linear\\) does not say where its residual branches"),
        ({"precision": "fp16"}, nn.Linear(2, 2), "blocks are not known"),
        ({"precision": "fp16"}, nn.Sequential(nn.Linear(2, 2)), "between an embedding and a head"),
        ({"precision": "fp16"}, build({}), "'blocks.0' \\(Block\\) does not say"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_where_it_cannot_be_it_is_refused_with_the_reason(
    plan: dict[str, Any], model: nn.Module | None, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"plan.loss_scaling: .*{reason}"):
        Plan(loss_scaling="per-block", **plan).require(model=model)
