"""Modules as users write them: what a library for any `nn.Module` must not trip over."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.batch import Batch
from shardwise.loss import Loss

WIDTH = 4
squares = Loss(lambda output, targets: ((output - targets) ** 2).sum())


class Part(nn.Module):
    """Args: function: what it computes from its linear layer and its input."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(self.linear, x)


class First(nn.Module):
    """The first of what a recurrent layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0]


class Position(nn.Module):
    """A leaf whose output does not depend on its input's values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.table.expand(x.shape)


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = Position()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.position(x)


class Stray(nn.Linear):
    """Not what a linear layer computes, though it is one by inheritance."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 + self.weight.sum()


class Twice(nn.Module):
    """A layer used twice, one of whose uses may not happen, and its matrix used by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x))) + self.linear.weight.mean()


class Functional(nn.Module):
    """Calls its layer with other values than its parameters'."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        values = {name: value * 2 for name, value in self.linear.named_parameters()}
        y: Tensor = torch.func.functional_call(self.linear, values, (x,))
        return y


class Rotated(nn.Module):
    """Turns pairs of numbers by a complex buffer, as Llama's first code did."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("turns", torch.polar(torch.ones(WIDTH // 2), torch.arange(1.0, 1 + WIDTH // 2)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.linear(x).unflatten(-1, (-1, 2)))
        assert pairs.dtype == self.turns.dtype
        return torch.view_as_real(pairs * self.turns).flatten(-2)


class Named(nn.Module):
    """Every part's argument has the name of the model's own input."""

    stages = ("first", "layers.*", "last")

    def __init__(self) -> None:
        super().__init__()
        self.first = Part(lambda linear, x: linear(x))
        self.layers = nn.ModuleList(Part(lambda linear, x: torch.tanh(linear(x))) for _ in range(3))
        self.last = Part(lambda linear, x: linear(x))

    def forward(self, x: Tensor) -> object:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def pair(linear: nn.Linear, x: Tensor) -> object:
    return linear(x), {"half": [x * 0.5, "text", None]}


def join(linear: nn.Linear, given: tuple[Tensor, dict[str, list[Tensor]]]) -> Tensor:
    x, named = given
    return linear(x) + named["half"][0]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def plain() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear())


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def in_place() -> nn.Module:
    return nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True), linear())


def repeated() -> nn.Module:
    same = linear()
    return nn.Sequential(linear(), same, nn.Tanh(), same, linear(), same)


def repeated_convolution() -> nn.Module:
    same = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
    return nn.Sequential(linear(), same, linear(), linear(), same, linear())


def recurrent() -> nn.Module:
    return nn.Sequential(linear(), First(), linear(), linear())


def positioned() -> nn.Module:
    return nn.Sequential(linear(), Positioned(), linear(), linear())


def nested() -> nn.Module:
    return nn.Sequential(linear(), Part(pair), Part(join), linear())


def stray() -> nn.Module:
    return nn.Sequential(Stray(WIDTH, WIDTH), linear(), Stray(WIDTH, WIDTH), linear())


def twice() -> nn.Module:
    return nn.Sequential(linear(), Twice(), linear(), Twice())


def parametrized() -> nn.Module:
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(linear(), norm(linear()), linear(), norm(nn.Conv1d(WIDTH, WIDTH, 1)))


def functional() -> nn.Module:
    return nn.Sequential(linear(), Functional(), linear(), Functional())


def rotated() -> nn.Module:
    return nn.Sequential(linear(), Rotated(), linear(), Rotated())


def partly_frozen() -> nn.Module:
    model = nn.Sequential(linear(), nn.LayerNorm(WIDTH), linear(), linear(), linear())
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    model[3].requires_grad_(False)
    return model


def frozen() -> nn.Module:
    return plain().requires_grad_(False)


class Checkpointed(nn.Module):
    """Computes its layers again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(), nn.Tanh(), nn.Conv1d(WIDTH, WIDTH, 1), nn.Dropout(0.5), linear())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layers, x, use_reentrant=self.reentrant)
        return y


def checkpointed() -> nn.Module:
    return nn.Sequential(linear(), Checkpointed(False), Checkpointed(False), linear())


def checkpointed_reentrant() -> nn.Module:
    return nn.Sequential(linear(), Checkpointed(True), Checkpointed(True), linear())


class Sparse(nn.Module):
    """A table whose gradient autograd gives as rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        index = (x[..., 0] * 5).long()
        return self.linear(self.table(index))


def sparse() -> nn.Module:
    return nn.Sequential(Sparse(), linear(), linear())


def channels_last() -> nn.Module:
    model = nn.Sequential(
        Unflat(), nn.Conv2d(1, 2, 3, padding=1), Flat(), nn.Linear(2 * WIDTH * WIDTH, WIDTH * WIDTH), Square()
    )
    model[1].weight.data = model[1].weight.data.to(memory_format=torch.channels_last)
    return model


class Unflat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1)


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, WIDTH, WIDTH)


def normalised() -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))


def named() -> nn.Module:
    return Named()


def make(name: str) -> nn.Module:
    """The model of that name, with the same values every time."""
    state = torch.get_rng_state()
    torch.manual_seed(11)
    model = globals()[name]()
    torch.set_rng_state(state)
    assert isinstance(model, nn.Module)
    return model


def batches(num: int, rows: int, by_name: bool = False) -> list[Batch]:
    """Rows of (WIDTH, WIDTH), which linear layers, convolutions and recurrent layers all take."""
    generator = torch.Generator().manual_seed(2)
    found: list[Batch] = []
    for _ in range(num):
        x, y = (torch.rand((rows, WIDTH, WIDTH), generator=generator) for _ in range(2))
        found.append(({"x": x} if by_name else x, y))
    return found
