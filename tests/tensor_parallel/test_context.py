"""Context parallelism against one device: ring and Ulysses, whatever the lengths, heads, documents and other axes."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.mesh import Mesh
from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import SGD, AdamW
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.tensor_parallel.context import Context, attention_cores
from shardwise.tensor_parallel.context import check as check_model
from shardwise.verify import Report, verify
from tests.pool import run_ranks

VOCABULARY = 23


def make_batches(lengths: list[int], rows: int, documents: bool, positions: bool = False) -> list[Any]:
    """Global batches whose lengths change from step to step, with ignored targets."""
    generator = torch.Generator().manual_seed(sum(lengths))
    found = []
    for length in lengths:
        tokens, targets = torch.randint(0, VOCABULARY, (2, rows, length), generator=generator)
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
        inputs = {"tokens": tokens}
        if documents:
            inputs["documents"] = torch.randint(0, 2, (rows, length), generator=generator).cumsum(1) // 2
        if positions:
            inputs["positions"] = torch.randint(0, 16, (rows, length), generator=generator)
        found.append((inputs, targets))
    return found


def small(**model: Any) -> ModelConfig:
    return ModelConfig(**{"layers": 2, "hidden": 24, "heads": 6, "intermediate": 20, "sequence": 64, **model})


def check(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any]) -> Report:
    full = Plan(precision="fp64", **plan)
    rows = full.data_parallel * full.microbatches + job.get("more", 0)
    return verify(
        build(small(**model), VOCABULARY),
        full,
        make_batches(job.get("lengths", [13, 8]), rows, job.get("documents", False), job.get("positions", False)),
        optimizer=AdamW(lr=1e-2, eps=1e-3) if job.get("adamw") else SGD(lr=0.5, momentum=0.9),
        clip=job.get("clip", 1.0),
        example=make_batches([12], 1, documents=False)[0],
    )


def assert_agrees(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any]) -> None:
    reports = run_ranks(check, Plan(**plan).num_ranks, plan, model, job)
    assert all(report.agrees for report in reports), reports[0].describe()
    assert {difference.kind for difference in reports[0].differences} >= {"loss", "gradient", "parameter"}


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize(
    ("plan", "model", "job"),
    [
        ({"context": 2}, {}, {"adamw": True}),
        ({"context": 2}, {"family": "llama", "kv_heads": 2}, {"documents": True}),
        ({"context": 2}, {"family": "mistral", "kv_heads": 3, "window": 4}, {"documents": True, "lengths": [31]}),
        ({"context": 3}, {"family": "llama", "kv_heads": 2}, {"documents": True}),
        ({"context": 3}, {"family": "qwen", "window": 3}, {"lengths": [1, 2, 5]}),
        ({"context": 2, "pipeline": 2, "microbatches": 3}, {"family": "llama", "kv_heads": 3}, {"documents": True}),
        ({"context": 2, "pipeline": 2, "schedule": "zb-h1", "microbatches": 2}, {"tied": True}, {"lengths": [9]}),
        ({"context": 2, "pipeline": 2, "schedule": "pipedream", "microbatches": 3}, {"tied": False}, {}),
        ({"context": 2, "pipeline": 2, "schedule": "auto", "microbatches": 2, "cut": "time"}, {"tied": False}, {}),
        ({"context": 2, "replicate": 2}, {"family": "llama", "kv_heads": 1}, {"documents": True, "more": 1}),
        ({"context": 2, "shard": 2, "microbatches": 2}, {}, {"more": 1, "positions": True}),
        ({"context": 2, "zero": 1}, {"kv_heads": 2}, {}),
        (
            {"context": 2, "tensor": 2, "sequence": True},
            {"family": "llama", "heads": 12, "kv_heads": 2},
            {"documents": True},
        ),
        ({"context": 2, "shard": 2, "zero": 3, "microbatches": 2}, {"family": "llama"}, {"documents": True}),
    ],
    ids=str,
)
def test_equals_one_device(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any], method: str) -> None:
    assert_agrees({**plan, "context_method": method}, model, job)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    pipeline = draw(st.sampled_from([1, 1, 2]))
    plan = {
        "context": draw(st.sampled_from([2, 3] if pipeline == 1 else [2])),
        "context_method": draw(st.sampled_from(["ring", "ulysses"])),
        "pipeline": pipeline,
        "microbatches": draw(st.integers(1, 3)),
        "schedule": draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])),
    }
    model = {
        "family": draw(st.sampled_from(["gpt2", "llama"])),
        "kv_heads": draw(st.sampled_from([1, 2, 3, 6])),
        "window": draw(st.sampled_from([0, 0, 1, 5])),
    }
    job = {
        "lengths": draw(st.lists(st.integers(1, 25), min_size=1, max_size=3)),
        "documents": draw(st.booleans()),
        "positions": draw(st.booleans()),
        "more": draw(st.integers(0, 1)),
        "clip": draw(st.sampled_from([None, 0.05])),
    }
    return plan, model, job


@settings(max_examples=9, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_random_jobs_equal_one_device(job: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
    assert_agrees(*job)


def evaluated(method: str, rows: int) -> tuple[float, int, float, int, bool]:
    """What evaluate finds, what one device does, and whether a step after it goes as if it had not been."""
    plan = Plan(context=2, context_method=method, replicate=2, microbatches=2, precision="fp64")
    mesh = Mesh(plan, "cpu")
    parallel, other = (
        parallelize(build(small(), VOCABULARY), plan, optimizer=SGD(lr=0.5), mesh=mesh, seed=3) for _ in range(2)
    )
    inputs, targets = make_batches([11], rows, documents=True)[0]
    loss_sum, count = parallel.evaluate(parallel.share((inputs, targets)))
    model = build(small(), VOCABULARY, "cpu", torch.float64)
    model.load_state_dict(parallel.full_parameters(), strict=False)
    with torch.no_grad():
        logits = model(**inputs)
    expected = float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    training = parallel.share(make_batches([9], 4, documents=False)[0])
    same = parallel.step(training).loss == other.step(training).loss
    for spread in (parallel, other):
        spread.close()
    return loss_sum, count, expected, int((targets != -100).sum()), same


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_evaluation_counts_every_target_once(method: str) -> None:
    # One row for two data ranks: one of them has none.
    for rows in (1, 3):
        for loss_sum, count, expected, targets, same in run_ranks(evaluated, 4, method, rows):
            assert loss_sum == pytest.approx(expected, rel=1e-12)
            assert count == targets
            assert same


class Recomputed(nn.Module):
    """A block that is computed again in backward, which comes after the forwards of other microbatches."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return checkpoint(self.block, x, positions, documents, use_reentrant=False)


