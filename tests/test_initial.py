"""Initial values: bitwise the same in any layout, and a rank draws only what it holds."""

import math

import pytest
import torch
from torch import Tensor, nn

import shardwise.initial
from shardwise.initial import BLOCK_ELEMENTS, Initial, draw_rows, initial_of, seed_of

NORMAL = Initial("normal", 0.5)


@pytest.mark.parametrize(
    "shape", [(7, 5), (1000, 130), (3, 2, 2, 2), (11,), (2 * BLOCK_ELEMENTS + 3,), (2, BLOCK_ELEMENTS + 1)]
)
def test_any_rows_are_bitwise_those_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = draw_rows("w", shape, NORMAL, 1, 0, shape[0])
    for start, stop in [(0, 1), (shape[0] // 3, shape[0] // 2 + 1), (shape[0] - 1, shape[0]), (1, 1)]:
        assert torch.equal(draw_rows("w", shape, NORMAL, 1, start, stop), whole[start:stop])


def test_a_part_draws_only_the_blocks_that_overlap_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (4096, 256)  # 16 blocks of 256 rows
    drawn = 0
    normal_ = Tensor.normal_

    def counting(tensor: Tensor, *args: float, **named: object) -> Tensor:
        nonlocal drawn
        drawn += tensor.numel()
        return normal_(tensor, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(shardwise.initial.torch.Tensor, "normal_", counting)
    draw_rows("w", shape, NORMAL, 0, 1024, 2048)
    assert drawn == 1024 * 256  # a quarter that begins and ends with a block: nothing beside it
    drawn = 0
    draw_rows("w", shape, NORMAL, 0, 1000, 1030)
    assert drawn == 2 * BLOCK_ELEMENTS  # 30 rows across a block's edge


def test_values_depend_on_seed_name_and_block_and_nothing_else() -> None:
    torch.manual_seed(3)
    first = draw_rows("a", (600, 300), NORMAL, 0, 0, 600)
    state = torch.get_rng_state()
    again = draw_rows("a", (600, 300), NORMAL, 0, 0, 600)
    assert torch.equal(first, again)
    assert torch.equal(
        state, torch.get_rng_state()
    )  # the program's own random numbers go on as if nothing had been drawn
    assert not torch.equal(first, draw_rows("b", (600, 300), NORMAL, 0, 0, 600))
    assert not torch.equal(first, draw_rows("a", (600, 300), NORMAL, 1, 0, 600))
    rows = BLOCK_ELEMENTS // 300
    assert not torch.equal(first[:rows], first[rows : 2 * rows])  # blocks are not copies of each other
    assert seed_of(0, "a", 1) != seed_of(0, "a1", "")
    assert seed_of(1, "x") == 3171599815992100262  # the same on every machine and in every version


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_values_have_the_distribution_they_are_said_to_have(kind: str) -> None:
    values = draw_rows("w", (500, 400), Initial(kind, 0.3), 7, 0, 500)  # type: ignore[arg-type]
    deviation = 0.3 if kind == "normal" else 0.3 / math.sqrt(3)
    assert abs(float(values.mean())) < 4 * deviation / math.sqrt(values.numel())
    assert float(values.std()) == pytest.approx(deviation, rel=0.01)
    if kind == "uniform":
        assert float(values.abs().max()) <= 0.3
    assert torch.equal(draw_rows("w", (), Initial("constant", 2.0), 0, 0, 1), torch.tensor([2.0]))
    assert draw_rows("w", (0, 4), NORMAL, 0, 0, 0).shape == (0, 4)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3, device="meta"))

    def initial_value(self, name: str) -> Initial:
        return Initial("constant", float(len(name)))


def test_modules_without_a_rule_of_their_own_start_as_pytorch_starts_them() -> None:
    modules = {
        "linear": nn.Linear(40, 30),
        "conv": nn.Conv2d(6, 8, 3, groups=2),
        "norm": nn.LayerNorm(9),
        "rms": nn.RMSNorm(9),
        "group": nn.GroupNorm(3, 9),
        "embedding": nn.Embedding(50, 20),
    }
    model = nn.ModuleDict(modules)
    for name, parameter in model.named_parameters():
        initial = initial_of(model, name)
        drawn = draw_rows(name, tuple(parameter.shape), initial, 0, 0, parameter.shape[0])
        assert float(drawn.abs().max()) == pytest.approx(float(parameter.detach().abs().max()), rel=0.35), name
        if initial.kind == "constant":
            assert torch.equal(drawn, parameter.detach()), name
    assert initial_of(Own(), "gain") == Initial("constant", 4.0)


@pytest.mark.parametrize("module", [nn.LSTM(2, 3, device="meta"), nn.Embedding(5, 3, padding_idx=0, device="meta")])
def test_a_parameter_nobody_knows_how_to_start_is_refused_with_the_mend(module: nn.Module) -> None:
    model = nn.ModuleDict({"odd": module})
    name = next(name for name, _ in model.named_parameters())
    with pytest.raises(
        ValueError, match=rf"parameter '{name}' of {type(module).__name__} .* give the model a method initial_value"
    ):
        initial_of(model, name)
