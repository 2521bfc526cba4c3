"""The [optimizer] section."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shardwise.optimizers.adamw import AdamW
from shardwise.optimizers.optimizer import Optimizer
from shardwise.optimizers.sgd import SGD


class OptimizerConfig(BaseModel):
    """Which optimizer, and its settings; those another optimizer has no use for must stay at their defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.95), description="adamw: decay rates of the two moments")
    eps: float = Field(1e-8, gt=0, description="adamw: added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="on matrices only")
    momentum: float = Field(0.0, ge=0, lt=1, description="sgd: decay rate of the velocity")
    nesterov: bool = Field(False, description="sgd: look ahead along the velocity")


_USES = {"adamw": ("betas", "eps"), "sgd": ("momentum", "nesterov")}


def build(config: OptimizerConfig) -> Optimizer:
    """The optimizer a section asks for.

    Raises:
        ValueError: a setting is given that the named optimizer does not have.
    """
    used = _USES[config.name]
    for key in config.model_fields_set:
        owner = next((name for name, keys in _USES.items() if key in keys), None)
        if owner is not None and key not in used:
            raise ValueError(
                f"optimizer.{key} = {getattr(config, key)!r} belongs to {owner}, not to {config.name}: remove it or "
                f'set optimizer.name = "{owner}"'
            )
    if config.name == "sgd":
        return SGD(lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, weight_decay=config.weight_decay)
    for value in config.betas:
        if not 0 <= value < 1:
            raise ValueError(
                f"optimizer.betas = {list(config.betas)}: each must be at least 0 and below 1, as in [0.9, 0.95]"
            )
    return AdamW(lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