def check_recomputed(method: str) -> Report:
    model = build(small(), VOCABULARY)
    model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
    plan = Plan(context=2, context_method=method, precision="fp64", schedule="gpipe", microbatches=3)
    return verify(model, plan, make_batches([13], 3, documents=True), optimizer=SGD(lr=0.5))


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_recomputed_attention_keeps_its_microbatchs_documents(method: str) -> None:
    for report in run_ranks(check_recomputed, 2, method):
        assert report.agrees, report.describe()


class Attend(nn.Module):
    """A user's own attention, under other names."""

    def __init__(self, scale: float, window: int = 0) -> None:
        super().__init__()
        self.scale = scale
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        hidden = (distance < 0) | (distance >= (self.window or len(distance)))
        return ((q @ k.mT) * self.scale).masked_fill(hidden, float("-inf")).softmax(-1) @ v


class Layer(nn.Module):
    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.fused = nn.Linear(12, 36)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fused(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)


class Own(nn.Module):
    """A user's own model: one attention module stands in two layers."""

    attention_cores: tuple[str, ...] = ("layers.*.attend",)

    def __init__(self, window: int = 0, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 12)
        self.places = nn.Embedding(64, 12)
        attend = Attend(0.3, window)
        self.layers = nn.ModuleList([Layer(attend), Layer(attend)])
        self.extra = extra
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1])[None]
        x = self.tokens(ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def check_own(method: str, window: int) -> Report:
    torch.manual_seed(0)
    batches = [({"ids": inputs["tokens"]}, targets) for inputs, targets in make_batches([13, 6], 2, documents=False)]
    plan = Plan(context=2, context_method=method, precision="fp64")
    return verify(Own(window), plan, batches, optimizer=SGD(lr=0.5))


@pytest.mark.parametrize(("method", "window"), [("ring", 0), ("ring", 3), ("ulysses", 3)])
def test_a_users_own_module_equals_one_device(method: str, window: int) -> None:
    assert attention_cores(Own()) == ["layers.0.attend", "layers.1.attend"]
    for report in run_ranks(check_own, 2, method, window):
        assert report.agrees, report.describe()


def dropped(steps: int) -> list[tuple[float, list[float]]]:
    """Losses of a model with dropout that does not learn, and which of a row's embeddings were dropped on this rank."""
    plan = Plan(context=2, context_method="ulysses")
    parallel = parallelize(build(small(dropout=0.5), VOCABULARY), plan, optimizer=SGD(lr=0.0), seed=1)
    batch = make_batches([8], 2, documents=False)[0]
    seen: list[Tensor] = []
    dropout = parallel.model.get_submodule("embedding.dropout")
    dropout.register_forward_hook(lambda module, given, out: seen.append((out == 0).double().flatten()))
    found = []
    for _ in range(steps):
        loss = parallel.step(batch).loss
        found.append((loss, seen.pop().tolist()))
    parallel.close()
    return found


def test_ranks_drop_different_positions() -> None:
    first, second = run_ranks(dropped, 2, 2)
    assert [loss for loss, _ in first] == [loss for loss, _ in second]
    assert first[0][0] != first[1][0]
    assert first[0][1] != second[0][1]


# Refusals


def refusal(model: nn.Module, method: str) -> str:
    with pytest.raises(ValueError, match=";") as caught:
        check_model(model, method)
    return str(caught.value)


def changed(**attributes: Any) -> Own:
    model = Own()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


class Unplaced(Own):
    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids)


