"""Recomputation: the same bits with it and without, dropout on (CASES 15), under every schedule and division."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.memory import offload_activations
from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import SGD
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.verify import Report, verify
from tests.pool import run_ranks
from tests.tensor_parallel.test_huggingface_tensor import model_of

VOCABULARY = 19


def config(family: str, dropout: float = 0.2, layers: int = 3) -> ModelConfig:
    sizes: dict[str, Any] = {"kv_heads": 2, "window": 5} if family == "mistral" else {"tied": False}
    return ModelConfig(family=family, layers=layers, hidden=16, heads=4, sequence=16, dropout=dropout, **sizes)  # type: ignore[arg-type]


def batch(number: int, rows: int, documents: bool) -> Any:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (rows, 9 + 2 * (number % 3)), generator=generator)
    inputs = {"tokens": tokens}
    if documents:
        inputs["documents"] = (torch.rand(tokens.shape, generator=generator) < 0.2).cumsum(1)
    return inputs, tokens.roll(-1, 1)


@patch.object(offload_activations, "SMALLEST", 1)
def run(family: str, dropout: float, plan: dict[str, Any], recompute: Any, documents: bool) -> dict[str, Tensor]:
    """Gradients and parameters after steps of different lengths."""
    full = Plan(**plan, recompute=recompute)
    model = build(config(family, dropout), VOCABULARY)
    if full.context > 1 or full.slices > 1:  # they never hold attention's weights, of which some would be dropped
        for block in model.blocks:
            block.attention.core.dropout = 0.0
    parallel = parallelize(model, full, optimizer=SGD(lr=0.1, momentum=0.9))
    for number in range(4):  # what is kept is chosen after the second
        parallel.step(parallel.share(batch(number, 4 * full.data_parallel, documents)))
    parallel.drain()
    found = {f"gradient {name}": value for name, value in parallel.full_gradients().items()}
    found |= {f"parameter {name}": value for name, value in parallel.full_parameters().items()}
    parallel.close()
    return found


def differing(
    family: str, dropout: float, plan: dict[str, Any], hows: Sequence[str | float], documents: bool = False
) -> list[str]:
    """What differs by a bit from a run that computes nothing again."""
    plain = run(family, dropout, plan, "none", documents)
    found = []
    for how in hows:
        again = run(family, dropout, plan, how, documents)
        assert plain.keys() == again.keys()
        found += [f"{how}: {name}" for name in plain if not torch.equal(plain[name], again[name])]
    return found


@pytest.mark.parametrize(
    ("plan", "hows"),
    [
        ({}, ["selective"]),
        ({"microbatches": 2}, ["selective", 0.5]),
        ({"pipeline": 2, "microbatches": 4, "schedule": "zb-h1"}, ["selective", "full"]),
        ({"pipeline": 2, "microbatches": 4, "chunks": 2, "schedule": "dualpipev"}, ["selective"]),
        ({"pipeline": 2, "microbatches": 4, "schedule": "pipedream"}, ["selective", "full", 0.5]),
        ({"shard": 2, "zero": 3, "microbatches": 2}, ["selective", "full"]),
        ({"tensor": 2}, ["selective", "full"]),
        ({"tensor": 2, "sequence": True, "microbatches": 2}, ["selective", "full", 0.5]),
    ],
    ids=str,
)
def test_gradients_are_the_same_bits_with_dropout(plan: dict[str, Any], hows: list[str | float]) -> None:
    num_ranks = Plan(**plan).num_ranks
    assert run_ranks(differing, num_ranks, "gpt2", 0.2, plan, hows) == [[]] * num_ranks


def test_of_slices_block_scales_context_and_activations_on_disk_too(tmp_path: Path) -> None:
    plans: list[dict[str, Any]] = [
        {"slices": 3, "microbatches": 2},
        {"precision": "fp16", "loss_scaling": "per-block", "microbatches": 2},
        {"offload": {"activations": f"disk:{tmp_path / 'state'}"}, "microbatches": 2},
        {"context": 2},
        {"shard": 2, "zero": 3, "slices": 2, "offload": {"activations": f"disk:{tmp_path / 'state'}"}},
    ]
    for plan in plans:
        for different in run_ranks(differing, Plan(**plan).num_ranks, "gpt2", 0.2, plan, ["selective", 0.5]):
            assert different == [], plan


def test_every_other_block_and_segments_are_the_same_bits() -> None:
    for plan in ({}, {"pipeline": 2, "microbatches": 3}):
        for different in run_ranks(differing, Plan(**plan).num_ranks, "mistral", 0.2, plan, ["every:2", "sqrt"], True):
            assert different == []


def verified(plan: dict[str, Any]) -> Report:
    full = Plan(precision="fp64", **plan)
    batches = [batch(number, 2 * full.microbatches * full.data_parallel, True) for number in range(4)]
    return verify(build(config("llama"), VOCABULARY), full, batches, optimizer=SGD(lr=0.1), clip=1.0)


@pytest.mark.parametrize("how", ["full", "selective", 0.5])
@pytest.mark.parametrize(
    "plan", [{"pipeline": 2, "tensor": 2, "microbatches": 2}, {"pipeline": 2, "shard": 2, "zero": 3}], ids=str
)
def test_it_agrees_with_one_device(plan: dict[str, Any], how: Any) -> None:
    report = run_ranks(verified, 4, plan | {"recompute": how})[0]
    assert report.agrees, report.describe()


def test_documents_across_context_ranks_are_the_same_bits() -> None:
    for method in ("ring", "ulysses"):
        plan = {"context": 2, "context_method": method, "microbatches": 2}
        assert run_ranks(differing, 2, "mistral", 0.0, plan, ["full", "selective"], True) == [[], []]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_block_that_changes_its_input_is_named() -> None:
    parallel = parallelize(InPlace(), Plan(recompute="full"), loss=lambda y, t: y.sum(), optimizer=SGD(lr=0.1))
    with pytest.raises(ValueError, match="plan.recompute: 'layers.0' changes its input in place"):
        parallel.step((torch.ones(2, 4), torch.zeros(2, 4)))


@pytest.mark.parametrize(
    ("how", "mend"), [("full", 'set plan.recompute to "sqrt"'), ("sqrt", "make it an nn.Sequential")]
)
def test_a_model_without_blocks_is_refused_with_the_mend(how: str, mend: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=mend):
        parallelize(model, Plan(recompute=how))


class Normalised(nn.Module):
    """Blocks with running statistics, and more than one forward of each kept at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_running_statistics_change_once() -> None:
    found = []
    for how in ("none", "full"):
        torch.manual_seed(3)
        model = Normalised()
        parallel = parallelize(model, Plan(recompute=how), loss=lambda y, t: (y * t).sum(), optimizer=SGD(lr=0.1))
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            parallel.step((torch.rand(5, 4, generator=generator), torch.rand(5, 4, generator=generator)))
        found.append({**model.state_dict(), **parallel.full_gradients()})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_hugging_faces_cache_of_keys_takes_them_once() -> None:
    found = []
    for how in ("none", "full", "selective"):
        model = model_of("Llama", {"num_key_value_heads": 2})
        model.config.use_cache = True
        parallel = parallelize(model, Plan(recompute=how), optimizer=SGD(lr=0.1))
        tokens = torch.arange(18).view(2, 9)
        for _ in range(3):
            parallel.step(({"input_ids": tokens}, tokens.roll(-1, 1)))
        found.append(parallel.full_parameters())
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], atol=1e-5), name
        assert torch.allclose(value, found[2][name], atol=1e-5), name


