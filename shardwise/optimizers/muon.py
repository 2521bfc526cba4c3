"""Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et al., arXiv 2502.16982)
on matrices cut anywhere."""

import functools
import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from shardwise.optimizers import reference
from shardwise.optimizers.adamw import Settings, apply, check_betas
from shardwise.optimizers.optimizer import Fragment, Overrides, Parameters, Sum, alike, matches

# Of the quintic polynomial whose iteration takes singular values to about 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NORM_EPS = 1e-7
# Elements of whole matrices that are gathered at a time.
GATHERED = 1 << 24


@dataclass(frozen=True)
class Muon:
    """Hidden matrices move along their momentum made orthogonal; embeddings, heads and vectors are AdamW's.

    A matrix that ZeRO cuts is summed up whole on its ranks, and those that hold a part of it make it orthogonal. One
    that tensor parallelism divides stays divided: only its product with itself, as large as the square of the undivided
    dimension, is summed, once an iteration. Each matrix of a parameter with three dimensions is treated by itself.

    Args:
        lr: learning rate, of both.
        momentum: decay rate of the momentum.
        nesterov: look ahead along the momentum.
        iterations: of Newton and Schulz; in bf16 on CUDA, else in the parameter's precision.
        adjustment: "match-rms" multiplies lr by 0.2 sqrt(max(n, m)), so that steps are as large as AdamW's and one lr
            fits both; "original" by sqrt(max(1, n / m)), for a matrix of n rows and m columns.
        weight_decay: multiplied by lr, unadjusted; on matrices only.
        betas, eps: of AdamW.
        exclude: patterns of the names of matrices that are AdamW's.
        overrides: by pattern of parameter names.

    State: 4 bytes a parameter of a matrix in float32, 8 of AdamW's.

    Raises:
        ValueError: a setting out of its range.
    """

    lr: float = 3e-4
    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5
    adjustment: Literal["match-rms", "original"] = "match-rms"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    exclude: tuple[str, ...] = ("*embed*", "*wte*", "*wpe*", "head.*", "*.head.*", "*lm_head*")
    overrides: Overrides = field(default_factory=dict)

    elementwise: ClassVar[bool] = False
    factored: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def __post_init__(self) -> None:
        check_betas(self.betas)
        if self.iterations < 1:
            raise ValueError(
                f"optimizer.iterations = {self.iterations} makes nothing orthogonal; give at least 1, 5 say"
            )

    def state(self, fragment: Fragment) -> dict[str, Tensor]:
        names = ("momentum",) if self._orthogonal(fragment) else ("first_moment", "second_moment")
        return {name: torch.zeros_like(fragment.parameter) for name in names}

    def update(self, fragments: list[Fragment], *, lr: float | Tensor, step: int, scale: float) -> Iterator[list[Sum]]:
        rate = float(lr)
        others = [fragment for fragment in fragments if not self._orthogonal(fragment)]
        for (lr_scale, decay), chosen in alike(others, self.weight_decay).items():
            apply(
                [fragment.parameter for fragment in chosen],
                [fragment.gradient for fragment in chosen],
                [fragment.state["first_moment"] for fragment in chosen],
                [fragment.state["second_moment"] for fragment in chosen],
                Settings(lr=rate * lr_scale, betas=self.betas, eps=self.eps, weight_decay=decay),
                step,
                scale,
            )
        for together in _batches(fragment for fragment in fragments if self._orthogonal(fragment)):
            yield from self._update(together, rate, scale)

    def _update(self, fragments: list[Fragment], rate: float, scale: float) -> Iterator[list[Sum]]:
        lengths = [math.prod(fragment.shape) for fragment in fragments]
        flat = fragments[0].parameter.new_zeros(sum(lengths))
        whole = flat.split_with_sizes(lengths)
        for fragment, direction in zip(fragments, whole, strict=True):
            gradient = fragment.gradient
            if scale != 1.0:
                gradient.mul_(scale)
            momentum = fragment.state["momentum"].mul_(self.momentum).add_(gradient)
            own = direction[fragment.start : fragment.stop]
            own.copy_(torch.add(gradient, momentum, alpha=self.momentum) if self.nesterov else momentum)
        yield [Sum(flat, split=False)]

        dtype = torch.bfloat16 if flat.device.type == "cuda" and flat.dtype == torch.float32 else flat.dtype
        stacks: dict[tuple[int, ...], list[tuple[Fragment, Tensor]]] = {}
        divided = []
        for fragment, direction in zip(fragments, whole, strict=True):
            shape = fragment.shape
            matrices = direction.view(math.prod(shape[:-2]), *shape[-2:]).to(dtype)
            if fragment.split is not None and fragment.split >= len(shape) - 2:
                divided.append((fragment, matrices))
            elif fragment.stop > fragment.start:
                stacks.setdefault(shape, []).append((fragment, matrices))
        for stack in stacks.values():
            results = _orthogonal(torch.cat([matrices for _, matrices in stack]), self.iterations)
            for (fragment, _), result in zip(stack, results.chunk(len(stack)), strict=True):
                self._step(fragment, result, rate)
        if divided:
            results_of = yield from _orthogonal_divided(divided, self.iterations)
            for (fragment, _), result in zip(divided, results_of, strict=True):
                self._step(fragment, result, rate)

    def _step(self, fragment: Fragment, result: Tensor, rate: float) -> None:
        if fragment.stop == fragment.start:
            return
        rate *= fragment.lr_scale
        decay = fragment.decay_rate(self.weight_decay)
        if decay:
            fragment.parameter.mul_(1 - rate * decay)
        own = result.reshape(-1)[fragment.start : fragment.stop].to(fragment.parameter.dtype)
        height, width = (fragment.global_shape or fragment.shape)[-2:]
        fragment.parameter.add_(own, alpha=-rate * self._adjust(height, width))

    def _adjust(self, height: int, width: int) -> float:
        if self.adjustment == "original":
            return math.sqrt(max(1.0, height / width))
        return 0.2 * math.sqrt(max(height, width))

    def _orthogonal(self, fragment: Fragment) -> bool:
        return self._chosen(fragment.name, fragment.shape)

    def _chosen(self, name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) in (2, 3) and not matches(name, self.exclude)

    def reference(self, decayed: Parameters, others: Parameters) -> torch.optim.Optimizer:
        muon = functools.partial(
            reference.muon,
            momentum=self.momentum,
            nesterov=self.nesterov,
            iterations=self.iterations,
            coefficients=COEFFICIENTS,
            eps=NORM_EPS,
            adjustment=self._adjust,
        )
        adamw = functools.partial(reference.adamw, betas=self.betas, eps=self.eps)

        def rule(parameter: Tensor, *, name: str, **settings: Any) -> None:
            (muon if self._chosen(name, parameter.shape) else adamw)(parameter, name=name, **settings)

        return reference.Plain(reference.groups(self, self.weight_decay, decayed, others), rule)


