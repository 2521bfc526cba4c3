"""What is kept within a limit: the best choice by trying all, and measured bytes against the field's formulas."""

import itertools
import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.memory.attention import Given, attention, keep, known
from shardwise.memory.choice import Costs, Item, Moment, least_bytes, options, peak, solve
from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import SGD
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from tests.pool import run_ranks


def drawn(generator: random.Random, moments: tuple[Moment, ...]) -> Costs:
    plain = generator.randint(20, 40) * 100
    items = [Item(str(n), generator.randint(1, 6) * 100, generator.random()) for n in range(generator.randint(0, 3))]
    return Costs(
        "block",
        generator.randint(1, 5) * 100,
        plain,
        plain,
        generator.random(),
        tuple(items),
        generator.choice((0, 500)),
        moments,
        generator.randint(1, 3),
    )


def test_no_choice_within_the_limit_takes_less_time() -> None:
    generator = random.Random(0)
    for trial in range(60):
        # Of two stages, at one moment or at several.
        count = 1 + trial % 3
        stages = [tuple(Moment(generator.randint(1, 3), generator.randint(0, 2)) for _ in range(count)) for _ in "12"]
        blocks = [drawn(generator, stages[number // 2]) for number in range(3)]
        limit = generator.randint(500, 14000)
        sets = itertools.product(*(options(costs) for costs in blocks))

        def total(chosen: object, blocks: list[Costs] = blocks) -> tuple[float, float]:
            pairs = list(zip(chosen, blocks, strict=True))  # type: ignore[call-overload]
            return peak(blocks, [o.size for o, _ in pairs]), sum(o.seconds * c.runs for o, c in pairs)

        fitting = [seconds for size, seconds in map(total, sets) if size <= limit]
        size, seconds = total(solve(blocks, limit))
        if fitting:
            assert size <= limit
            # Within the rounding of the limit to steps.
            assert seconds <= min(fitting) * 1.15 + 1e-9
        else:
            assert size == least_bytes(blocks)


def test_half_of_equal_blocks_fit_in_half_of_their_bytes() -> None:
    blocks = [Costs("b", 100, 1100, 1100, 1.0, (), 0, (Moment(1, 0),), 1)] * 4
    assert [option.kept for option in solve(blocks, 2 * 1100 + 2 * 100)].count(None) == 2


ROWS, LENGTH, HIDDEN, HEADS = 2, 64, 128, 4


def measured(how: str, dropout: float, core: bool, **plan: Any) -> tuple[float, float]:
    """What a block keeps, and what it would without recomputation, in elements a position and channel (s b h)."""
    config = ModelConfig(family="gpt2", layers=1, hidden=HIDDEN, heads=HEADS, sequence=LENGTH, dropout=dropout)
    model = build(config, 8)
    if not core:
        model.blocks[0].attention.core.dropout = 0.0
    parallel = parallelize(model, Plan(recompute=how, **plan), optimizer=SGD(lr=0.1))
    tokens = torch.randint(8, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        parallel.step(({"tokens": tokens}, tokens))
    assert parallel.recomputed is not None
    assert parallel.memory()["activations"] == parallel.recomputed.kept_bytes
    (costs,), (option,) = parallel.recomputed.blocks, parallel.recomputed.chosen
    parallel.close()
    unit = 4 * ROWS * LENGTH * HIDDEN
    return option.size / unit, costs.without / unit


@pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("core", [False, True])
def test_bytes_are_those_of_the_formulas(core: bool, tensor: int, sequence: bool) -> None:
    """2205.05198, equations 1, 2 and 4: s b h (10 + 24 / t + 5 a s / (h t)), with the sequence divided all of it by t,
    with two bytes an activation, one a mask; here four for each."""
    whole, t = (tensor if sequence else 1), tensor
    # Full: the input. Selective: the input and attention's projected output; q, k, v, attention, and four for the
    # feed-forward part, which are divided either way; beside attention a sum of each query's scores, or with dropout
    # a bit of each weight and the generator's state.
    bits = HEADS * ROWS * LENGTH**2 / 8 / t + torch.get_rng_state().numel()
    beside = (bits if core else 4 * HEADS * ROWS * LENGTH / t) / (4 * ROWS * LENGTH * HIDDEN)
    expected = {"full": 1 / whole, "selective": 2 / whole + 8 / t + beside}
    weights = 3 * HEADS * LENGTH / HIDDEN if core else 0
    without = 6 / whole + (12 + weights) / t
    for how, kept in expected.items():
        for found in run_ranks(partial(measured, tensor=tensor, sequence=sequence), tensor, how, 0.1, core):
            assert found == pytest.approx((kept, without), rel=0.005)


@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("mask", [False, True])
def test_attention_with_dropout_by_heads_has_the_bits_of_torchs(shared: int, mask: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for length, size in ((9, 4), (37, 6), (64, 32)):
        q, k, v = (
            torch.randn(3, length, heads, size, generator=generator).transpose(1, 2).requires_grad_()
            for heads in (4, shared, shared)
        )
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1) if mask else None
        added = None if hidden is None else torch.zeros(1, 1, length, length).masked_fill(hidden, -math.inf)
        given = Given(q, k, v, added, added is None, 0.3)
        state = torch.get_rng_state()

        def found(out: Tensor, tensors: tuple[Tensor, ...] = (q, k, v)) -> list[Tensor]:
            grad = torch.linspace(-1, 1, out.numel()).view(out.shape)
            return [out, *torch.autograd.grad(out, tensors, grad), torch.get_rng_state()]

        expected = found(given.plainly())
        torch.set_rng_state(state)
        once = found(attention(given))
        torch.set_rng_state(state)
        with torch.no_grad():
            _, kept = keep(given)
        torch.set_rng_state(state)
        again = found(known(kept, given))
        for others in (once, again):
            assert all(map(torch.equal, expected, others))