class ChangesKept(nn.Module):
    """A linear layer's result, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.mul_(2)
        return torch.as_tensor(x + self.b(y))


class Leaves(nn.Module):
    """Leaves an auxiliary loss, and a table made once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.aux = self.table = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if not self.table.numel():
            self.table = torch.linspace(0.5, 1, 8, dtype=x.dtype)
        h = torch.tanh(self.a(x)) * self.table
        self.aux = (h**2).mean(-1, keepdim=True)
        return torch.as_tensor(x + self.b(h))


class Chain(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for block in self.blocks:
            if isinstance(block, Leaves):
                x = x + block.aux * block.table
        return x


def agrees(model: nn.Module, how: Any, microbatches: int = 1) -> None:
    generator = torch.Generator().manual_seed(2)
    batches = [(torch.rand(4, 3, 8, generator=generator), torch.rand(4, 3, 8, generator=generator)) for _ in range(4)]
    plan = Plan(precision="fp64", recompute=how, microbatches=microbatches)
    report = verify(model, plan, batches, loss=lambda y, t: ((y - t) ** 2).sum(), optimizer=SGD(lr=0.01))
    assert report.agrees, report.describe()


@pytest.mark.parametrize("how", ["selective", 0.9])
def test_a_kept_result_that_is_changed_in_place_is_computed_again(how: Any) -> None:
    torch.manual_seed(0)
    agrees(Chain(ChangesKept), how)


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_a_block_leaves_on_itself_has_its_gradient(how: Any, microbatches: int) -> None:
    torch.manual_seed(0)
    agrees(Chain(Leaves), how, microbatches)


@pytest.mark.parametrize("how", ["selective", 0.5])
def test_torchs_fast_path_of_transformers_is_not_taken_in_a_blocks_first_run(how: Any) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    agrees(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), how)
