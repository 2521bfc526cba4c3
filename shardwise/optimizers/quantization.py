"""Block-wise dynamic quantization to 8 bits (Dettmers et al., arXiv 2110.02861, sections 2.1, 2.2 and appendix F).

A block's values, divided by the largest of them, are stored as the nearest of a table's: a decimal exponent from 0 to
-6 and a fraction that has the more bits the larger the exponent.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

# Ratios are looked up by their sign, exponent and this many bits of their fraction: a table's values are further apart.
FRACTION_BITS = 11
_SHIFT = 23 - FRACTION_BITS
_CELLS = (127 << FRACTION_BITS) + 1  # of the ratios from 0 to 1
# Largest values below this have no effect on an update and make a block of zeros: their inverse would overflow.
SMALLEST = 1e-30


def values(signed: bool) -> Tensor:
    """The table in ascending order, in float64: 255 values from 0, or, if `signed`, from -1, to 1."""
    bits = 0 if signed else 1
    parts = []
    for exponent in range(-6, 1):
        count = 1 << (exponent + 6 + bits)
        # The upper ends of `count` equal parts of (0.1, 1].
        parts.append(10.0**exponent * (0.1 + 0.9 * torch.arange(1, count + 1, dtype=torch.float64) / count))
    positive = torch.cat(parts)
    zero = torch.zeros(1, dtype=torch.float64)
    return torch.cat([-positive.flip(0), zero, positive] if signed else [zero, positive])


class Table(NamedTuple):
    """Both directions of a table on one device.

    Args:
        decode: (255,), by code.
        encode: codes, by `first` + the upper bits of a ratio in float32 as a signed number.
    """

    decode: Tensor
    encode: Tensor
    first: int


@functools.cache
def table(signed: bool, dtype: torch.dtype, device: torch.device) -> Table:
    """Of signed ratios, or of those from 0 to 1, which are second moments: they divide, so none above 0 becomes 0."""
    exact = values(signed)
    centre = (torch.arange(_CELLS, dtype=torch.int32) << _SHIFT) + (1 << (_SHIFT - 1))
    ratio = centre.view(torch.float32).double()
    middle = (exact[1:] + exact[:-1]) / 2
    codes = torch.bucketize(ratio, middle)
    if not signed:
        codes[1:].clamp_(min=1)
        return Table(exact.to(device, dtype), codes.to(device, torch.uint8), 0)
    # A negative number's bits, as a signed number, start at the lowest one: -0.
    encode = torch.zeros((1 << (31 - _SHIFT)) + _CELLS, dtype=torch.uint8)
    encode[:_CELLS] = torch.bucketize(-ratio, middle, right=True)
    encode[-_CELLS:] = codes
    return Table(exact.to(device, dtype), encode.to(device), 1 << (31 - _SHIFT))


def dequantize(codes: Tensor, scales: Tensor, signed: bool, out: Tensor) -> None:
    """Values of blocks.

    Args:
        codes: (N, block) uint8.
        scales: (N,) float32.
        out: (N, block).
    """
    decode = table(signed, out.dtype, out.device).decode
    torch.index_select(decode, 0, codes.view(-1).int(), out=out.view(-1))
    out.mul_(scales.unsqueeze(1))


def quantize(moments: Tensor, signed: bool, codes: Tensor, scales: Tensor) -> None:
    """Codes and scales of blocks. Quantizing what `dequantize` gave gives the same codes and scales.

    Args:
        moments: (N, block), overwritten where they are float32.
        codes: (N, block) uint8, written.
        scales: (N,) float32, written.
    """
    largest = moments.amax(1)
    if signed:
        largest = torch.maximum(largest, moments.amin(1).neg_())
    largest = largest.float()
    largest.masked_fill_(largest < SMALLEST, 0.0)
    scales.copy_(largest)
    ratio = moments.float().mul_(largest.reciprocal().masked_fill_(largest == 0, 0.0).unsqueeze(1))
    bits = ratio.view(torch.int32).bitwise_right_shift_(_SHIFT)
    _, encode, first = table(signed, moments.dtype, moments.device)
    if first:
        bits += first
    torch.index_select(encode, 0, bits.view(-1), out=codes.view(-1))
