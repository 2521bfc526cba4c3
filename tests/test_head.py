"""The loss with its output matrix against the two by themselves, and what is held meanwhile."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise import head
from shardwise.gradient import Slot, Tape, hook
from shardwise.head import Alone, Head, Logits
from shardwise.loss import CrossEntropy, Loss, cross_entropy_with
from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import SGD
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.verify import Report, verify
from tests.pool import run_ranks

HIDDEN, VOCABULARY = 6, 11


def example(rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(rows, length, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (rows, length), generator=generator)
    targets[torch.rand(rows, length, generator=generator) < 0.3] = -100
    return x.requires_grad_(), targets


def matrix(bias: bool) -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(HIDDEN, VOCABULARY, bias=bias).double()


def fused(module: nn.Linear, terms: CrossEntropy, slots: dict[str, Slot], tape: Tape) -> tuple[Head, Loss]:
    made = Head(module, slots, tape, Alone(VOCABULARY))
    return made, made.loss(terms, cross_entropy_with(terms.label_smoothing, terms.z_loss))


TERMS = [CrossEntropy(), CrossEntropy(0.1), CrossEntropy(0.0, 1e-2), CrossEntropy(0.3, 1e-3)]


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "length", "chunk"), [(2, 7, 1), (1, 9, 4), (3, 5, 256), (0, 4, 256)])
@pytest.mark.parametrize("lands", ["slots", "autograd", "later"])
def test_equals_the_loss_of_the_logits(
    monkeypatch: pytest.MonkeyPatch, terms: CrossEntropy, bias: bool, rows: int, length: int, chunk: int, lands: str
) -> None:
    monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
    x, targets = example(rows, length)
    plain = matrix(bias)
    expected = cross_entropy_with(terms.label_smoothing, terms.z_loss).sum(plain(x), targets)
    factor = torch.tensor(0.7, dtype=torch.float64)
    expected.backward(factor)
    assert x.grad is not None
    expected_x, x.grad = x.grad, None

    module, tape, landed = matrix(bias), Tape(), []
    names = [name for name, _ in module.named_parameters()] if lands != "autograd" else []
    slots = {n: Slot(n, True, landed.append, torch.full_like(getattr(module, n), float("nan"))) for n in names}
    for name, slot in slots.items():
        hook(module.get_parameter(name), slot)
    made, loss = fused(module, terms, slots, tape)
    tape.record = [] if lands == "later" else None
    with made.promising():
        logits = module(x)
    assert type(logits) is Logits
    found = loss.sum(logits, targets)
    assert rows == 0 or found.isnan()  # nothing has been computed yet
    found.backward(factor)
    if tape.record is not None:
        assert not landed
        with torch.no_grad():
            for work in tape.record:
                work()
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(x.grad, expected_x, rtol=1e-12, atol=1e-14)
    for name, parameter in plain.named_parameters():
        gradient = slots[name].view if name in slots else getattr(module, name).grad
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)
    assert sorted(slot.name for slot in landed) == sorted(names)  # a contribution each, whatever the chunks
    with torch.no_grad(), made.promising():
        again = loss.sum(module(x), targets)
    torch.testing.assert_close(again, expected.detach(), rtol=1e-13, atol=0)


def test_logits_stay_finite_and_exact_where_they_are_large() -> None:
    x, targets = example(2, 5)
    module = matrix(False)
    made, loss = fused(module, CrossEntropy(), {}, Tape())
    with made.promising():
        found = loss.sum(module(x * 1e4), targets)
    found.backward()
    expected = cross_entropy_with().sum(made.compute(x.detach() * 1e4), targets)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=0)
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_who_looks_at_promised_logits_gets_them() -> None:
    x, targets = example(2, 5)
    module = matrix(True)
    made, loss = fused(module, CrossEntropy(), {}, Tape())
    with made.promising():
        logits = module(x)
    assert logits.shape == (2, 5, VOCABULARY)
    assert torch.equal(logits, made.compute(x))
    assert logits.dtype == torch.float64
    assert not loss.sum(logits, targets).isnan()
    with made.promising():
        scaled = module(x) * 2
    assert type(scaled) is Tensor
    assert torch.equal(scaled, made.compute(x) * 2)
    with made.promising():
        logits = module(x)
    assert logits.untyped_storage().nbytes() == 10 * VOCABULARY * 8  # asked for, hence there
    assert type(module(x)) is Tensor  # no loss to come


def test_a_target_outside_the_vocabulary_is_an_error() -> None:
    x, targets = example(1, 3)
    module = matrix(False)
    made, loss = fused(module, CrossEntropy(), {}, Tape())
    with pytest.raises(IndexError, match="outside the 11 tokens"), torch.no_grad(), made.promising():
        loss.sum(module(x), targets.fill_(VOCABULARY))


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


class Scaled(nn.Module):
    """Does something with its logits before it returns them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.out = nn.Linear(HIDDEN, VOCABULARY)
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor
        if self.how == "other values":
            twice = {name: value * 2 for name, value in self.out.named_parameters()}
            logits = torch.func.functional_call(self.out, twice, (self.tokens(tokens),))
        else:
            logits = self.out(self.tokens(tokens))
        if self.how == "hook" and logits.requires_grad:
            logits.register_hook(lambda gradient: gradient * 0.5)
        if self.how == "function":
            return _Halved.apply(logits)
        if self.how == "in place":
            return logits.mul_(0.5)
        return logits * 0.5 if self.how == "product" else logits


