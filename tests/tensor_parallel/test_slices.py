"""Sequences computed slice by slice against one device, whatever the lengths, heads, documents and other axes."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import SGD, AdamW
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.tensor_parallel.context import check as check_model
from shardwise.tensor_parallel.slices import SlicedAttention, Slices
from shardwise.verify import Report, verify
from tests.pool import run_ranks
from tests.tensor_parallel.test_context import (
    VOCABULARY,
    Own,
    Recomputed,
    Sees,
    Shortens,
    Unplaced,
    changed,
    make_batches,
    small,
)


def check(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any]) -> Report:
    full = Plan(precision="fp64", **plan)
    rows = full.data_parallel * full.microbatches + job.get("more", 0)
    return verify(
        build(small(**model), VOCABULARY),
        full,
        make_batches(job.get("lengths", [13, 8]), rows, job.get("documents", False), job.get("positions", False)),
        optimizer=AdamW(lr=1e-2, eps=1e-3) if job.get("adamw") else SGD(lr=0.5, momentum=0.9),
        clip=job.get("clip", 1.0),
    )


def assert_agrees(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any]) -> None:
    num_ranks = Plan(**plan).num_ranks
    reports = run_ranks(check, num_ranks, plan, model, job) if num_ranks > 1 else [check(plan, model, job)]
    assert all(report.agrees for report in reports), reports[0].describe()
    assert {difference.kind for difference in reports[0].differences} >= {"loss", "gradient", "parameter"}


FULL, PACKED = {"recompute": "full"}, {"documents": True}


@pytest.mark.parametrize(
    ("plan", "model", "job"),
    [
        ({"slices": 2}, {}, {"adamw": True}),
        (
            {"slices": 3, "microbatches": 2, **FULL},
            {"family": "llama", "heads": 3, "kv_heads": 1},
            {"documents": True},
        ),
        ({"slices": 4}, {"family": "mistral", "kv_heads": 3, "window": 4}, {"documents": True, "lengths": [31]}),
        ({"slices": 3, **FULL}, {"family": "qwen", "window": 1, "query_key_norm": True}, {"lengths": [1, 2, 5]}),
        ({"slices": 2, "schedule": "gpipe", "microbatches": 3}, {"family": "llama"}, {"positions": True, "more": 1}),
        ({"slices": 3, "replicate": 2, "microbatches": 2, **FULL}, {"kv_heads": 2}, {"documents": True, "more": 1}),
        ({"slices": 2, "shard": 2, "zero": 3, "microbatches": 2}, {"family": "llama"}, {"documents": True}),
        ({"slices": 3, "tensor": 2, **FULL}, {"family": "llama", "kv_heads": 1}, {"documents": True}),
        ({"slices": 2, "tensor": 2, "sequence": True}, {"kv_heads": 2}, {"lengths": [13, 5]}),
        (
            {"slices": 4, "pipeline": 2, "microbatches": 2, **FULL},
            {"family": "llama", "kv_heads": 3},
            {"documents": True},
        ),
        ({"slices": 3, "pipeline": 2, "schedule": "gpipe", "microbatches": 2}, {"tied": True}, {"lengths": [9]}),
        ({"slices": 2, "pipeline": 3, "microbatches": 1, **FULL}, {"tied": False, "layers": 1}, {"lengths": [1, 11]}),
        ({"slices": 3, "pipeline": 2, "replicate": 2, "microbatches": 3}, {"family": "mistral", "window": 5}, {}),
        (
            {"slices": 2, "pipeline": 2, "shard": 2, "zero": 2, "microbatches": 2, **FULL},
            {"family": "llama"},
            {"more": 1},
        ),
        ({"slices": 3, "pipeline": 2, "tensor": 2, "sequence": True, **FULL}, {"family": "llama"}, {}),
    ],
    ids=str,
)
def test_equals_one_device(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any]) -> None:
    assert_agrees(plan, model, job)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    pipeline = draw(st.sampled_from([1, 1, 2]))
    axis = draw(st.sampled_from(["replicate", "shard", "tensor"]))
    plan: dict[str, Any] = {
        "slices": draw(st.integers(2, 5)),
        "pipeline": pipeline,
        axis: draw(st.integers(1, 2)),
        "microbatches": draw(st.integers(1, 3)),
        "schedule": draw(st.sampled_from(["1f1b", "gpipe"])),
        "recompute": draw(st.sampled_from(["none", "full", "every:1", "sqrt"])),
    }
    if plan.get("shard", 1) > 1:
        plan["zero"] = draw(st.integers(0, 3))
    if plan.get("tensor", 1) > 1:
        plan["sequence"] = draw(st.booleans())
    model = {
        "family": draw(st.sampled_from(["gpt2", "llama"])),
        "kv_heads": draw(st.sampled_from([1, 2, 3, 6])) if axis != "tensor" else draw(st.sampled_from([1, 2, 6])),
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


@pytest.mark.parametrize(
    "ids", [[0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 0, 1], [2, 2, 0, 1, 0, 2], [0, 0, 0, 1, 1, 1]], ids=str
)
def test_documents_in_pieces_that_lie_apart(ids: list[int]) -> None:
    """What lies between two pieces of a document is not seen, also where slices hold one document each."""
    ((inputs, targets),) = make_batches([6], 2, documents=False)
    inputs["documents"] = torch.tensor([ids, [0, 0, 1, 1, 0, 0]])
    plan = Plan(slices=3, precision="fp64")
    report = verify(build(small(), VOCABULARY), plan, [(inputs, targets)] * 2, optimizer=SGD(lr=0.5))
    assert report.agrees, report.describe()


def test_a_gradient_that_later_slices_found_is_missed_if_it_is_lost() -> None:
    """The comparison can fail: without the gradients for earlier keys and values it does."""

    def lose(parallel: Parallel) -> None:
        for module in parallel.model.modules():
            if isinstance(module, SlicedAttention):
                at = module._slices.at

                def forgetful(*given: Any, at: Any = at) -> Any:
                    kept, view = at(*given)
                    kept.key_gradients = kept.value_gradients = None
                    return kept, view

                module._slices.at = forgetful  # type: ignore[method-assign]

    plan = Plan(slices=2, recompute="full", precision="fp64")
    report = verify(
        build(small(), VOCABULARY), plan, make_batches([13], 2, False), optimizer=SGD(lr=0.5), sabotage=lose
    )
    assert report.first is not None
    assert report.first.kind == "gradient"
    assert ".attention." in report.first.name or "embedding" in report.first.name


def test_layers_that_are_recomputed_one_by_one_see_their_own_slice() -> None:
    model = build(small(), VOCABULARY)
    model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
    plan = Plan(slices=3, precision="fp64", schedule="gpipe", microbatches=2)
    report = verify(model, plan, make_batches([13], 3, documents=True), optimizer=SGD(lr=0.5))
    assert report.agrees, report.describe()


@pytest.mark.parametrize("window", [0, 3])
def test_a_users_own_module_equals_one_device(window: int) -> None:
    torch.manual_seed(0)
    batches = [({"ids": inputs["tokens"]}, targets) for inputs, targets in make_batches([13, 6], 2, documents=False)]
    report = verify(Own(window), Plan(slices=3, precision="fp64"), batches, optimizer=SGD(lr=0.5))
    assert report.agrees, report.describe()


def test_a_hugging_face_model_equals_one_device() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, initializer_range=0.2, **sizes)
    batches = [({"input_ids": inputs["tokens"]}, targets) for inputs, targets in make_batches([13, 6], 2, False)]
    model = transformers.LlamaForCausalLM(config)
    report = verify(model, Plan(slices=3, precision="fp64", recompute="full"), batches, optimizer=SGD(lr=0.1))
    assert report.agrees, report.describe()


def evaluated(pipeline: int) -> tuple[float, int, float, int, bool, int]:
    plan = Plan(slices=3, pipeline=pipeline, microbatches=2, precision="fp64")
    parallel, other = (parallelize(build(small(), VOCABULARY), plan, optimizer=SGD(lr=0.5), seed=3) for _ in range(2))
    inputs, targets = make_batches([11], 3, documents=True)[0]
    loss_sum, count = parallel.evaluate((inputs, targets))
    model = build(small(), VOCABULARY, "cpu", torch.float64)
    model.load_state_dict(parallel.full_parameters(), strict=False)
    with torch.no_grad():
        logits = model(**inputs)
    expected = float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    training = make_batches([9], 4, documents=False)[0]
    same = parallel.step(training).loss == other.step(training).loss
    left = len(slices_of(parallel)._sequences)
    for spread in (parallel, other):
        spread.close()
    return loss_sum, count, expected, int((targets != -100).sum()), same, left


def slices_of(parallel: Parallel) -> Slices:
    return next(module._slices for module in parallel.model.modules() if isinstance(module, SlicedAttention))


def test_evaluation_counts_every_target_once_and_nothing_is_kept() -> None:
    for loss_sum, count, expected, targets, same, left in [evaluated(1), *run_ranks(evaluated, 2, 2)]:
        assert loss_sum == pytest.approx(expected, rel=1e-12)
        assert count == targets
        assert same
        assert left == 0


def test_dropout_is_the_same_when_a_slice_is_computed_again() -> None:
    class Dropping(nn.Module):
        """Our model drops attention weights too, so dropout stands beside it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = build(small(), VOCABULARY)
            self.model.embedding.dropout.p = 0.5

        def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
            return self.model(tokens, positions)  # type: ignore[no-any-return]

        def initial_value(self, name: str) -> Any:
            return self.model.initial_value(name.removeprefix("model."))

    def gradients(recompute: str) -> tuple[float, dict[str, Tensor]]:
        parallel = parallelize(Dropping(), Plan(slices=3, recompute=recompute), optimizer=SGD(lr=0.5), seed=1)
        parallel.step(make_batches([8], 2, documents=False)[0])
        loss = parallel.step(make_batches([13], 2, documents=False)[0]).loss
        found = parallel.full_gradients()
        parallel.close()
        return loss, found

    (loss, kept), (other_loss, again) = gradients("none"), gradients("full")
    assert loss == other_loss
    assert all(torch.equal(kept[name], again[name]) for name in kept)


