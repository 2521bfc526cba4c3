"""Matrices of linear layers multiplied in 8-bit floating point by torchao (Micikevicius et al., arXiv 2209.05433):
scales of whole tensors, found anew in every pass. Everything else is as in bf16, with float32 masters."""

import importlib.util
from fnmatch import fnmatchcase

import torch
from torch import nn

LEAST_CAPABILITY = (8, 9)  # of NVIDIA's: Ada, Hopper and later multiply in 8-bit floating point
SIZES = 16  # the kernels take matrices whose sizes it divides
# The layer that makes the logits: rounded to 8 bits they spoil the loss.
KEPT = ("*lm_head", "*head.output")


def require(device: torch.device) -> None:
    """See that `device` multiplies in fp8.

    Raises:
        ValueError: it does not, or torchao is not installed.
    """
    mend = 'set plan.precision to "bf16"'
    if device.type != "cuda" or torch.version.cuda is None:
        raise ValueError(
            f'plan.precision = "fp8" needs an NVIDIA GPU of compute capability {_text(LEAST_CAPABILITY)} or higher, '
            f"and this rank computes on {_name(device)}; {mend}"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise ValueError(
            f'plan.precision = "fp8" needs compute capability {_text(LEAST_CAPABILITY)} or higher, and '
            f"{_name(device)} has {_text(capability)}; {mend}"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(f"plan.precision = \"fp8\" multiplies with torchao: pip install 'shardwise[fp8]', or {mend}")


def convert(model: nn.Module, emulate: bool = False) -> None:
    """Make linear layers of `model` multiply in fp8, in place; their parameters stay. Left alone are layers with a size
    that 16 does not divide and the one that makes the logits.

    Args:
        emulate: compute what fp8 would give in other formats, on any device (for tests).

    Raises:
        ValueError: no layer is left to convert.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def chosen(module: nn.Module, name: str) -> bool:
        fits = type(module) is nn.Linear and not module.in_features % SIZES and not module.out_features % SIZES
        return fits and not any(fnmatchcase(name, pattern) for pattern in KEPT)

    if not any(chosen(module, name) for name, module in model.named_modules()):
        raise ValueError(
            f'plan.precision = "fp8" multiplies linear layers whose sizes {SIZES} divides, and the model has none '
            'beside the one that makes the logits; choose other sizes, or set plan.precision to "bf16"'
        )
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=emulate), module_filter_fn=chosen)


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the {device.type}"
