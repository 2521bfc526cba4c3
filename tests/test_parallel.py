"""Steps: what is divided by what, what is clipped, skipped, drawn and evaluated; the same in every layout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.loss import IGNORED, Loss, count_targets
from shardwise.optimizers import SGD, AdamW
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from tests import small_models
from tests.pool import run_ranks

ALL_SCHEDULES = [
    {"schedule": "gpipe", "pipeline": 2},
    {"schedule": "1f1b", "pipeline": 2},
    {"schedule": "interleaved", "pipeline": 2, "chunks": 2},
    {"schedule": "zb-h1", "pipeline": 2},
    {"schedule": "zb-h2", "pipeline": 2},
    {"schedule": "zbv", "pipeline": 2, "chunks": 2},
    {"schedule": "dualpipev", "pipeline": 2, "chunks": 2},
]


class Scale(nn.Module):
    """y = weight * x: a token's loss is what the batch says, and the gradient is its sum."""

    def __init__(self, size: int = 1, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def scales(num: int) -> nn.Sequential:
    return nn.Sequential(*(Scale() for _ in range(num)))


# The output is the loss of every token.
per_token = Loss(lambda output, targets: output[targets != IGNORED].sum(), count_targets)
# A sum that nothing divides.
undivided = Loss(lambda output, targets: output.sum(), lambda targets: torch.zeros((), dtype=torch.int64))


def make(model: nn.Module, plan: dict[str, Any], **settings: Any) -> Parallel:
    settings = {"loss": per_token, "optimizer": SGD(lr=1.0), **settings}
    return parallelize(model, Plan(precision="fp64", **plan), **settings)


def stepped(
    plan: dict[str, Any], values: list[list[float]], ignored: list[list[int]], loss: str, steps: int
) -> list[float]:
    """Losses of some steps on the same batch, and the first weight's last gradient and value."""
    parallel = make(scales(4), plan, loss={"per token": per_token, "undivided": undivided}[loss], optimizer=SGD(lr=1.0))
    targets = torch.zeros(len(values), len(values[0]), dtype=torch.int64)
    for row, column in ignored:
        targets[row, column] = IGNORED
    batch = (torch.tensor(values), targets)
    losses = [parallel.step(parallel.share(batch), lr=0.0 if steps == 1 else None).loss for _ in range(steps)]
    gradient = parallel.full_gradients()["0.weight"]
    return [*losses, gradient.item(), parallel.full_parameters()["0.weight"].item()]


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"microbatches": 2},
        {"replicate": 2},
        {"shard": 2, "zero": 1},
        {"shard": 2, "zero": 2},
        {"shard": 2, "zero": 3},
    ]
    + [plan | {"microbatches": 2} for plan in ALL_SCHEDULES],
    ids=str,
)
def test_one_token_of_loss_4_and_three_of_loss_0_have_mean_1(plan: dict[str, Any]) -> None:
    """CASES 1: not 2, which is the mean of the means."""
    for found in run_ranks(
        stepped, Plan(**plan).num_ranks, plan, [[4.0, 9.0, 9.0], [0.0, 0.0, 0.0]], [[0, 1], [0, 2]], "per token", 1
    ):
        assert found == [1.0, 1.0, 1.0]  # loss, its gradient, the weight itself at lr 0


@pytest.mark.parametrize(
    "plan",
    [
        {"microbatches": 3},
        {"shard": 2, "zero": 0},
        {"shard": 2, "zero": 1},
        {"shard": 2, "zero": 2},
        {"shard": 2, "zero": 3},
    ]
    + [plan | {"microbatches": 3} for plan in ALL_SCHEDULES],
    ids=str,
)
def test_gradients_1_2_and_3_of_three_microbatches_make_6(plan: dict[str, Any]) -> None:
    """CASES 3: not 3, the last alone; with every ZeRO stage and every schedule."""
    values = [[1.0], [2.0], [3.0]] * Plan(**plan).data_parallel
    plan = {"microbatches": 3, **plan}
    for _, gradient, _ in run_ranks(stepped, Plan(**plan).num_ranks, plan, values, [], "undivided", 1):
        assert gradient == 6.0 * Plan(**plan).data_parallel


def falling(plan: dict[str, Any], loss: str) -> list[float]:
    """The weight of a model whose gradient is the same whatever it is, after two steps of four microbatches."""
    model = nn.Sequential(nn.Identity(), Scale(), nn.Identity())
    parallel = make(model, plan, loss={"per token": per_token, "undivided": undivided}[loss])
    batch = (torch.full((4, 3), 0.5), torch.zeros(4, 3, dtype=torch.int64))
    found = []
    for _ in range(2):
        parallel.step(batch)
        found.append(1 - parallel.full_parameters()["1.weight"].item())
    return found


