"""Optimizers that are right on parameters cut anywhere."""

from shardwise.optimizers.adafactor import Adafactor
from shardwise.optimizers.adamw import AdamW
from shardwise.optimizers.adamw_8bit import AdamW8bit
from shardwise.optimizers.config import OptimizerConfig, build
from shardwise.optimizers.lion import Lion
from shardwise.optimizers.muon import Muon
from shardwise.optimizers.optimizer import Fragment, Optimizer, Override, Packed, Sum
from shardwise.optimizers.sgd import SGD

__all__ = [
    "SGD",
    "Adafactor",
    "AdamW",
    "AdamW8bit",
    "Fragment",
    "Lion",
    "Muon",
    "Optimizer",
    "OptimizerConfig",
    "Override",
    "Packed",
    "Sum",
    "build",
]
