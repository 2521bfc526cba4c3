"""Every optimizer on parameters cut anywhere against its whole-matrix reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.optimizers import SGD, Adafactor, AdamW, AdamW8bit, Lion, Muon, Optimizer, Override
from tests.optimizers.fragments import Parameter, Ranks, distance, draw
from tests.optimizers.layouts import Layout, expected, layouts, train, update_error

OVERRIDES = {"blocks.0.*": Override(lr_scale=0.5), "*norm*": Override(weight_decay=0.3)}
EXACT: dict[str, Optimizer] = {
    "adamw": AdamW(lr=1e-2, overrides=OVERRIDES),
    "sgd": SGD(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, overrides=OVERRIDES),
    "sgd-plain": SGD(lr=1e-2),
    "lion": Lion(lr=1e-2, overrides=OVERRIDES),
    "adafactor": Adafactor(weight_decay=0.1, overrides=OVERRIDES),
    "adafactor-momentum": Adafactor(momentum=0.9, clip_threshold=0.5, decay_rate=0.7, eps2=0.1),
    "adafactor-lr": Adafactor(lr=1e-2, relative_step=False, scale_parameter=False),
    "muon": Muon(lr=1e-2, overrides=OVERRIDES),
    "muon-original": Muon(lr=1e-2, nesterov=False, adjustment="original", iterations=3, exclude=("blocks.1.*",)),
    "adamw-8bit-excluded": AdamW8bit(lr=1e-2, exclude=("*",), overrides=OVERRIDES),
}
MATRIX = Parameter("blocks.0.up.weight", (256, 1024))
VECTOR = Parameter("blocks.0.norm.weight", (1024,))
EMBEDDING = Parameter("embedding.weight", (64, 128))


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(layout=layouts(), seed=st.integers(0, 1000))
def test_any_cut_computes_what_the_whole_does(name: str, layout: Layout, seed: int) -> None:
    assert update_error(EXACT[name], layout, seed) <= 1e-10


@pytest.mark.parametrize("name", EXACT)
def test_float32_does_to_its_precision(name: str) -> None:
    parameters = (
        Parameter("blocks.0.up.weight", (33, 20), 0, (0.3, 0.71)),
        Parameter("embedding.weight", (17, 40), 1, (0.2, 0.2)),
        Parameter("blocks.0.norm.weight", (40,), None, (0.5, 1.0)),
        Parameter("blocks.1.up.weight", (3, 10, 12), 1, (0.1, 0.6)),
    )
    found = train(EXACT[name], Layout(parameters, 2), 0, dtype=torch.float32).values()
    assert {value.dtype for value in found} == {torch.float32}
    assert distance(found, expected(EXACT[name], parameters, 0)) <= 1e-5


@pytest.mark.parametrize("name", EXACT)
def test_what_is_larger_than_a_chunk_is_not_different(name: str) -> None:
    parameters = (
        Parameter("blocks.0.up.weight", (520, 300), 1, (0.4567,)),
        Parameter("blocks.1.up.weight", (3, 300, 200), None, (0.81,)),
        Parameter("embedding.weight", (2, 140_000), None, (0.31,)),
    )
    optimizer = EXACT[name]
    if isinstance(optimizer, Muon):
        parameters = parameters[:2]
    assert update_error(optimizer, Layout(parameters, 2), 0, steps=1) <= 1e-10


@pytest.mark.parametrize("name", EXACT)
def test_the_learning_rate_may_be_a_tensor_and_is_not_the_optimizers(name: str) -> None:
    layout = Layout((Parameter("blocks.0.up.weight", (9, 7), None, (0.4,)),), 1)
    number = train(EXACT[name], layout, 0, lr=0.003).values()
    tensor = train(EXACT[name], layout, 0, lr=torch.tensor(0.003, dtype=torch.float64)).values()
    assert torch.equal(number[0], tensor[0])
    assert not torch.equal(number[0], train(EXACT[name], layout, 0).values()[0])


@pytest.mark.parametrize(
    ("optimizer", "parameter", "num_bytes"),
    [
        (AdamW(), MATRIX, 8 * 256 * 1024),
        (AdamW(), VECTOR, 8 * 1024),
        (SGD(), MATRIX, 0),
        (SGD(momentum=0.9), MATRIX, 4 * 256 * 1024),
        (Lion(), MATRIX, 4 * 256 * 1024),
        (Adafactor(), MATRIX, 4 * (256 + 1024)),
        (Adafactor(), VECTOR, 4 * 1024),
        (Adafactor(), Parameter("experts", (8, 16, 32)), 4 * 8 * (16 + 32)),
        (Adafactor(momentum=0.9), MATRIX, 4 * 256 * 1024 + 4 * (256 + 1024)),
        (AdamW8bit(), MATRIX, 2 * 256 * 1024 + 8 * 1024),
        (AdamW8bit(block=2048), MATRIX, 2 * 256 * 1024 + 8 * 128),
        (AdamW8bit(), VECTOR, 8 * 1024),
        (AdamW8bit(), EMBEDDING, 8 * 64 * 128),
        (Muon(), MATRIX, 4 * 256 * 1024),
        (Muon(), VECTOR, 8 * 1024),
        (Muon(), EMBEDDING, 8 * 64 * 128),
    ],
    ids=lambda value: value.name if isinstance(value, Parameter) else str(value).split("(")[0],
)
def test_state_bytes(optimizer: Optimizer, parameter: Parameter, num_bytes: int) -> None:
    values = draw([parameter], 0, torch.float32)
    assert Ranks(optimizer, [parameter], values, 1).state_bytes() == num_bytes
    halves = Ranks(optimizer, [Parameter(parameter.name, parameter.shape, None, (0.5,))], values, 1)
    factored = sum(4 * len(t.view(-1)) for n, t in halves.fragments[0, 0][0].state.items() if n in optimizer.factored)
    assert halves.state_bytes() == num_bytes + factored


def test_moments_are_as_the_engine_is_told() -> None:
    for optimizer in EXACT.values():
        for shape in ((), (5,), (4, 6), (2, 3, 4), (2, 2, 2, 2)):
            fragment = Ranks(
                optimizer, [Parameter("x", shape, None, (0.4,))], draw([Parameter("x", shape)], 0), 1
            ).fragments[0, 1][0]
            for name, moment in fragment.state.items():
                kept = optimizer.factored.get(name)
                length = fragment.stop - fragment.start if kept is None else math.prod(shape[dim] for dim in kept)
                assert moment.numel() == length, (optimizer, shape, name)
