"""The [optimizer] section."""

from dataclasses import MISSING, fields
from dataclasses import Field as Setting
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shardwise.optimizers.adafactor import Adafactor
from shardwise.optimizers.adamw import AdamW
from shardwise.optimizers.adamw_8bit import AdamW8bit
from shardwise.optimizers.lion import Lion
from shardwise.optimizers.muon import Muon
from shardwise.optimizers.optimizer import Optimizer, Override
from shardwise.optimizers.sgd import SGD

_OPTIMIZERS: dict[str, type[AdamW] | type[Adafactor] | type[AdamW8bit] | type[Muon] | type[Lion] | type[SGD]] = {
    "adamw": AdamW,
    "adafactor": Adafactor,
    "adamw-8bit": AdamW8bit,
    "muon": Muon,
    "lion": Lion,
    "sgd": SGD,
}


class OptimizerConfig(BaseModel):
    """Which optimizer, and its settings; those not given are the optimizer's own, and those it does not have stay
    None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["adamw", "adafactor", "adamw-8bit", "muon", "lion", "sgd"] = Field("adamw", description="Which rule")
    lr: float = Field(
        AdamW.lr, gt=0, allow_inf_nan=False, description="Peak learning rate; adafactor: the largest relative step"
    )
    weight_decay: float = Field(AdamW.weight_decay, ge=0, allow_inf_nan=False, description="On matrices only")
    betas: tuple[float, float] | None = Field(
        None, description="adamw, adamw-8bit, muon's AdamW: decay rates of the moments; lion"
    )
    eps: float | None = Field(
        None, gt=0, description="adamw, adamw-8bit, muon's AdamW: added to the root of the second moment"
    )
    momentum: float | None = Field(None, ge=0, lt=1, description="sgd, muon, adafactor: decay rate of the momentum")
    nesterov: bool | None = Field(None, description="sgd, muon: look ahead along the momentum")
    relative_step: bool | None = Field(None, description="adafactor: step min(lr, 1 / sqrt(t)) rather than lr")
    scale_parameter: bool | None = Field(None, description="adafactor: multiply the step by the parameter's size")
    decay_rate: float | None = Field(None, description="adafactor: of the second moment, 1 - t ** -decay_rate")
    clip_threshold: float | None = Field(None, description="adafactor: the update's largest root mean square")
    eps1: float | None = Field(None, gt=0, description="adafactor: added to squared gradients")
    eps2: float | None = Field(None, gt=0, description="adafactor: smallest size of a parameter")
    block: int | None = Field(None, description="adamw-8bit: elements that have one scale")
    smallest: int | None = Field(None, ge=0, description="adamw-8bit: parameters of fewer elements are not quantized")
    iterations: int | None = Field(None, description="muon: of Newton and Schulz")
    adjustment: Literal["match-rms", "original"] | None = Field(None, description="muon: of lr to a matrix's shape")
    exclude: tuple[str, ...] | None = Field(
        None, description="Names not quantized (adamw-8bit), AdamW's (muon), as patterns"
    )
    overrides: dict[str, Override] = Field({}, description="By pattern of names: lr_scale and weight_decay")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        optimizer = _OPTIMIZERS.get(str(data.get("name", "adamw"))) if isinstance(data, dict) else None
        if optimizer is None:
            return data
        # Once merged these are Python's values, not TOML's or JSON's, which have lists only.
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        return {setting.name: _default(setting) for setting in fields(optimizer)} | given

    @model_validator(mode="after")
    def _check(self) -> "OptimizerConfig":
        own = _names(self.name)
        for key in type(self).model_fields:
            value = getattr(self, key)
            if key == "name" or key in own or value is None:
                continue
            owners = [name for name in _OPTIMIZERS if key in _names(name)]
            raise ValueError(
                f"optimizer.{key} = {value!r} belongs to {', '.join(owners)}, not to {self.name}; remove it or set "
                f"optimizer.name to {owners[0]}"
            )
        build(self)
        return self


def build(config: OptimizerConfig) -> Optimizer:
    """The optimizer a section asks for."""
    return _OPTIMIZERS[config.name](**{name: getattr(config, name) for name in _names(config.name)})


def _names(optimizer: str) -> list[str]:
    return [setting.name for setting in fields(_OPTIMIZERS[optimizer])]


def _default(setting: "Setting[Any]") -> Any:
    return setting.default if setting.default_factory is MISSING else setting.default_factory()