def test_two_rounds_of_a_pipeline_add_up_to_twice_the_gradient() -> None:
    """CASES 2: 4 microbatches that sum to 4 g, their mean, two rounds: 2 g. Sums of tokens: as unpipelined."""
    for plan in ({}, {"pipeline": 2, "microbatches": 4, "cut": (1, 2)}):
        ranks = Plan(**plan).num_ranks
        assert run_ranks(falling, ranks, plan, "per token") == [[0.5, 1.0]] * ranks
        assert run_ranks(falling, ranks, plan, "undivided") == [[6.0, 12.0]] * ranks


def trained(plan: dict[str, Any], settings: dict[str, Any]) -> dict[str, Tensor]:
    model = small_models.build(settings.get("model", {}), "cpu" if settings.get("values") else "meta")
    parallel = parallelize(
        model,
        Plan(**{"precision": "fp64", **plan}),
        optimizer=AdamW(lr=0.01),
        clip=settings.get("clip"),
        seed=3,
        bucket_bytes=settings.get("bucket_bytes", 300),
    )
    for batch in small_models.make_batches(settings.get("steps", 2), 8, 4):
        parallel.step(parallel.share(batch))
    return parallel.full_parameters()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_axes_of_size_one_change_nothing(microbatches: int) -> None:
    """CASES 4: two ranks along either data-parallel axis are plain data parallelism, to the bit; with divided optimizer
    state to the last one, since AdamW rounds the elements at the end of a fragment otherwise than those before."""
    plans = [{"replicate": 2}, {"shard": 2}, {"shard": 2, "zero": 1}]
    found = [run_ranks(trained, 2, plan | {"microbatches": microbatches}, {})[0] for plan in plans]
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value)
        epsilon = torch.finfo(value.dtype).eps
        torch.testing.assert_close(found[2][name], value, rtol=epsilon, atol=0.01 * epsilon)  # of a step of 0.01


@pytest.mark.parametrize(
    "plan",
    [
        {"replicate": 2},
        {"pipeline": 2},
        {"pipeline": 2, "replicate": 2},
        {"pipeline": 2, "chunks": 2, "schedule": "zbv"},
        {"shard": 2, "zero": 3},
        {"pipeline": 3},
    ],
    ids=str,
)
def test_every_layout_starts_from_the_same_bits_and_no_two_layers_alike(plan: dict[str, Any]) -> None:
    """CASES 16."""
    alone = trained({}, {"steps": 0})
    for found in run_ranks(trained, Plan(**plan).num_ranks, plan, {"steps": 0}):
        assert found.keys() == alone.keys()
        assert list(found) == list(alone)  # in the model's own order
        assert all(torch.equal(found[name], value) for name, value in alone.items())
    matrices = [value for name, value in alone.items() if name.endswith("down.weight")]
    assert len({tuple(matrix.flatten().tolist()) for matrix in matrices}) == len(matrices) == 5


class Plus(nn.Module):
    """x + factor * weight / 4: over four rows whose sum is the loss, the weight's gradient is the factor."""

    def __init__(self, factor: float, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.zeros(1)) if weight is None else weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.weight / 4


def clipped(plan: dict[str, Any], tied: bool) -> tuple[float | None, list[float]]:
    """Loss = 3 a + 4 b over stages, where a is on the first stage (and, tied, on the last as well)."""
    if tied:
        shared = nn.Parameter(torch.zeros(1))
        model = nn.Sequential(Plus(1.0, shared), nn.Identity(), Plus(4.0), Plus(2.0, shared))
    else:
        model = nn.Sequential(Plus(3.0), nn.Identity(), Plus(4.0), nn.Identity())
    parallel = make(model, plan, loss=undivided, clip=1.0)
    metrics = parallel.step(parallel.share((torch.full((4, 1), 1.0 / 4), torch.zeros(4, 1))))
    values = parallel.full_parameters()
    return metrics.gradient_norm, [value.item() for value in values.values()]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"microbatches": 4},
        {"replicate": 2},
        {"shard": 2, "zero": 1},
        {"shard": 2, "zero": 2},
        {"shard": 2, "zero": 3},
        {"pipeline": 2, "microbatches": 2, "cut": (2, 2)},
        {"pipeline": 2, "replicate": 2, "microbatches": 2, "cut": (2, 2)},
        {"pipeline": 2, "chunks": 2, "schedule": "zbv", "microbatches": 4, "cut": (1, 1, 1, 1)},
    ],
    ids=str,
)
def test_the_norm_is_of_all_gradients_each_counted_once_and_the_factor_one_number(
    plan: dict[str, Any], tied: bool
) -> None:
    """CASES 11 and 12: gradients 3 and 4 on different stages or tied over both, norm 5, factor 0.2 on every rank."""
    for norm, values in run_ranks(clipped, Plan(**plan).num_ranks, plan, tied):
        assert norm == pytest.approx(5.0, rel=1e-12)
        assert values == pytest.approx([-0.6, -0.8], rel=1e-12)
