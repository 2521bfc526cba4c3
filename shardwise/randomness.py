"""Random numbers of forward passes."""

import torch


def seed_generators(seed: int) -> None:
    """Seed torch's generator and that of this process's accelerator, if there is one.

    `torch.manual_seed` also leaves a note, with a stack trace, for every kind of accelerator that is not there: half a
    millisecond.
    """
    torch.default_generator.manual_seed(seed)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        torch.get_device_module(accelerator).manual_seed(seed)
