"""Odd little models for the property tests: sizes that nothing divides, tied and frozen and unused parameters, tuples
between stages."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN = 13, 6


class Block(nn.Module):
    """Attention-free mixing with a linear layer, a norm, a convolution and a bare parameter."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 7, bias=kind % 2 == 0)
        self.down = nn.Linear(7, HIDDEN)
        self.mix = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1) if kind % 3 == 0 else None
        self.gain = nn.Parameter(torch.empty(HIDDEN, 1)) if kind % 3 == 1 else None
        self.idle = nn.Linear(3, 5) if kind % 4 == 1 else None  # never used: its gradient is zero

    def forward(self, x: Tensor, offsets: Tensor | None = None) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        if self.mix is not None:
            y = y + self.mix(x.transpose(1, 2)).transpose(1, 2)
        if self.gain is not None:
            y = y * self.gain.squeeze(1)
        if offsets is not None:
            y = y + offsets.unsqueeze(-1)
        return x + y


class Pair(nn.Module):
    """Passes two tensors and a number on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, float]:
        return self.linear(x), x * 0.5, 0.25


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, y: Tensor, factor: float) -> Tensor:
        return self.linear(x) + y * factor


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class Odd(nn.Module):
    """Args: num_blocks; tied: head and embedding share their matrix; frozen: the second block is not trained; pair: two
    blocks in the middle that pass several values between them."""

    stages = ("embedding", "blocks.*", "head")

    def __init__(self, num_blocks: int = 5, tied: bool = False, frozen: bool = False, pair: bool = False) -> None:
        super().__init__()
        self.embedding = Embedding()
        blocks: list[nn.Module] = [Block(kind) for kind in range(num_blocks)]
        if pair:
            blocks[num_blocks // 2 : num_blocks // 2] = [Pair(), Join()]
        self.blocks = nn.ModuleList(blocks)
        self.head = Head()
        if tied:
            self.head.output.weight = self.embedding.tokens.weight
        if frozen:
            self.blocks[1].requires_grad_(False)
            self.embedding.requires_grad_(False)

    def initial_value(self, name: str) -> Any:
        from shardwise.initial import Initial

        if name.endswith("norm.weight") or name.endswith("gain"):
            return Initial("constant", 1.0)
        return Initial("uniform", 0.4)

    def forward(self, tokens: Tensor, offsets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            given = x if isinstance(x, tuple) else (x,)
            x = block(*given, offsets) if isinstance(block, Block) else block(*given)
        return self.head(x)


def build(settings: dict[str, Any], device: str = "meta") -> Odd:
    with torch.device("meta"):
        model = Odd(**settings)
    if device != "meta":
        model.to_empty(device=device)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 0.8 - 0.4)
                if name.endswith(("norm.weight", "gain")):
                    parameter.fill_(1.0)
    return model


def make_batches(num: int, rows: int, length: int, seed: int = 0, offsets: bool = False) -> list[Any]:
    """Global batches with a random number of ignored targets, and lengths that change from step to step."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(num):
        shape = (rows, length + step % 2 * 2)
        tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
        targets = torch.randint(0, VOCABULARY, shape, generator=generator)
        targets[torch.rand(shape, generator=generator) < torch.rand((), generator=generator)] = -100
        inputs = {"tokens": tokens}
        if offsets:
            inputs["offsets"] = torch.rand(shape, generator=generator)
        found.append((inputs, targets))
    return found
