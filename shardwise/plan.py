"""How a job is spread over ranks, as data."""

from __future__ import annotations

import math
import tomllib
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise import toml
from shardwise.plan_rules import Job, problems
from shardwise.plan_values import (
    Averaging,
    Cut,
    GradientCompression,
    Offload,
    Recompute,
    ScheduleName,
    Size,
)
from shardwise.problems import Problem, ProblemError, from_validation

if TYPE_CHECKING:
    from torch import nn

    from shardwise.models.config import ModelConfig


class PlanError(ProblemError):
    """A plan that cannot work: one line for each problem, with its key, reason and mend."""


class Plan(BaseModel):
    """How a job is spread over ranks. `Plan()` is one device; nothing in a plan is ever rewritten silently.

    Raises:
        PlanError: a key does not exist or a value is not possible. What depends on more than one key, on the model or
            on the number of ranks is found by `check`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    replicate: Size = 1
    """Data-parallel copies."""
    shard: Size = 1
    """Data-parallel ranks that divide state between them (ZeRO); data parallel size = replicate * shard."""
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    """What is divided over `shard` and `context`: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""
    tensor: Size = 1
    """Megatron tensor parallelism."""
    sequence: bool = False
    """Megatron sequence parallelism in the regions between the parallel matrices."""
    context: Size = 1
    """Ranks that split the sequence, attention included."""
    context_method: Literal["ring", "ulysses"] = "ring"
    """How attention crosses the split of the sequence."""
    pipeline: Size = 1
    """Pipeline ranks, each with consecutive layers."""
    schedule: ScheduleName = "1f1b"
    """Name of the pipeline schedule, or path of a .csv or .json file with one."""
    chunks: Size = 1
    """Model chunks per pipeline rank."""
    microbatches: Size = 1
    """Pieces of the batch that pass through the model one after another; gradients accumulate over them."""
    slices: Size = 1
    """Slices that every sequence is cut into, which pass one by one; what each attends to is kept for those behind."""
    cut: Cut = "parameters"
    """What is balanced between stages, or the number of layers of each stage in model order."""
    in_flight: Annotated[int, Field(ge=0)] = 0
    """With the schedule auto: how many microbatches' activations a rank may hold; 0 allows as many as 1f1b holds."""
    vertical_sync: bool = False
    """PipeDream's vertical sync: a microbatch uses one weight version across all stages."""
    expert: Size = 1
    """Ranks that divide the experts of a layer between them."""
    averaging: Averaging = "every-step"
    """When data-parallel copies are averaged: every-step, delayed, or local:STEPS."""
    recompute: Recompute = "none"
    """What is computed again in backward: none, full (blocks), every:K (each K-th one), sqrt (segments of a chain),
    selective (all but matrix products and attention), the fraction of activation memory to keep, or a limit of it."""
    precision: Literal["fp64", "fp32", "bf16", "bf16-pure", "fp16", "fp8"] = "fp32"
    """Number format of forward and backward. bf16-pure keeps no float32 masters and rounds updates stochastically."""
    loss_scaling: Literal["dynamic", "per-block"] = "dynamic"
    """How fp16's gradients are brought into its range: one factor on the loss, or one for every residual block."""
    reduce_dtype: Literal["master", "fp32", "bf16", "fp16"] = "master"
    """Number format that gradients travel in between data-parallel ranks: that of the masters, or another one. They are
    added up in the masters' in any case."""
    offload: Offload = Offload()
    """State kept in host memory or on disk."""
    compress_gradients: GradientCompression = "none"
    """Gradient compression between data-parallel ranks: none, int8, powersgd:RANK or topk:FRACTION."""
    compress_activations: Literal["none", "gist", "fp16", "fp8", "int8", "int4"] = "none"
    """Number format of activations kept for backward."""

    if not TYPE_CHECKING:  # the type checker keeps the signature that pydantic derives from the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise PlanError(from_validation(error, type(self), "plan")) from None

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axis -> size, outermost first."""
        names = ("pipeline", "replicate", "shard", "context", "tensor")
        return {name: getattr(self, name) for name in names}

    @property
    def num_ranks(self) -> int:
        """Ranks the plan uses."""
        return math.prod(self.axes.values())

    @property
    def data_parallel(self) -> int:
        """Ranks that read different rows of the batch."""
        return self.replicate * self.shard

    def replace(self, **changes: Any) -> Self:
        """A new plan with some keys changed, validated as any plan is."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})

    def diff(self, other: Plan) -> dict[str, tuple[Any, Any]]:
        """Key -> (value here, value in `other`) for every key that differs."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in type(self).model_fields}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def describe(self) -> str:
        """What differs from the plan of one device, in one line."""
        changed = self.diff(Plan())
        return ", ".join(f"{name}={_shown(pair[0])}" for name, pair in changed.items()) or "one device"

    def to_toml(self) -> str:
        """The plan as the `[plan]` table of a TOML file, every key written out."""
        return toml.write({"plan": self.model_dump(mode="json", exclude_none=True)})

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """The plan in the `[plan]` table of a TOML text; other tables are left alone.

        Raises:
            PlanError: the text is not TOML, has no `[plan]`, or holds what no plan can.
        """
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError([Problem("plan", f"not TOML: {error}", "mend the syntax there")]) from None
        if not isinstance(tables.get("plan"), dict):
            raise PlanError([Problem("plan", "the TOML text has no [plan] table", "put the keys under [plan]")])
        return cls(**tables["plan"])

    def check(
        self, model: nn.Module | ModelConfig | None = None, num_ranks: int | None = None, batch: int | None = None
    ) -> list[Problem]:
        """All problems of the plan at once; an empty list when it can run.

        Args:
            model: what is to be trained, or its config; None leaves the rules about models out.
            num_ranks: ranks that are there; None leaves the rule out.
            batch: sequences in one global batch; None leaves the rule out.
        """
        return problems(self, Job(model, num_ranks, batch))

    def require(
        self, model: nn.Module | ModelConfig | None = None, num_ranks: int | None = None, batch: int | None = None
    ) -> None:
        """Raises PlanError with every problem `check` finds, if it finds any."""
        found = self.check(model, num_ranks, batch)
        if found:
            raise PlanError(found)


def _shown(value: Any) -> str:
    if not isinstance(value, Offload):
        return str(value)
    return "{" + ", ".join(f"{kind}={place}" for kind, place in value.model_dump(exclude_none=True).items()) + "}"