def _batches(fragments: Iterable[Fragment]) -> Iterator[list[Fragment]]:
    """Consecutive fragments whose whole local matrices have `GATHERED` elements at most, or one that has more; the same
    on all ranks."""
    batch: list[Fragment] = []
    total = 0
    for fragment in fragments:
        numel = fragment.largest or math.prod(fragment.shape)
        if batch and total + numel > GATHERED:
            yield batch
            batch, total = [], 0
        batch.append(fragment)
        total += numel
    if batch:
        yield batch


def _orthogonal(x: Tensor, iterations: int) -> Tensor:
    """The matrices (B, N, M) with singular values taken to about 1."""
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + NORM_EPS)
    for _ in range(iterations):
        x = _iterate(x, x @ x.mT)
    return x.mT if tall else x


def _iterate(x: Tensor, gram: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    return torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)


def _orthogonal_divided(
    divided: list[tuple[Fragment, Tensor]], iterations: int
) -> Generator[list[Sum], None, list[Tensor]]:
    """The same for matrices divided by rows or by columns: (fragment, this rank's part (B, n, m)).

    With the divided dimension last, X X^T is the sum of the parts' own. Of the ranks that hold one part together, the
    one with its first element adds it; of copies of a part one is counted.
    """
    by_row = [fragment.split == len(fragment.shape) - 2 for fragment, _ in divided]
    parts = [x.mT if rows else x for (_, x), rows in zip(divided, by_row, strict=True)]
    shapes = [(x.shape[0], x.shape[1], x.shape[1]) for x in parts]
    lengths = [math.prod(shape) for shape in shapes]
    for iteration in range(iterations):
        flat = divided[0][0].parameter.new_zeros(sum(lengths))
        grams = [gram.view(shape) for gram, shape in zip(flat.split_with_sizes(lengths), shapes, strict=True)]
        for (fragment, _), x, gram in zip(divided, parts, grams, strict=True):
            if fragment.counted and fragment.start == 0 < fragment.stop:
                gram.copy_(x @ x.mT)
        yield [Sum(flat, split=True)]
        for index, ((fragment, _), x, gram) in enumerate(zip(divided, parts, grams, strict=True)):
            if fragment.stop == fragment.start:
                continue
            if iteration == 0:
                norm = gram.diagonal(dim1=1, dim2=2).sum(1).sqrt_().add_(NORM_EPS).view(-1, 1, 1)
                x = (x / norm).to(x.dtype)
                gram.div_(norm * norm)
            parts[index] = _iterate(x, gram.to(x.dtype))
    return [x.mT if rows else x for x, rows in zip(parts, by_row, strict=True)]
