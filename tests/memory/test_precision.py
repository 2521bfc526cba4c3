"""Mixed precision: masters, landing, loss scaling, and one rank's overflow."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import kernels, models
from shardwise.memory.precision import FIRST, GROWTH_STEPS, LARGEST, SMALLEST, LossScale
from shardwise.optimizers import AdamW
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.plan_values import ASYNCHRONOUS
from shardwise.verify import verify
from shardwise.verify_command import FAULTS
from tests.models.cases import CONFIGS, VOCABULARY
from tests.pool import run_ranks
from tests.small_models import build, make_batches
from tests.test_verify import packed

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"replicate": 2, "microbatches": 2},
    {"shard": 2, "zero": 1},
    {"shard": 2, "zero": 2, "microbatches": 2},
    {"shard": 2, "zero": 3},
    {"pipeline": 2, "schedule": "zb-h1", "microbatches": 3},
    {"pipeline": 2, "shard": 2, "zero": 3, "microbatches": 2},
    {"pipeline": 2, "schedule": "pipedream", "shard": 2, "zero": 3, "microbatches": 2},
    {"pipeline": 2, "schedule": "pipedream-2bw", "replicate": 2, "microbatches": 3},
]


def agrees(plan: dict[str, Any]) -> str:
    report = verify(
        build({"num_blocks": 4, "tied": "schedule" not in plan or plan["schedule"] not in ASYNCHRONOUS}),
        Plan(**plan),
        make_batches(3, 12, 4),
        optimizer=AdamW(lr=1e-2),
        clip=1.0,
        bucket_bytes=600,
    )
    return "" if report.agrees else report.describe()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_low_precision_follows_float64_to_its_bound(layout: dict[str, Any], precision: str) -> None:
    plan = layout | {"precision": precision}
    assert run_ranks(agrees, Plan(**plan).num_ranks, plan) == [""] * Plan(**plan).num_ranks


@pytest.mark.parametrize("layout", [{}, LAYOUTS[4], LAYOUTS[6], LAYOUTS[7]], ids=str)
def test_bf16_without_masters_follows_float64_to_its_bound(layout: dict[str, Any]) -> None:
    plan = layout | {"precision": "bf16-pure"}
    assert run_ranks(agrees, Plan(**plan).num_ranks, plan) == [""] * Plan(**plan).num_ranks


def make(plan: dict[str, Any]) -> Parallel:
    return parallelize(build({"num_blocks": 3}), Plan(**plan), optimizer=AdamW(lr=1e-2), clip=None, bucket_bytes=600)


def bytes_and_formats(stage: int) -> tuple[dict[str, int], int, set[str]]:
    parallel = make({"shard": 2, "zero": stage, "precision": "bf16"})
    batch = make_batches(1, 4, 4)[0]
    assert parallel.step(parallel.share(batch)).loss > 0
    numel = sum(value.numel() for value in parallel.full_parameters().values())
    formats = {str(parameter.dtype) for parameter in parallel.model.parameters()}
    found = parallel.memory()
    parallel.close()
    return found, numel, formats


@pytest.mark.parametrize(("stage", "least"), [(0, (2, 4, 12)), (1, (2, 4, 6)), (2, (2, 2, 6)), (3, (1, 2, 6))])
def test_bytes_a_parameter_with_gradients_in_float32(stage: int, least: tuple[int, int, int]) -> None:
    """18 bytes undivided (Megatron's count, with float32 gradients), 6 + 12/N with the optimizer divided."""
    for found, numel, formats in run_ranks(bytes_and_formats, 2, stage):
        assert formats == {"torch.bfloat16"}
        for kind, each in zip(("parameters", "gradients", "optimizer"), least, strict=True):
            assert abs(found[kind] - each * numel) <= 12 * 2 * 20


def overflow(stage: int) -> list[tuple[bool, float | None, int, list[Tensor]]]:
    parallel = make({"shard": 2, "zero": stage, "precision": "fp16"})
    found = []
    for number, batch in enumerate(make_batches(3, 12, 4)):
        if number == 1 and parallel.data_rank == 1:
            # One rank's gradient of one parameter overflows.
            handle = parallel.model.head.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
        metrics = parallel.step(parallel.share(batch))
        assert metrics.loss > 0
        if number == 1 and parallel.data_rank == 1:
            handle.remove()
        values = [value.clone() for value in parallel.full_parameters().values()]
        found.append((metrics.skipped, metrics.loss_scale, int(parallel.step_count), values))
    parallel.close()
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_one_rank_overflows_every_rank_skips_and_the_scale_falls_once(stage: int) -> None:
    everyone = run_ranks(overflow, 2, stage)
    for before, at, after in everyone:
        assert [step[0] for step in (before, at, after)] == [False, True, False]
        assert [step[1] for step in (before, at, after)] == [FIRST, FIRST / 2, FIRST / 2]
        assert [step[2] for step in (before, at, after)] == [1, 1, 2]
        assert all(torch.equal(a, b) for a, b in zip(before[3], at[3], strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(at[3], after[3], strict=True))
    for mine, theirs in zip(*everyone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine[3], theirs[3], strict=True))


class _Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


def asynchronous_overflow(plan: dict[str, Any]) -> tuple[list[tuple[bool, float | None]], float, str | None]:
    """What each step says when one rank's gradients overflow on the last stage, and hence before, in the third."""
    parallel = make({"precision": "fp16", **plan})
    found = []
    for number, batch in enumerate(make_batches(6, 12, 4)):
        odd = number == 2 and parallel.data_rank == 1 and parallel.mesh.axis("pipeline").rank == 1
        if odd:
            handle = parallel.chunks[0].module.register_forward_hook(
                lambda module, given, output: _Overflow.apply(output)
            )
        metrics = parallel.step(parallel.share(batch))
        if odd:
            handle.remove()
        found.append((metrics.skipped, metrics.loss_scale))
    parallel.drain()
    scale = parallel.loss_scale.value if parallel.loss_scale is not None else 0.0
    finite = all(bool(value.isfinite().all()) for value in parallel.full_parameters().values())
    differs = parallel.replicas_agree()
    parallel.close()
    return found, scale if finite else -1.0, differs


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_stages_that_update_on_their_own_agree_on_the_scale_a_step_later(schedule: str, zero: int) -> None:
    """An overflow of one rank's is skipped by all ranks of its stage; every rank learns of it in the next step, and
    the scale falls once."""
    plan = {"pipeline": 2, "shard": 2, "zero": zero, "schedule": schedule, "microbatches": 2}
    everyone = run_ranks(asynchronous_overflow, 4, plan)
    for steps, scale, differs in everyone:
        assert steps == everyone[0][0]
        assert [skipped for skipped, _ in steps].count(True) == 2  # the first stage's update comes a step later
        assert not any(skipped for skipped, _ in steps[:3])
        assert steps[3] == (True, FIRST / 2)
        assert steps[-1] == (False, FIRST / 2)
        assert scale == FIRST / 2
        assert differs is None


def test_the_scale_grows_after_clean_steps_within_its_bounds() -> None:
    scale = LossScale()
    for _ in range(GROWTH_STEPS):
        scale.count(overflowed=False)
    assert scale.value == FIRST * 2
    for _ in range(50):
        scale.count(overflowed=True)
    assert scale.value == SMALLEST
    for _ in range(30 * GROWTH_STEPS):
        scale.count(overflowed=False)
    assert scale.value == LARGEST


def test_products_of_slow_formats_are_multiplied_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(5, 300), torch.randn(7, 300), torch.randn(7)
    half = [value.to(torch.float16) for value in (x, weight, bias)]
    exact = torch.nn.functional.linear(*(value.double() for value in half))
    monkeypatch.setattr(kernels, "native", lambda dtype, device_type="cpu": dtype == torch.float32)
    assert torch.equal(kernels.linear(*half), torch.nn.functional.linear(*(v.float() for v in half)).half())
    product = kernels.product(half[0], half[1].t())
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double() + half[2].double(), exact, rtol=1e-5, atol=1e-4)


def faulty(precision: str, fault: str) -> str:
    report = verify(
        models.build(CONFIGS["gpt2"], VOCABULARY),
        Plan(replicate=2, precision=precision),
        [packed(6, length, length) for length in (9, 12)],
        optimizer=AdamW(lr=1e-2),
        sabotage=FAULTS[fault] if fault else None,
    )
    return "" if report.agrees else report.describe()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-pure"])
def test_faults_are_noticed_in_16_bits_too(precision: str) -> None:
    """And a model is none whose keys' bias has a gradient that is rounding alone, of which AdamW makes whole steps."""
    assert run_ranks(faulty, 2, precision, "") == ["", ""]
    assert "gradient" in run_ranks(faulty, 2, precision, "skip-reduction")[0]
    # Without an update fp16's gradients keep the factor of the loss, which is seen first.
    assert ("gradient" if precision == "fp16" else "parameter") in run_ranks(faulty, 2, precision, "stale-weights")[0]