class Sees(nn.Module):
    """Attention that is not causal."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def test_models_that_cannot_be_divided_are_refused() -> None:
    assert "attention_cores" in refusal(nn.Linear(2, 2), "ring")
    assert "lists 'blocks.*.core', which is not a submodule" in refusal(
        changed(attention_cores=["blocks.*.core"]), "ring"
    )
    assert "forward takes no `positions`" in refusal(Unplaced(), "ring")
    assert "'layers.0' of Own has parameters" in refusal(changed(attention_cores=["layers.*"]), "ulysses")
    assert "'extra' is a Conv1d, which looks across positions" in refusal(Own(extra=nn.Conv1d(3, 3, 3)), "ulysses")
    assert "drops attention weights" in refusal(build(small(dropout=0.1), VOCABULARY), "ring")
    check_model(build(small(dropout=0.1), VOCABULARY), "ulysses")
    other = changed(attention_cores=["extra"], extra=Sees())
    assert "does not compute causal softmax attention" in refusal(other, "ring")
    check_model(other, "ulysses")
    stretched = small(family="llama", rope_scaling={"kind": "dynamic", "factor": 2.0, "original_sequence": 8})
    assert "dynamic rotary scaling" in refusal(build(stretched, VOCABULARY), "ulysses")


def refused_batches() -> list[str]:
    plan = Plan(context=2)
    parallel = parallelize(build(small(), VOCABULARY), plan, optimizer=SGD(lr=0.0))
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    found = []
    for batch in (
        (tokens, tokens),
        ({"tokens": tokens}, tokens[:, 0]),
        ({"tokens": tokens, "documents": tokens[:, :5]}, tokens),
    ):
        try:
            parallel.step(batch)
        except ValueError as error:
            found.append(str(error))
    parallel.close()
    return found


def test_batches_without_a_sequence_are_refused() -> None:
    for found in run_ranks(refused_batches, 2):
        first, second, third = found
        assert "must be a dict of named tensors, not a Tensor" in first
        assert "targets [(1,)]" in second
        assert "'documents': (1, 5)" in third


class Shortens(nn.Module):
    """Drops the last position, as no divided model may."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return self.model(tokens[:, :-1], None if positions is None else positions[:, :-1], documents)


def refused_calls() -> list[str]:
    found = []
    documents = torch.zeros(1, 6, dtype=torch.int64)

    class Invents(Shortens):
        def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return self.model(tokens, positions, documents[:, : tokens.shape[1]])

    torch.manual_seed(0)
    inside = build(small(), VOCABULARY, "cpu")
    for model in (Shortens(copy.deepcopy(inside)), Invents(inside)):
        parallel = parallelize(model, Plan(context=2), optimizer=SGD(lr=0.0))
        try:
            parallel.step(({"tokens": documents}, documents))
        except ValueError as error:
            found.append(str(error))
        parallel.close()
    return found


def test_attention_to_anything_but_the_batchs_sequence_is_refused() -> None:
    for shortened, invented in run_ranks(refused_calls, 2):
        assert "2 queries and 2 keys where this rank has 3 of 6 positions" in shortened
        assert "documents that are not the batch's" in invented


def kept(lengths: list[int]) -> int:
    """Spreads that are kept once steps with other batches are over."""
    mesh = Mesh(Plan(context=2), "cpu")
    context = Context(mesh, "positions")
    for length in lengths:
        context.local(make_batches([length], 2, documents=True)[0])
    return len(context._spreads)


def test_batches_are_let_go_of() -> None:
    assert run_ranks(kept, 2, [3, 4, 5]) == [0, 0]
