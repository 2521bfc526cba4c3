"""Which modules write the gradients of their own parameters, rather than autograd."""

from torch import nn

from shardwise import gradient
from shardwise.gradient import Slot, Tape
from shardwise.tensor_parallel.division import Division


def is_direct(module: nn.Module, puts_off: bool, division: Division | None) -> bool:
    """Whether a module is to write the gradients of its own parameters.

    Args:
        puts_off: whether weight gradients are computed apart from input gradients.
        division: over the tensor axis.
    """
    divided = division is not None and division.writes(module)
    return divided or gradient.is_direct(module) or (puts_off and gradient.can_put_off(module))


def attach(
    root: nn.Module, slots: dict[int, Slot], own: set[int], tape: Tape, puts_off: bool, division: Division | None
) -> None:
    """Let the modules of a chunk land the gradients of their parameters.

    Args:
        slots: by id of parameter.
        own: parameters that no other stage holds. A module with others is left to autograd, since it may be called
            under more than one tape.
    """
    for module in root.modules():
        ids = {name: id(p) for name, p in module._parameters.items() if p is not None and id(p) in slots}
        found = {name: slots[key] for name, key in ids.items()}
        if division is not None and division.attach(module, found, tape):
            continue
        if not found or not own.issuperset(ids.values()):
            continue
        if not all(slot.direct for slot in found.values()):
            continue
        if gradient.is_direct(module):
            gradient.attach(module, found, tape)
        elif puts_off and gradient.can_put_off(module):
            gradient.attach_apart(module, found, tape)