RULES: dict[str, Any] = {"tokens": "vocabulary", "out": "vocabulary"}


def check(plan: dict[str, Any], how: str) -> Report:
    torch.manual_seed(7)
    tokens = torch.randint(VOCABULARY, (4, 5))
    full = Plan(precision="fp64", **plan)
    batches = [({"tokens": tokens}, tokens.roll(-1, 1))] * 2
    with patch.object(head, "CHUNK_TOKENS", 1):
        return verify(Scaled(how), full, batches, optimizer=SGD(lr=0.3), rules=RULES)


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        *(({}, how) for how in ("nothing", "product", "function", "hook", "in place", "other values")),
        *(({"tensor": 2, "sequence": True}, how) for how in ("nothing", "function", "in place")),
        *(({"shard": 2, "zero": 3}, how) for how in ("nothing", "function", "hook")),
    ],
    ids=str,
)
def test_own_models_equal_one_device_whatever_they_do_with_logits(plan: dict[str, Any], how: str) -> None:
    reports = run_ranks(check, Plan(**plan).num_ranks, plan, how)
    assert all(report.agrees for report in reports), reports[0].describe()


# Memory

ROWS, LENGTH, LARGE = 4, 64, 509


def largest(kind: str, plan: dict[str, Any]) -> tuple[int, int]:
    """The largest tensor a training step makes, and an evaluation, in elements."""
    torch.manual_seed(7)
    if kind == "llama":
        import transformers

        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=LARGE, **sizes))
        name = "input_ids"
    else:
        tied = kind == "tied"
        model = build(ModelConfig(family="gpt2", layers=1, hidden=8, heads=2, sequence=LENGTH, tied=tied), LARGE)
        name = "tokens"
    parallel = parallelize(model, Plan(**plan), optimizer=SGD(lr=0.1))
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    found: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and not result.is_meta:
                found.append(result.untyped_storage().nbytes() // result.element_size())
            return result

    batch = parallel.share(({name: tokens}, tokens))
    with Watch(), patch.object(head, "CHUNK_TOKENS", 16):
        parallel.step(batch)
        trained = max(found)
        found.clear()
        parallel.evaluate(batch)
    parallel.close()
    return trained, max(found)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("untied", {}),
        ("tied", {}),
        ("untied", {"tensor": 2}),
        ("tied", {"tensor": 2, "sequence": True}),
        ("untied", {"pipeline": 2, "schedule": "zb-h1", "microbatches": 2}),
        ("untied", {"pipeline": 2, "schedule": "pipedream", "microbatches": 2}),
        ("llama", {}),
        ("llama", {"tensor": 2}),
        ("untied", {"shard": 2, "zero": 3}),
        ("untied", {"context": 2}),
    ],
    ids=str,
)
def test_no_rank_ever_holds_all_logits(kind: str, plan: dict[str, Any]) -> None:
    full = Plan(**plan)
    logits = ROWS * LENGTH * LARGE // (full.tensor * full.data_parallel * full.microbatches * full.context)
    for trained, evaluated in run_ranks(largest, full.num_ranks, kind, plan):
        assert max(trained, evaluated) < logits / 2
