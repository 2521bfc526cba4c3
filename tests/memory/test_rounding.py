"""Stochastic rounding: unbiased, and the same bits in every layout; bf16 without masters."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import models
from shardwise.layout import Layout, Split
from shardwise.memory.rounding import random_bits, round_into
from shardwise.mesh import Axis
from shardwise.optimizers import SGD, AdamW, AdamW8bit, Optimizer
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from tests.models.cases import CONFIGS, VOCABULARY
from tests.pool import run_ranks
from tests.small_models import build, make_batches


def rounded(values: Tensor, name: str = "w", seed: int = 0, step: int = 1) -> Tensor:
    out = torch.empty(values.shape, dtype=torch.bfloat16)
    round_into(out, values, name, Layout(tuple(values.shape)), {}, 0, seed, step)
    return out


@pytest.mark.parametrize("value", [1 + 0.3 / 128, -(2 + 0.7 / 64), 3e-39, 0.1])
def test_the_mean_of_many_draws_is_the_value(value: float) -> None:
    """Over elements of one step, and over steps of one element, within five deviations."""
    exact = float(torch.tensor(value))
    spacing = abs(float(torch.nextafter(torch.tensor(value).bfloat16(), torch.tensor(9e9).bfloat16())) - value)
    spacing = max(spacing, abs(exact - float(torch.tensor(value).bfloat16()))) * 2
    for draws in (
        rounded(torch.full((100_000,), value)),
        torch.cat([rounded(torch.tensor([value]), step=step) for step in range(4000)]),
    ):
        assert len(draws.unique()) == 2
        assert abs(float(draws.double().mean()) - exact) < 5 * spacing / 2 / len(draws) ** 0.5
    nearest = torch.full((10,), value).bfloat16().double().mean()
    assert abs(float(nearest) - exact) > 0.05 * spacing  # rounding to nearest is off


def test_what_bf16_holds_stays_as_it_is() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), -float("inf"), 1e-40]).bfloat16().float()
    assert torch.equal(rounded(values).float(), values)
    assert rounded(torch.tensor([float("nan")])).isnan().all()


def test_draws_differ_by_seed_step_name_and_place() -> None:
    values = torch.full((4096,), 1 + 0.5 / 128)
    draws = [rounded(values), rounded(values, seed=1), rounded(values, step=2), rounded(values, name="v")]
    for number, one in enumerate(draws):
        for other in draws[:number]:
            assert 0.45 < float((one == other).float().mean()) < 0.55
    bits = random_bits(torch.arange(1 << 16, dtype=torch.int32), 12345)
    for bit in range(16):
        row = (bits >> bit & 1).double()
        assert abs(float(row.mean()) - 0.5) < 0.01
        assert abs(float(torch.corrcoef(torch.stack([row[1:], row[:-1]]))[0, 1])) < 0.02


@pytest.mark.parametrize(
    "layout",
    [
        Layout((7, 10), (Split("tensor", 0),)),
        Layout((7, 10), (Split("tensor", 1),)),
        Layout((12, 5), (Split("tensor", 0, (4, 8)),)),
        Layout((3, 4, 6), (Split("tensor", 1),)),
    ],
    ids=str,
)
def test_a_piece_draws_what_the_whole_draws_there(layout: Layout) -> None:
    whole = torch.linspace(1, 1.01, 400)[: torch.Size(layout.shape).numel()].view(layout.shape)
    expected = rounded(whole.reshape(-1)).view(layout.shape)
    for rank in range(2):
        places = {"tensor": Axis("tensor", rank, 2, (0, 1))}
        piece = torch.empty(layout.local_shape(places))
        wanted = torch.empty(piece.shape, dtype=torch.bfloat16)
        for source, target in layout.pieces(places):
            target.of(piece).copy_(source.of(whole))
            target.of(wanted).copy_(source.of(expected))
        for low, high in ((0, piece.numel()), (3, piece.numel() - 2)):
            out = torch.empty(high - low, dtype=torch.bfloat16)
            round_into(out, piece.reshape(-1)[low:high], "w", layout, places, low, 0, 1)
            assert torch.equal(out, wanted.reshape(-1)[low:high])


def decayed(plan: dict[str, Any]) -> dict[str, Tensor]:
    """Parameters after three steps whose gradients are zero to the bit, so that weight decay and rounding are all."""
    parallel = parallelize(
        models.build(CONFIGS["llama"], VOCABULARY),
        Plan(precision="bf16-pure", **plan),
        loss=lambda output, targets: output.float().sum() * 0,
        optimizer=SGD(lr=0.01, weight_decay=0.1),
        bucket_bytes=600,
        seed=3,
    )
    for tokens, targets in make_batches(3, 4, 4):
        parallel.step(parallel.share((tokens, targets)))
    found = parallel.full_parameters()
    parallel.close()
    return found


def test_every_layout_rounds_alike() -> None:
    whole = decayed({})
    assert {value.dtype for value in whole.values()} == {torch.bfloat16}
    for plan in (
        {"replicate": 2},
        {"shard": 2, "zero": 1, "microbatches": 2},
        {"shard": 3, "zero": 3},
        {"tensor": 2},
        {"pipeline": 2, "shard": 2, "zero": 2, "microbatches": 2},
        {"pipeline": 2, "schedule": "pipedream-2bw", "microbatches": 2},
    ):
        for found in run_ranks(decayed, Plan(**plan).num_ranks, plan):
            assert all(torch.equal(value, whole[name]) for name, value in found.items()), plan


def held(plan: dict[str, Any], optimizer: Optimizer) -> tuple[dict[str, int], int]:
    parallel = parallelize(build({"num_blocks": 4}), Plan(precision="bf16-pure", **plan), optimizer=optimizer)
    (batch,) = make_batches(1, 4, 4)
    parallel.step(parallel.share(batch))
    found = parallel.memory(), sum(value.numel() for value in parallel.full_parameters().values())
    parallel.close()
    return found


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [(AdamW(), 8.0), (SGD(), 0.0), (SGD(momentum=0.9), 4.0), (AdamW8bit(block=16, smallest=1), 3.2)],
    ids=lambda value: type(value).__name__,
)
def test_bytes_a_parameter_without_masters(optimizer: Optimizer, state: float) -> None:
    """2 for it, 4 for its gradient, and the optimizer's state: 14 with AdamW, where float32 masters make it 18."""
    found, numel = held({}, optimizer)
    assert found["parameters"] == 2 * numel
    assert found["gradients"] == 4 * numel
    assert found["optimizer"] <= state * numel
    assert found["optimizer"] >= 0.8 * state * numel


def test_stage_3_divides_all_of_it() -> None:
    for found, numel in run_ranks(held, 2, {"shard": 2, "zero": 3}, AdamW()):
        for kind, each in (("parameters", 1), ("gradients", 2), ("optimizer", 4)):
            assert abs(found[kind] - each * numel) < 100


@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-2), AdamW8bit(block=16, smallest=32)], ids=str)
def test_resumed_it_goes_on_with_the_same_bits(optimizer: Optimizer) -> None:
    batches = make_batches(4, 4, 4)

    def make() -> Any:
        return parallelize(build({"num_blocks": 3}), Plan(precision="bf16-pure"), optimizer=optimizer, clip=1.0)

    first, second = make(), make()
    for batch in batches[:2]:
        first.step(batch)
    for name, value in first.state_dict().items():
        target = second.state_dict()
        target[name].copy_(value)
        second.loaded()
    for batch in batches[2:]:
        assert first.step(batch).loss == second.step(batch).loss
    found = second.full_parameters()
    assert all(torch.equal(value, found[name]) for name, value in first.full_parameters().items())
