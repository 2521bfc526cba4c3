"""AdamW with moments of 8 bits (Dettmers et al., arXiv 2110.02861)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from shardwise.optimizers import reference
from shardwise.optimizers.adamw import Settings, apply, check_betas
from shardwise.optimizers.optimizer import Fragment, Overrides, Parameters, Sum, alike, matches
from shardwise.optimizers.quantization import dequantize, quantize

# Elements worked on at a time, so that the moments in full precision stay in the processor's cache.
CHUNK = 1 << 17
# Both moments: by name, whether it has a sign.
MOMENTS = {"first": True, "second": False}


@dataclass(frozen=True)
class AdamW8bit:
    """AdamW whose moments are stored in 8 bits, block by block, and updated in full precision.

    Blocks are counted from a parameter's first element on this rank's tensor-parallel piece, so a rank's fragment
    shares the blocks of the whole but for the one that each of its ends may cut.

    Args:
        lr, betas, eps, weight_decay, overrides: as for `AdamW`.
        block: elements that have one scale.
        smallest: parameters of fewer elements keep float32 moments.
        exclude: patterns of the names of parameters that keep float32 moments; the paper does so for embeddings.

    State: 2 bytes a parameter and 8 a block, 8 bytes a parameter where not quantized.

    Raises:
        ValueError: a setting out of its range.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    block: int = 256
    smallest: int = 4096
    exclude: tuple[str, ...] = ("*embed*", "*wte*", "*wpe*")
    overrides: Overrides = field(default_factory=dict)

    elementwise: ClassVar[bool] = False
    factored: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def __post_init__(self) -> None:
        check_betas(self.betas)
        if self.block < 1:
            raise ValueError(
                f"optimizer.block = {self.block} is out of range; give at least 1, as the usual 256 or 2048"
            )

    def state(self, fragment: Fragment) -> dict[str, Tensor]:
        own = fragment.parameter
        if not self._quantizes(fragment):
            return {f"{name}_moment": torch.zeros_like(own) for name in MOMENTS}
        zeros = {}
        first, last = self._blocks(fragment)
        for name, signed in MOMENTS.items():
            # The code of zero.
            zeros[f"{name}_codes"] = torch.full_like(own, 127 if signed else 0, dtype=torch.uint8)
            zeros[f"{name}_scales"] = own.new_zeros(last - first, dtype=torch.float32)
        return zeros

    def update(self, fragments: list[Fragment], *, lr: float | Tensor, step: int, scale: float) -> Iterator[list[Sum]]:
        for (lr_scale, decay), chosen in alike(fragments, self.weight_decay).items():
            settings = Settings(lr=float(lr) * lr_scale, betas=self.betas, eps=self.eps, weight_decay=decay)
            kept = [fragment for fragment in chosen if not self._quantizes(fragment)]
            if kept:
                apply(
                    [fragment.parameter for fragment in kept],
                    [fragment.gradient for fragment in kept],
                    [fragment.state["first_moment"] for fragment in kept],
                    [fragment.state["second_moment"] for fragment in kept],
                    settings,
                    step,
                    scale,
                )
            quantized = [fragment for fragment in chosen if self._quantizes(fragment)]
            if quantized:
                work = quantized[0].parameter.new_empty(2, self._chunk(quantized[0]))
                for fragment in quantized:
                    self._step(fragment, work, settings, step, scale)
        yield from ()

    def _step(self, fragment: Fragment, work: Tensor, settings: Settings, step: int, scale: float) -> None:
        for piece in self._pieces(fragment):
            moments = work[:, : piece.stop - piece.start].view(2, -1, piece.width)
            for (name, signed), moment in zip(MOMENTS.items(), moments, strict=True):
                dequantize(*piece.of(fragment, name), signed, moment)
            parameter, gradient = (
                flat[piece.start : piece.stop].view_as(moments[0]) for flat in (fragment.parameter, fragment.gradient)
            )
            apply([parameter], [gradient], [moments[0]], [moments[1]], settings, step, scale)
            for (name, signed), moment in zip(MOMENTS.items(), moments, strict=True):
                quantize(moment, signed, *piece.of(fragment, name))

    def moments(self, fragment: Fragment) -> dict[str, Tensor]:
        if not self._quantizes(fragment):
            return fragment.state
        found = {f"{name}_moment": torch.empty_like(fragment.parameter) for name in MOMENTS}
        for piece in self._pieces(fragment):
            for name, signed in MOMENTS.items():
                out = found[f"{name}_moment"][piece.start : piece.stop].view(-1, piece.width)
                dequantize(*piece.of(fragment, name), signed, out)
        return found

    def pack(self, fragment: Fragment, moments: Mapping[str, Tensor]) -> None:
        if not self._quantizes(fragment):
            for name, moment in moments.items():
                fragment.state[name].copy_(moment)
            return
        for piece in self._pieces(fragment):
            for name, signed in MOMENTS.items():
                moment = moments[f"{name}_moment"][piece.start : piece.stop].view(-1, piece.width)
                quantize(moment.clone(), signed, *piece.of(fragment, name))

    def reference(self, decayed: Parameters, others: Parameters) -> torch.optim.Optimizer:
        def rule(parameter: Tensor, *, name: str, **settings: Any) -> None:
            block = self.block if self._chosen(name, parameter.shape) else 0
            reference.adamw_8bit(parameter, name=name, block=block, betas=self.betas, eps=self.eps, **settings)

        return reference.Plain(reference.groups(self, self.weight_decay, decayed, others), rule)

    def _quantizes(self, fragment: Fragment) -> bool:
        return self._chosen(fragment.name, fragment.global_shape or fragment.shape)

    def _chosen(self, name: str, shape: tuple[int, ...]) -> bool:
        return math.prod(shape) >= self.smallest and not matches(name, self.exclude)

    def _chunk(self, fragment: Fragment) -> int:
        limit = CHUNK if fragment.parameter.device.type == "cpu" else CHUNK << 5
        return max(1, limit // self.block) * self.block

    def _blocks(self, fragment: Fragment) -> tuple[int, int]:
        """The first block of a fragment, and the one after the last."""
        first = fragment.start // self.block
        return first, max(first, -(-fragment.stop // self.block))

    def _pieces(self, fragment: Fragment) -> Iterator["_Piece"]:
        """A fragment as runs of whole blocks, and the parts of blocks at its ends."""
        origin, _ = self._blocks(fragment)
        largest = self._chunk(fragment)
        start = fragment.start
        while start < fragment.stop:
            whole = (fragment.stop - start) // self.block * self.block
            if start % self.block or not whole:
                stop = min(fragment.stop, (start // self.block + 1) * self.block)
                width = stop - start
            else:
                stop, width = start + min(whole, largest), self.block
            yield _Piece(start - fragment.start, stop - fragment.start, width, start // self.block - origin)
            start = stop


class _Piece(NamedTuple):
    """Elements `start` to `stop` of a fragment, which are blocks of `width` elements from number `block` on."""

    start: int
    stop: int
    width: int
    block: int

    def of(self, fragment: Fragment, name: str) -> tuple[Tensor, Tensor]:
        """The codes (N, width) and scales (N,) of one moment."""
        codes = fragment.state[f"{name}_codes"][self.start : self.stop].view(-1, self.width)
        return codes, fragment.state[f"{name}_scales"][self.block : self.block + len(codes)]
