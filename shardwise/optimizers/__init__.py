"""Optimizers that work on flat pieces of parameters."""

from shardwise.optimizers.adamw import AdamW
from shardwise.optimizers.config import OptimizerConfig, build
from shardwise.optimizers.optimizer import Optimizer
from shardwise.optimizers.sgd import SGD

__all__ = ["SGD", "AdamW", "Optimizer", "OptimizerConfig", "build"]
