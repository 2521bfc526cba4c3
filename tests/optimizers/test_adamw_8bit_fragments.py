"""8-bit AdamW: its table, its blocks under any cut, its checkpoints and how far it is from AdamW."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.optimizers import AdamW, AdamW8bit, Packed
from shardwise.optimizers.quantization import dequantize, quantize, values
from tests.optimizers.fragments import Parameter, Ranks, draw
from tests.optimizers.layouts import Layout, expected, train

OPTIMIZER = AdamW8bit(lr=1e-2, block=16, smallest=1)


def _quantized(moments: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch.empty(moments.shape, dtype=torch.uint8), torch.empty(len(moments))
    quantize(moments.clone(), signed, codes, scales)
    return codes, scales


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_has_the_decades_of_the_paper(signed: bool) -> None:
    table = values(signed)
    assert len(table) == 255
    assert (table[1:] > table[:-1]).all()
    assert table[-1] == 1
    assert table[127 if signed else 0] == 0
    assert torch.equal(table, -table.flip(0)) == signed
    for exponent in range(7):
        inside = (table > 10.0 ** -(exponent + 1) * 1.0001) & (table <= 10.0**-exponent * 1.0001)
        assert int(inside.sum()) == 2 ** (6 - exponent + (not signed))


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_comes_back_whatever_its_scale(signed: bool) -> None:
    codes = torch.arange(255, dtype=torch.uint8).repeat(400, 1)
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(400, generator=generator) * 10.0 ** torch.randint(-28, 28, (400,), generator=generator)
    dequantize(codes, scales, signed, moments := torch.empty(400, 255))
    again, again_scales = _quantized(moments, signed)
    assert torch.equal(again, codes)
    assert torch.equal(again_scales, scales)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_become_the_nearest_of_the_table(signed: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    moments = torch.randn(300, 64, generator=generator, dtype=torch.float64) ** 3
    moments = (moments if signed else moments.square()).to(dtype)
    codes, scales = _quantized(moments, signed)
    table = values(signed)
    ratio = moments.double() / scales.double().unsqueeze(1)
    error = (table[codes.long()] - ratio).abs()
    best = (table - ratio.unsqueeze(2)).abs().amin(2)
    # Ratios are looked up by 11 bits of their fraction: one near the middle may go to the other side.
    allowed = best + ratio.abs() * 2**-11
    # None above zero becomes zero.
    raised = (codes == 1) & (not signed)
    assert (error <= allowed).logical_or(raised).all()
    assert float((error <= best + 1e-7)[~raised].double().mean()) > 0.99


def test_blocks_of_zeros_and_of_next_to_nothing_are_zero() -> None:
    moments = torch.zeros(3, 16)
    moments[1, 3] = 1e-35
    moments[2, 5] = 1e-20
    codes, scales = _quantized(moments, True)
    dequantize(codes, scales, True, out := torch.empty(3, 16))
    assert not out[:2].any()
    assert out[2, 5] == moments[2, 5]
    assert int(out.count_nonzero()) == 1


def test_a_second_moment_above_zero_does_not_become_zero() -> None:
    moments = torch.tensor([[1.0, 1e-9, 1e-12, 0.0]])
    codes, scales = _quantized(moments, False)
    dequantize(codes, scales, False, out := torch.empty(1, 4))
    assert (out[0, :3] > 0).all()
    assert out[0, 3] == 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    seed=st.integers(0, 100),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
def test_only_blocks_that_a_cut_goes_through_differ(
    shape: tuple[int, int], cuts: list[float], seed: int, dtype: torch.dtype
) -> None:
    layout = Layout((Parameter("w", shape, None, tuple(sorted(cuts))),), 1)
    cut, uncut = (train(OPTIMIZER, either, seed, dtype=dtype).values()[0].view(-1) for either in (layout, layout.uncut))
    numel = cut.numel()
    ends = {round(end * numel) for end in cuts} - {0, numel}
    broken = {end // OPTIMIZER.block for end in ends if end % OPTIMIZER.block}
    whole = torch.tensor([index // OPTIMIZER.block not in broken for index in range(numel)])
    assert torch.equal(cut[whole], uncut[whole])


def test_cuts_between_blocks_change_nothing_in_larger_matrices() -> None:
    optimizer = replace(OPTIMIZER, block=256)
    layout = Layout((Parameter("w", (600, 320), None, (0.2, 0.2, 0.8)),), 1)
    cut, uncut = (train(optimizer, either, 0, dtype=torch.float32).values()[0] for either in (layout, layout.uncut))
    assert torch.equal(cut, uncut)


def test_the_first_step_is_adamws() -> None:
    layout = Layout((Parameter("w", (30, 40), 1, (0.37,)),), 2)
    assert torch.equal(train(OPTIMIZER, layout, 0, 1).values()[0], train(AdamW(lr=1e-2), layout, 0, 1).values()[0])


@pytest.mark.parametrize(
    "layout", [Layout((Parameter("w", (30, 40)),), 1), Layout((Parameter("w", (30, 40), 1, (0.37,)),), 2)]
)
def test_later_steps_are_the_references_and_adamws_to_the_tables_precision(layout: Layout) -> None:
    start = draw(layout.parameters, 0)[0]
    found = train(OPTIMIZER, layout, 0, 8).values()[0] - start
    right = expected(OPTIMIZER, layout.parameters, 0, 8)[0] - start
    exact = expected(AdamW(lr=1e-2), layout.parameters, 0, 8)[0] - start
    bound = 1e-3 if layout == layout.uncut else 0.03
    assert float((found - right).norm() / right.norm()) <= bound
    assert 1e-4 < float((found - exact).norm() / exact.norm()) <= 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_of_a_checkpoint_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    layout = Layout(
        (Parameter("w", (30, 40), None, (0.37, 0.37, 0.9)), Parameter("embedding", (4, 5), None, (0.1, 0.2, 0.3))), 1
    )
    optimizer = replace(OPTIMIZER, exclude=("embedding",))
    assert isinstance(optimizer, Packed)
    assert not isinstance(AdamW(), Packed)
    saved = train(optimizer, layout, 0, dtype=dtype)
    loaded = Ranks(optimizer, layout.parameters, saved.values(), layout.tensor)
    for rank, fragments in saved.fragments.items():
        for source, target in zip(fragments, loaded.fragments[rank], strict=True):
            moments = {name: moment.clone() for name, moment in optimizer.moments(source).items()}
            assert {name: len(moment) for name, moment in moments.items()} == dict.fromkeys(
                ("first_moment", "second_moment"), source.stop - source.start
            )
            optimizer.pack(target, moments)
            for name, tensor in source.state.items():
                assert torch.equal(tensor, target.state[name]), name
    gradients = draw(layout.parameters, 9, dtype)
    saved.step(gradients, 4)
    loaded.step(gradients, 4)
    assert all(torch.equal(a, b) for a, b in zip(saved.values(), loaded.values(), strict=True))


def test_what_is_small_or_excluded_is_not_quantized_however_it_is_cut() -> None:
    optimizer = AdamW8bit(smallest=100)
    for name, shape, quantized in (
        ("w", (10, 10), True),
        ("w", (9, 11), False),
        ("model.embed_tokens.weight", (90, 10), False),
    ):
        parameter = Parameter(name, shape, 0, (0.01, 0.5))
        for fragments in Ranks(optimizer, [parameter], draw([parameter], 0), 3).fragments.values():
            assert ("first_codes" in fragments[0].state) == quantized


def test_a_block_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer.block = 0 is out of range; give at least 1"):
        AdamW8bit(block=0)
