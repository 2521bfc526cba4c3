"""Gradients of what every tensor rank holds whole (CASES 6), and work in place behind divided layers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.loss import cross_entropy
from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import SGD
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.verify import Report, verify
from tests.pool import run_ranks

VOCABULARY = 19
CONFIG = ModelConfig(
    family="qwen", layers=2, hidden=16, heads=4, kv_heads=2, intermediate=10, sequence=8, query_key_norm=True
)


def example() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    model = build(CONFIG, VOCABULARY, device="cpu", dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    tokens, targets = torch.randint(VOCABULARY, (2, 3, 7))
    return model, tokens, targets


def of_norms(sequence: bool) -> dict[str, Tensor]:
    """The gradients of the norms as they lie on this rank before the update."""
    model, tokens, targets = example()
    parallel = parallelize(model, Plan(tensor=2, sequence=sequence, precision="fp64"), optimizer=SGD(lr=0.0))
    parallel.step(({"tokens": tokens}, targets))
    found = {
        entry.name: bucket.view(bucket.own_gradient, entry).clone()
        for bucket, entry in parallel.chunks[0].buckets
        if "norm" in entry.name
    }
    parallel.close()
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_a_norms_gradient_is_the_whole_one_on_both_ranks(sequence: bool) -> None:
    """CASES 6: of norms in the split stream, and of query and key norms, which are fed by local heads only."""
    model, tokens, targets = example()
    loss = cross_entropy.sum(model(tokens), targets) / targets.numel()
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if "norm" in name}
    assert sum("query_norm" in name or "key_norm" in name for name in expected) == 4
    first, second = run_ranks(of_norms, 2, sequence)
    assert first.keys() == second.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], gradient, rtol=1e-10, atol=1e-13)


class InPlace(nn.Module):
    """Works in place on what divided layers return, for one row as well."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.out = nn.Linear(6, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x.mul_(1.5)
        y = self.up(x)
        y[:, 0] *= 2.0
        z = self.down(y.relu_())
        z.add_(x)
        z[:, 0].add_(0.5)
        return self.out(z)


RULES: dict[str, Any] = {"tokens": "vocabulary", "up": "column", "down": "row", "out": "vocabulary"}


def check_in_place(rows: int, apart: bool) -> Report:
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (rows, 6))
    batches = [({"tokens": tokens}, tokens.roll(-1, 1))] * 2
    plan = Plan(tensor=2, precision="fp64")
    if not apart:
        return verify(InPlace(), plan, batches, optimizer=SGD(lr=0.1), rules=RULES)
    with pytest.MonkeyPatch.context() as patch:  # as between machines
        patch.setattr("shardwise.host_memory.HostLink.connect", lambda axis: None)
        return verify(InPlace(), plan, batches, optimizer=SGD(lr=0.1), rules=RULES)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_divided_layers_outputs_may_be_changed_in_place(rows: int, apart: bool) -> None:
    for report in run_ranks(check_in_place, 2, rows, apart):
        assert report.agrees, report.describe()
