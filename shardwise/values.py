"""The values that a rank's parameters and buffers begin with: taken from the given model, or drawn piece by piece."""

import torch
from torch import Tensor, nn

from shardwise.chunk import Owner
from shardwise.data_parallel.entry import Entry
from shardwise.initial import Initial
from shardwise.layout import Layout, draw
from shardwise.mesh import Mesh


def _replace(parameter: nn.Parameter, value: Tensor, owners: list[Owner]) -> nn.Parameter:
    """Make `value` the parameter's memory: in place, or, since a meta tensor has no memory to exchange, as a new
    parameter in its modules."""
    if not parameter.is_meta:
        parameter.data = value
        return parameter
    fresh = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for module, attribute in owners:
        module._parameters[attribute] = fresh
    return fresh


def place(
    parameter: nn.Parameter,
    item: Entry,
    first: Tensor,
    initial: dict[str, Initial],
    seed: int,
    owners: dict[int, list[Owner]],
    mesh: Mesh,
) -> nn.Parameter:
    """Write a parameter's first values to `first`, and give it its place in its bucket."""
    places = {axis: mesh.axis(axis) for axis in ("context", "tensor")}
    if parameter.is_meta:
        draw(item.name, item.layout, initial[item.name], seed, places, first)
    else:
        with torch.no_grad():
            for source, target in item.layout.pieces(places):
                target.of(first).copy_(source.of(parameter))
    return _replace(parameter, item.value, owners[id(parameter)])


def settle_frozen(
    name: str,
    parameter: nn.Parameter,
    layout: Layout,
    initial: dict[str, Initial],
    seed: int,
    owners: dict[int, list[Owner]],
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh,
) -> nn.Parameter:
    places = {axis: mesh.axis(axis) for axis in ("context", "tensor")}
    kept = dtype if parameter.is_floating_point() else parameter.dtype
    value = torch.empty(layout.local_shape(places), dtype=kept, device=device)
    if parameter.is_meta:
        draw(name, layout, initial[name], seed, places, value)
    else:
        for source, target in layout.pieces(places):
            target.of(value).copy_(source.of(parameter.detach()))
    return _replace(parameter, value, owners[id(parameter)])


def as_exact(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating-point numbers in a format, complex ones in two of it, or of float32, which 16 bits have no pair of;
    other values as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def move_buffers(
    model: nn.Module, mine: list[nn.Module], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Move this rank's buffers to the device and precision; those that belong to the state, by name."""
    held = {id(module) for stage in mine for module in stage.modules()}
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if id(module) not in held:
            continue
        for attribute, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                raise ValueError(
                    f"buffer {f'{path}.{attribute}'.lstrip('.')!r} is on the meta device and only its module knows its "
                    "values: build the model on a real device, or compute the buffer when it is first used"
                )
            module._buffers[attribute] = as_exact(buffer.to(device), dtype)
            if attribute not in module._non_persistent_buffers_set:
                found[f"{path}.{attribute}".lstrip(".")] = module._buffers[attribute]
    return found
