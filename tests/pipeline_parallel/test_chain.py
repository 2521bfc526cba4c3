"""Whether a model is what a pipeline will run: its parts, one after another."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.models import ModelConfig, build
from shardwise.pipeline_parallel.chain import Chain
from shardwise.pipeline_parallel.stages import parts_of
from tests.pool import run_ranks
from tests.user_models import squares


class Two(nn.Module):
    """Args: forward: (a, b, x) -> output."""

    stages = ("a", "b")

    def __init__(self, compute: Callable[[nn.Module, nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))
        self.compute = compute

    def forward(self, x: Tensor) -> Any:
        return self.compute(self.a, self.b, x)


def between(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    return b(torch.relu(a(x)))


def residual(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    return b(a(x)) + x


def before(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    return b(a(x * 2))


def behind(a: nn.Module, b: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return {"logits": b(a(x)).clone()}


def turned(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    return a(b(x))


def left_out(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    return b(x)


def chained(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    return b(a(x))


def looks(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    return b(a(x)) if float(x.sum()) > 0 else b(a(x) + 1)


def require(model: nn.Module, inputs: Any) -> None:
    chain = Chain.of(model, parts_of(model))
    assert chain is not None
    chain.require(inputs)


@pytest.mark.parametrize(
    ("compute", "says"),
    [
        (between, "gives 'b' something else than what 'a' returned"),
        (residual, "returns something else than what 'b' returned"),
        (before, "gives 'a' something else than what the batch has"),
        (behind, "returns something else than what 'b' returned"),
        (turned, "calls b, a, not a, b"),
        (left_out, "calls b, not a, b"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_lies_between_parts_is_refused(compute: Any, says: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"plan.pipeline: Two.forward {says}, .* put what lies between into a part"):
        require(Two(compute), torch.rand(2, 4, dtype=dtype))


@pytest.mark.parametrize("compute", [chained, looks])
def test_a_chain_passes_and_what_looks_at_values_is_left_alone(compute: Any) -> None:
    model = Two(compute)
    seen = model.a.weight.clone(), model.a.weight._version
    require(model, torch.rand(2, 4))
    assert torch.equal(model.a.weight, seen[0])
    assert model.a.weight._version == seen[1]
    assert not model.a._forward_hooks


class Named(nn.Module):
    """Parts that take named inputs of the batch, pass tuples on and are there twice."""

    stages = ("first", "middle", "middle", "last")

    class First(nn.Linear):
        def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x) * scale, scale + 1

    class Middle(nn.Linear):
        def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x if mask is None else x * mask), y

    class Last(nn.Linear):
        def forward(self, x: Tensor, y: Tensor, *, scale: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * y * scale)

    def __init__(self, masks: bool = True) -> None:
        super().__init__()
        self.first, self.middle, self.last = self.First(4, 4), self.Middle(4, 4), self.Last(4, 4)
        self.masks = masks

    def forward(self, x: Tensor, scale: Tensor, mask: Tensor | None = None) -> Tensor:
        x, y = self.first(x, scale=scale)
        for _ in range(2):
            x, y = self.middle(x, y, mask if self.masks else None)
        return self.last(x, y, scale=scale)


def test_named_inputs_reach_the_parts_that_take_them() -> None:
    inputs = {"x": torch.rand(2, 4), "scale": torch.rand(2, 1)}
    require(Named(), inputs)
    require(Named(), inputs | {"mask": torch.rand(2, 1)})
    require(Named(masks=False), inputs)
    with pytest.raises(ValueError, match="gives 'middle' something else than what 'first' returned"):
        require(Named(masks=False), inputs | {"mask": torch.rand(2, 1)})


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("extra", [(), ("positions",), ("positions", "documents")])
def test_our_families_are_chains(family: str, extra: tuple[str, ...]) -> None:
    model = build(ModelConfig(family=family, layers=2, hidden=8, heads=2, sequence=8), 11)
    tokens = torch.randint(0, 11, (2, 8))
    require(model, {"tokens": tokens, **{name: torch.zeros(2, 8, dtype=torch.long) for name in extra}})


def test_a_sequential_need_not_be_asked() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert Chain.of(model, parts_of(model)) is None


def step_of_what_is_no_chain() -> str:
    torch.manual_seed(0)
    parallel = shardwise.parallelize(
        Two(between), shardwise.Plan(pipeline=2, microbatches=2), loss=squares, optimizer=shardwise.SGD(lr=0.1)
    )
    try:
        parallel.step((torch.rand(4, 4), torch.rand(4, 4)))
    except ValueError as error:
        return str(error)
    return "it trained"


def test_the_first_step_refuses_what_is_no_chain_on_every_rank() -> None:
    for text in run_ranks(step_of_what_is_no_chain, 2):
        assert text.startswith("plan.pipeline: Two.forward gives 'b' something else than what 'a' returned")
