"""The state of the random number generators, as tensors for a checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from shardwise.initial import seed_of

PREFIX = "rng/"


def seed(seed: int, step: int, rank: int) -> None:
    """Seeds every generator of this process from the run's seed, the step and the rank."""
    torch.manual_seed(seed_of(seed, "torch", step, rank))
    random.seed(seed_of(seed, "python", step, rank))
    np.random.seed(seed_of(seed, "numpy", step, rank) % (1 << 32))


def capture(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The generators of a rank, under keys of its own; uint8 tensors."""
    state = {"torch": torch.get_rng_state(), "python": _packed(random.getstate()), "numpy": _packed(_numpy_state())}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return {f"{PREFIX}{rank}/{name}": value.clone() for name, value in state.items()}


def empty(metadata: Mapping[str, STORAGE_TYPES], rank: int) -> dict[str, Tensor]:
    """Tensors to load a rank's generators into, as large as they are in a checkpoint."""
    return {
        key: torch.empty(held.size, dtype=torch.uint8)
        for key, held in metadata.items()
        if key.startswith(f"{PREFIX}{rank}/") and isinstance(held, TensorStorageMetadata)
    }


def restore(state: dict[str, Tensor], rank: int, device: torch.device) -> None:
    """Sets the generators as `capture` found them."""
    torch.set_rng_state(state[f"{PREFIX}{rank}/torch"])
    version, words, gauss = _unpacked(state[f"{PREFIX}{rank}/python"])
    random.setstate((version, tuple(words), gauss))
    kind, keys, place, has_gauss, gauss = _unpacked(state[f"{PREFIX}{rank}/numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, has_gauss, gauss))
    if f"{PREFIX}{rank}/device" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[f"{PREFIX}{rank}/device"], device)


def _numpy_state() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state()
    return (kind, [int(key) for key in keys], *rest)


def _packed(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Any:
    return json.loads(bytes(packed.tolist()))
