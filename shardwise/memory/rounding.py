"""Stochastic rounding to bf16 (Gupta et al., arXiv 1502.02551, section 3): up with the probability that makes the mean
right, so that steps smaller than half a unit of the last place are not lost.

The random bits of an element depend on the seed, the step, the parameter's name and the element's place in the whole
parameter alone. Every layout draws the same ones, and copies on several ranks stay equal.
"""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.initial import seed_of
from shardwise.layout import Layout, Place

# Elements rounded together: what is in between stays in the processor's cache.
BLOCK = 1 << 15
_DROPPED = 0xFFFF  # the part of a float32's 32 bits that bf16 has not


def round_into(
    out: Tensor,
    values: Tensor,
    name: str,
    layout: Layout,
    places: Mapping[str, Place],
    start: int,
    seed: int,
    step: int,
) -> None:
    """Write `values`, rounded, to `out`.

    Args:
        out: (N,) bfloat16.
        values: (N,) float32: consecutive elements, from `start` on, of this rank's piece of parameter `name`.
        layout, places: of the parameter, and this rank's places on the axes that divide it.
        seed, step: what the random bits depend on besides.
    """
    key = seed_of(seed, "rounding", step, name)
    for low in range(0, values.numel(), BLOCK):
        high = min(low + BLOCK, values.numel())
        bits = random_bits(_places_in_whole(layout, places, start + low, start + high, values.device), key)
        bits.bitwise_and_(_DROPPED).add_(values[low:high].view(torch.int32))
        out[low:high].copy_(bits.bitwise_and_(~_DROPPED).view(torch.float32))


def random_bits(index: Tensor, key: int) -> Tensor:
    """32 bits for every index (N,) int32, in its memory: a hash in which a change of any bit of index or key changes
    half of the bits, by multiplications and shifts (the constants of Chris Wellons' lowbias32)."""
    x, shifted = index.bitwise_xor_(_signed(key)), torch.empty_like(index)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        # A logical shift to the right.
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1))
        if factor is not None:
            x.mul_(_signed(factor))
        if shift == 15:
            x.add_(_signed(key >> 31))
    return x


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _places_in_whole(
    layout: Layout, places: Mapping[str, Place], start: int, stop: int, device: torch.device
) -> Tensor:
    """Of elements `start` to `stop` of this rank's piece, in row-major order, where they lie in the whole parameter, by
    the last 32 bits of their number."""
    if not layout.splits:
        return _counting(device)[: stop - start] + _signed(start)
    index = torch.arange(start, stop, device=device)
    boxes = list(layout.pieces(places))
    found = torch.zeros_like(index)
    stride = 1
    for dim, length in reversed(list(enumerate(layout.local_shape(places)))):
        own = index % length
        for first, offset in sorted({(target.offset[dim], source.offset[dim]) for source, target in boxes}):
            # Later pieces overwrite what earlier ones said of their range.
            own = torch.where(index % length >= first, index % length - first + offset, own)
        found += own * stride
        index = index // length
        stride *= layout.shape[dim]
    return found.int()


@functools.cache
def _counting(device: torch.device) -> Tensor:
    return torch.arange(BLOCK, dtype=torch.int32, device=device)
