"""Muon: its reference beside torch's, what it makes of singular values, and what it asks other ranks for."""

import pytest
import torch
from torch import nn

from shardwise.optimizers import AdamW, Muon
from shardwise.optimizers import muon as module
from tests.optimizers.fragments import Parameter, Ranks, draw
from tests.optimizers.layouts import Layout, train


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
@pytest.mark.parametrize(("adjustment", "torchs"), [("match-rms", "match_rms_adamw"), ("original", "original")])
def test_the_reference_is_torchs_rule_to_the_precision_of_bf16(
    shape: tuple[int, int], adjustment: str, torchs: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    mine, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    reference = Muon(lr=0.02, weight_decay=0.5, adjustment=adjustment).reference([("w", mine)], [])  # type: ignore[arg-type]
    theirs = torch.optim.Muon([other], lr=0.02, weight_decay=0.5, momentum=0.95, nesterov=True, adjust_lr_fn=torchs)
    for _ in range(3):
        mine.grad = torch.randn(shape, generator=generator)
        other.grad = mine.grad.clone()
        reference.step()
        theirs.step()
    assert float((mine - other).detach().norm() / (other - start).detach().norm()) < 0.02


@pytest.mark.parametrize("split", [None, 0, 1])
def test_singular_values_of_the_step_are_about_one(split: int | None) -> None:
    layout = Layout((Parameter("up", (40, 24), split, (0.3, 0.6)),), 2)
    optimizer = Muon(lr=1.0, weight_decay=0.0, adjustment="original", iterations=8)
    change = train(optimizer, layout, 3, steps=1).values()[0] - draw(layout.parameters, 3)[0]
    singular = torch.linalg.svdvals(change) / (40 / 24) ** 0.5
    assert float(singular.max()) < 1.3
    assert float(singular.min()) > 0.6


def test_embeddings_heads_and_vectors_are_adamws() -> None:
    names = (
        "embedding.tokens.weight",
        "transformer.wte.weight",
        "head.output.weight",
        "lm_head.weight",
        "model.head.weight",
    )
    parameters = (*(Parameter(name, (6, 4), 0, (0.4,)) for name in names), Parameter("norm.weight", (8,), None, (0.1,)))
    muon, adamw = (train(optimizer, Layout(parameters, 2), 0) for optimizer in (Muon(), AdamW()))
    assert all(torch.equal(a, b) for a, b in zip(muon.values(), adamw.values(), strict=True))
    layout = Layout((Parameter("blocks.0.attention.heads.weight", (6, 4)),), 1)
    assert not torch.equal(train(Muon(), layout, 0).values()[0], train(AdamW(), layout, 0).values()[0])


def test_matrices_are_gathered_once_and_only_divided_ones_are_summed_in_every_iteration() -> None:
    optimizer = Muon(iterations=4)
    shared = [Parameter("a", (6, 4), None, (0.5,)), Parameter("b", (3, 5, 5), 0, (0.2,))]
    assert Ranks(optimizer, shared, draw(shared, 0), 2).step(draw(shared, 1), 1) == 1
    divided = [*shared, Parameter("c", (6, 4), 0, (0.5,)), Parameter("d", (4, 6), 1, (0.1,))]
    assert Ranks(optimizer, divided, draw(divided, 0), 2).step(draw(divided, 1), 1) == 1 + 4
    # The sums of divided matrices are of the undivided dimension squared.
    fragments = Ranks(optimizer, divided, draw(divided, 0), 2).fragments[0, 0]
    asked = list(optimizer.update(fragments, lr=1e-2, step=1, scale=1.0))
    assert [(len(s.tensor), s.split) for s in asked[1]] == [(4 * 4 + 4 * 4, True)]


def test_gathering_is_done_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = tuple(Parameter(f"w{i}", (6, 4), None, (0.3,)) for i in range(5))
    together = train(Muon(), Layout(parameters, 1), 0).values()
    monkeypatch.setattr(module, "GATHERED", 50)
    ranks = Ranks(Muon(), parameters, draw(parameters, 0), 1)
    assert ranks.step(draw(parameters, 1), 1) == 3
    apart = train(Muon(), Layout(parameters, 1), 0).values()
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_a_matrix_without_gradient_only_decays() -> None:
    parameter = Parameter("w", (6, 4), 1, (0.3,))
    start = draw([parameter], 0)
    ranks = Ranks(Muon(lr=0.1, weight_decay=0.5), [parameter], start, 2)
    ranks.step([torch.zeros(6, 4, dtype=torch.float64)], 1)
    torch.testing.assert_close(ranks.values()[0], start[0] * 0.95)


def test_no_iterations_are_refused() -> None:
    with pytest.raises(ValueError, match="optimizer.iterations = 0 makes nothing orthogonal; give at least 1"):
        Muon(iterations=0)
