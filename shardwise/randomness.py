"""Random numbers of forward passes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Generators(NamedTuple):
    """The states of torch's generator and, if there is one, of this process's accelerator's."""

    cpu: Tensor
    accelerator: Tensor | None


def seed_generators(seed: int) -> None:
    """Seed torch's generator and that of this process's accelerator, if there is one.

    `torch.manual_seed` also leaves a note, with a stack trace, for every kind of accelerator that is not there: half a
    millisecond.
    """
    torch.default_generator.manual_seed(seed)
    backend = _backend()
    if backend is not None:
        backend.manual_seed(seed)


def generators() -> Generators:
    """Where the generators stand, for `restore`."""
    backend = _backend()
    return Generators(torch.get_rng_state(), None if backend is None else backend.get_rng_state())


def restore(state: Generators) -> None:
    """Have the generators go on from `state`."""
    torch.set_rng_state(state.cpu)
    if state.accelerator is not None:
        _backend().set_rng_state(state.accelerator)


def _backend() -> Any:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None else torch.get_device_module(accelerator)
