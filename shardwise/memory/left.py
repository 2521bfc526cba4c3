"""What a block that is computed again leaves on its modules for others to read, such as an auxiliary loss."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.functions import apply

# A module and the name of its attribute.
Place = tuple[nn.Module, str]


class Left:
    """Where a block leaves tensors. Its first forward is looked at as a whole, the others where that left something.

    Args:
        modules: the block's.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._places: list[Place] | None = None
        self._readers: dict[Place, tuple[Tensor, Tensor]] = {}  # the last one handed out, what it reads

    def there(self) -> dict[Place, Any]:
        """The attributes that are there now, parameters and buffers not among them."""
        if self._places is None:
            inside = {id(module): module for root in self._modules for module in root.modules()}.values()
            return {
                (module, name): value
                for module in inside
                for name, value in vars(module).items()
                if isinstance(value, Tensor)
            }
        return {(module, name): vars(module)[name] for module, name in self._places if name in vars(module)}

    def since(self, before: dict[Place, Any]) -> dict[Place, Tensor]:
        """The tensors that have come since a first run began and have no graph."""
        found = {
            place: value
            for place, value in self.there().items()
            if isinstance(value, Tensor)
            and before.get(place) is not value
            and (value.is_floating_point() or value.is_complex())
            and not value.requires_grad
        }
        if self._places is None:
            self._places = list(found)
        return found

    def hand_out(self, tensors: dict[Place, Tensor], output: Tensor, gradients: dict[Place, Tensor]) -> None:
        """Have these be read with a graph, which notes their gradients before the backward of the run's `output`."""
        for place, tensor in tensors.items():
            reader = apply(_Reader, tensor, output, gradients, place)
            self._readers[place] = reader, tensor
            module, name = place
            vars(module)[name] = reader

    def aside(self) -> Callable[[], None]:
        """Before a second run: attributes have no graph any more. What it returns brings those back after it."""
        for (module, name), (reader, tensor) in self._readers.items():
            if vars(module).get(name) is reader:
                vars(module)[name] = tensor
        self._readers = {}
        before = self.there()

        def restore() -> None:
            for module, name in self._places or ():
                vars(module).pop(name, None)
            for (module, name), value in before.items():
                vars(module)[name] = value

        return restore


class _Reader(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, output: Tensor, gradients: dict[Place, Tensor], place: Place) -> Tensor:
        ctx.gradients, ctx.place = gradients, place
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.gradients[ctx.place] = gradient
        return None, None, None, None