class Counts(nn.Module):
    """Counts its forwards in training."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.model = build(small(), VOCABULARY, "cpu")
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        self.calls += 1
        return self.model(tokens, positions)  # type: ignore[no-any-return]


def test_buffers_change_once_a_slice() -> None:
    model = Counts()
    model.model.stages = ()  # type: ignore[assignment]
    parallel = parallelize(model, Plan(slices=3, recompute="full"), optimizer=SGD(lr=0.1))
    parallel.step(make_batches([8], 2, documents=False)[0])
    assert float(model.calls) == 3
    parallel.close()


# Memory


class Held:
    """Bytes of the tensors that autograd holds at once, beside parameters."""

    def __init__(self, parallel: Parallel) -> None:
        self.now = self.most = 0
        self.parameters = {p.untyped_storage().data_ptr() for p in parallel.model.parameters()}

    def pack(self, tensor: Tensor) -> "Counted":
        return Counted(self, tensor)


class Counted:
    def __init__(self, held: Held, tensor: Tensor) -> None:
        own = tensor.untyped_storage().data_ptr() not in held.parameters
        self.held, self.tensor, self.size = held, tensor, own * tensor.numel() * tensor.element_size()
        held.now += self.size
        held.most = max(held.most, held.now)

    def __del__(self) -> None:
        self.held.now -= self.size


def most_held(**plan: Any) -> tuple[int, int]:
    """The most bytes that autograd holds in a step over one sequence, and the bytes of keys and values."""
    config = ModelConfig(family="llama", layers=3, hidden=32, heads=4, kv_heads=2, sequence=128)
    parallel = parallelize(build(config, VOCABULARY), Plan(**plan), optimizer=SGD(lr=0.1))
    batch = make_batches([128], 1, documents=False)[0]
    parallel.step(batch)
    held, kept = Held(parallel), 0
    runner, finished = parallel._runner, parallel._runner.finished

    def measure(number: int) -> None:
        nonlocal kept
        sequences = slices_of(parallel)._sequences[0]
        kept = sum(t.numel() * t.element_size() for k in sequences.kept.values() for t in (k.keys, k.values))
        finished(number)

    if plan["slices"] > 1:
        runner.finished = measure
    gc.collect()
    with saved_tensors_hooks(held.pack, lambda counted: counted.tensor):
        parallel.step(batch)
    return held.most, kept


def test_memory_falls_to_one_slices_activations_and_the_keys_and_values_of_all() -> None:
    whole, _ = most_held(slices=1)
    merely_cut, kept = most_held(slices=4)
    again, also_kept = most_held(slices=4, recompute="full")
    assert kept == also_kept == 2 * 128 * (2 * 8) * 3 * 4  # keys and values: positions, key heads, layers, float32
    assert merely_cut > 0.8 * whole  # without recomputation every slice's activations wait for its backward
    assert again < 0.27 * whole


# Refusals


def refusal(model: nn.Module) -> str:
    with pytest.raises(ValueError, match="plan.slices") as caught:
        parallelize(model, Plan(slices=2), optimizer=SGD(lr=0.1))
    return str(caught.value)


def test_models_that_cannot_be_cut_are_refused_with_the_reason() -> None:
    assert "attention_cores" in refusal(nn.Linear(2, 2))
    assert "takes no `positions`" in refusal(Unplaced())
    assert "set plan.slices = 1" in refusal(Unplaced())
    assert "'extra' is a Conv1d, which looks across positions" in refusal(Own(extra=nn.Conv1d(3, 3, 3)))
    assert "drops attention weights" in refusal(build(small(dropout=0.1), VOCABULARY))
    assert "does not compute causal softmax attention" in refusal(changed(attention_cores=["extra"], extra=Sees()))
    stretched = small(family="llama", rope_scaling={"kind": "dynamic", "factor": 2.0, "original_sequence": 8})
    assert "dynamic rotary scaling" in refusal(build(stretched, VOCABULARY))
    check_model(build(small(), VOCABULARY), "slices")


class Twice(Own):
    """Calls one layer two times."""

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        assert position_ids is not None
        x = self.tokens(ids) + self.places(position_ids)
        return self.head(self.layers[0](self.layers[0](x)))  # type: ignore[no-any-return]


class Invents(Shortens):
    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.model(tokens, positions, torch.zeros_like(tokens))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Shortens(build(small(), VOCABULARY, "cpu")), "2 keys for a slice of 3 positions"),
        (lambda: Invents(build(small(), VOCABULARY, "cpu")), "documents that are not the batch's"),
        (lambda: Twice(), "more than once for a sequence"),
    ],
)
def test_attention_to_anything_but_the_batchs_sequence_is_refused(make: Any, reason: str) -> None:
    model = make()
    parallel = parallelize(model, Plan(slices=2), optimizer=SGD(lr=0.1))
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    name = "ids" if isinstance(model, Own) else "tokens"
    with pytest.raises(ValueError, match=reason):
        parallel.step(({name: tokens}, tokens))
    parallel.close()


def test_batches_without_a_sequence_are_refused() -> None:
    parallel = parallelize(build(small(), VOCABULARY), Plan(slices=2), optimizer=SGD(lr=0.0))
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="plan.slices adds 'positions' .* not a Tensor"):
        parallel.step((tokens, tokens))
    parallel.close()
