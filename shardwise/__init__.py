"""Shardwise: train large neural networks over many devices.

Every technique of the field's map, composable, and any layout checked against one device.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.initial import Initial
    from shardwise.loss import Loss, cross_entropy, cross_entropy_with
    from shardwise.mesh import Mesh
    from shardwise.optimizers import SGD, Adafactor, AdamW, AdamW8bit, Lion, Muon, Override
    from shardwise.parallel import Parallel
    from shardwise.parallelize import parallelize
    from shardwise.plan import Plan, PlanError
    from shardwise.step_metrics import StepMetrics
    from shardwise.training.checkpoint_folder import CheckpointFolder
    from shardwise.training.trainer import Trainer
    from shardwise.verify import verify

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adafactor",
    "AdamW",
    "AdamW8bit",
    "CheckpointFolder",
    "Initial",
    "Lion",
    "Loss",
    "Mesh",
    "Muon",
    "Override",
    "Parallel",
    "Plan",
    "PlanError",
    "StepMetrics",
    "Trainer",
    "cross_entropy",
    "cross_entropy_with",
    "parallelize",
    "verify",
]

# Imported when first used: a command that only reads a config need not wait for torch.
_HOMES = {
    "SGD": "optimizers",
    "Adafactor": "optimizers",
    "AdamW": "optimizers",
    "AdamW8bit": "optimizers",
    "CheckpointFolder": "training.checkpoint_folder",
    "Initial": "initial",
    "Lion": "optimizers",
    "Loss": "loss",
    "Mesh": "mesh",
    "Muon": "optimizers",
    "Override": "optimizers",
    "Parallel": "parallel",
    "Plan": "plan",
    "PlanError": "plan",
    "StepMetrics": "step_metrics",
    "Trainer": "training.trainer",
    "cross_entropy": "loss",
    "cross_entropy_with": "loss",
    "parallelize": "parallelize",
    "verify": "verify",
}


class _Face(ModuleType):
    """The package, whose functions `parallelize` and `verify` keep their names from the modules they live in."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOMES.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"shardwise.{_HOMES[name]}"), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted([*__all__, "__version__"])


sys.modules[__name__].__class__ = _Face
