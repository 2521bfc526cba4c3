"""Random numbers (CASES 14): alike on the tensor ranks where the stream is whole, a rank's own where it is divided,
never alike on data ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import SGD
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from tests.pool import run_ranks


def masks(sequence: bool) -> dict[str, Any]:
    """What the dropout modules of a step dropped, what the attention weights' numbers were, and the stream's number
    behind it all."""
    config = ModelConfig(family="gpt2", layers=2, hidden=8, heads=2, sequence=8, dropout=0.5)
    model = build(config, 16)
    plan = Plan(replicate=2, tensor=2, sequence=sequence)
    parallel = parallelize(model, plan, optimizer=SGD(lr=0.1))
    found: dict[str, Any] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if isinstance(module, nn.Dropout):
                found.setdefault(name, []).append((output == 0).detach().clone())

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    core = model.blocks[1].attention.core

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        found["core"] = torch.rand(8)
        return q + k + v

    core.forward = attend
    model.head.register_forward_hook(lambda *_: found.update(after=torch.rand(8)))
    tokens = torch.arange(8).view(2, 4)
    parallel.step(({"tokens": tokens}, tokens))
    parallel.close()
    return found


def differ(left: Any, right: Any) -> bool:
    pairs = zip(left, right, strict=True) if isinstance(left, list) else [(left, right)]
    return all(not torch.equal(a, b) for a, b in pairs)


def same(left: Any, right: Any) -> bool:
    pairs = zip(left, right, strict=True) if isinstance(left, list) else [(left, right)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("sequence", [False, True])
def test_masks_are_alike_exactly_where_the_stream_is_whole(sequence: bool) -> None:
    first, second, third, fourth = run_ranks(masks, 4, sequence)  # data ranks (0, 1) and (2, 3)
    streams = [name for name in first if "dropout" in name]
    assert len(streams) == 3
    for name in streams:
        assert (differ if sequence else same)(first[name], second[name])
        assert (differ if sequence else same)(third[name], fourth[name])
        assert differ(first[name], third[name])
    assert len(first["blocks.0.dropout"]) == 2  # behind attention and behind the feed-forward part
    assert differ(*first["blocks.0.dropout"]) if not sequence else True
    assert differ(first["core"], second["core"])
    assert differ(first["core"], third["core"])
    assert same(first["after"], second["after"])  # the common stream has gone on alike


def repeated() -> tuple[bool, bool]:
    """Whether a divided module draws the same again from the same state, and something else from the next."""
    config = ModelConfig(family="gpt2", layers=1, hidden=8, heads=2, sequence=8, dropout=0.5)
    model = build(config, 16)
    parallel = parallelize(model, Plan(tensor=2, sequence=True))
    dropout, ones = model.blocks[0].dropout, torch.ones(64)
    state = torch.get_rng_state()
    first, other = dropout(ones), dropout(ones)
    torch.set_rng_state(state)
    again = dropout(ones)
    parallel.close()
    return torch.equal(first, again), torch.equal(first, other)


def test_recomputation_draws_the_same() -> None:
    assert run_ranks(repeated, 2) == [(True, False)] * 2
