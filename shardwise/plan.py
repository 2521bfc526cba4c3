"""How a job is spread over ranks, as data, and every rule on what goes with what."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise import toml
from shardwise.pipeline_parallel.schedule import FAMILIES, SLICED, Family, build
from shardwise.plan_values import (
    ASYNCHRONOUS,
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

# What works of the keys that are not built in full, by kind of value ("local" is the kind of "local:16").
BUILT: dict[str, tuple[object, ...]] = {
    "zero": (0, 1, 2, 3),
    "expert": (1,),
    "averaging": ("every-step",),
    "precision": ("fp32", "fp64", "bf16", "bf16-pure", "fp16", "fp8"),
    "offload": ("optimizer", "master", "parameters", "gradients", "activations"),
    "compress_gradients": ("none",),
    "compress_activations": ("none",),
}


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
        job = _Job(model, num_ranks, batch)
        return [problem for rule in _RULES for problem in rule(self, job)]

    def require(
        self, model: nn.Module | ModelConfig | None = None, num_ranks: int | None = None, batch: int | None = None
    ) -> None:
        """Raises PlanError with every problem `check` finds, if it finds any."""
        problems = self.check(model, num_ranks, batch)
        if problems:
            raise PlanError(problems)


class _Job(NamedTuple):
    """What is known besides the plan."""

    model: nn.Module | ModelConfig | None
    num_ranks: int | None
    batch: int | None

    def setting(self, name: str) -> int:
        """A number or switch of the model's config; 0 where a user's module has none."""
        return int(getattr(self.model, name, 0)) if isinstance(self.model, BaseModel) else 0


# Each rule is a pure function of a plan and the job; it yields a problem for each thing that cannot be.


def _not_built(plan: Plan, job: _Job) -> Iterator[Problem]:
    for key, built in BUILT.items():
        value = getattr(plan, key)
        if isinstance(value, Offload):
            for place, where in value.model_dump(exclude_none=True).items():
                if place not in built:
                    yield Problem(f"plan.offload.{place}", f"{where} is not built yet", "leave it out")
            continue
        kind = value.partition(":")[0] if isinstance(value, str) else value
        if kind not in built:
            known = " or ".join(toml.value(kind) for kind in built)
            yield Problem(f"plan.{key}", f"{toml.value(value)} is not built yet", f"set it to {known}")


def _ranks(plan: Plan, job: _Job) -> Iterator[Problem]:
    if job.num_ranks is None or job.num_ranks == plan.num_ranks:
        return
    sizes = " x ".join(f"{name} {size}" for name, size in plan.axes.items() if size > 1) or "one device"
    copies, rest = divmod(job.num_ranks, plan.num_ranks // plan.replicate)
    fitting = f", or set plan.replicate to {copies}" if copies and not rest else ""
    yield Problem(
        "plan",
        f"{sizes} needs {plan.num_ranks} ranks and there are {job.num_ranks}",
        f"start {plan.num_ranks}{fitting}",
    )


def _batch(plan: Plan, job: _Job) -> Iterator[Problem]:
    if job.batch is None or job.batch // plan.data_parallel >= plan.microbatches:
        return
    fewer = job.batch // plan.data_parallel
    yield Problem(
        "plan.microbatches",
        f"{plan.microbatches} microbatches on {plan.data_parallel} data-parallel ranks "
        f"cannot each have a sequence of a batch of {job.batch}",
        f"raise data.batch to {plan.data_parallel * plan.microbatches}"
        + (f" or lower plan.microbatches to {fewer}" if fewer else ""),
    )


def _zero(plan: Plan, job: _Job) -> Iterator[Problem]:
    # Stages 2 and 3 are also what keeps gradients and parameters elsewhere, on one rank too.
    elsewhere = (plan.zero == 3 and plan.offload.parameters) or (plan.zero >= 2 and plan.offload.gradients)
    if plan.zero and plan.shard * plan.context == 1 and not elsewhere:
        yield Problem(
            "plan.zero", f"{plan.zero} divides state over one rank", "set plan.shard above 1 or plan.zero to 0"
        )


def _sequence(plan: Plan, job: _Job) -> Iterator[Problem]:
    if plan.sequence and plan.tensor == 1:
        yield Problem(
            "plan.sequence",
            "splits the sequence over the tensor axis, which has one rank",
            "set plan.tensor above 1 or plan.sequence to false",
        )


def _tensor(plan: Plan, job: _Job) -> Iterator[Problem]:
    heads = job.setting("heads")
    if heads and heads % plan.tensor:
        yield Problem(
            "plan.tensor",
            f"{plan.tensor} ranks do not divide {heads} attention heads, and a head is never split",
            "choose a divisor of model.heads",
        )
    shared = job.setting("kv_heads")
    if shared and not heads % plan.tensor and shared % plan.tensor and plan.tensor % shared:
        yield Problem(
            "plan.tensor",
            f"{plan.tensor} ranks cannot each have whole ones, or one, of {shared} key and value heads",
            "choose a divisor or a multiple of model.kv_heads",
        )


def _context(plan: Plan, job: _Job) -> Iterator[Problem]:
    length, heads = job.setting("sequence"), job.setting("heads")
    if length and plan.context > length:
        yield Problem("plan.context", f"{plan.context} ranks for {length} positions", f"set it to {length} or less")
    if heads and plan.context > 1 and plan.context_method == "ulysses" and heads % (plan.tensor * plan.context):
        yield Problem(
            "plan.context_method",
            f"ulysses gives each rank whole heads, and tensor {plan.tensor} x context {plan.context} ranks do not "
            f"divide {heads} heads",
            "use ring, or sizes that divide model.heads",
        )
    if plan.context == 1 or job.model is None:
        return
    if not isinstance(job.model, BaseModel):
        from shardwise.tensor_parallel import context  # with torch, which most uses of a plan do without

        try:
            context.check(job.model, plan.context_method)
        except ValueError as error:
            reason, _, mend = str(error).partition("; ")
            yield Problem("plan.context", reason, mend)
        return
    if job.model.dropout and plan.context_method == "ring":
        yield Problem(
            "plan.context_method",
            f"ring never holds the attention weights, of which model.dropout = {job.model.dropout} would drop some",
            "set it to ulysses, or model.dropout to 0",
        )
    if job.model.rope_scaling.kind == "dynamic":
        yield Problem(
            "plan.context",
            "dynamic rotary scaling turns positions by the length of the whole sequence, which no rank's part shows",
            "set model.rope_scaling.kind to yarn or llama3, or plan.context to 1",
        )


def _slices(plan: Plan, job: _Job) -> Iterator[Problem]:
    if plan.slices == 1:
        return
    if plan.schedule in FAMILIES and plan.schedule not in SLICED:
        yield Problem(
            "plan.schedule",
            f"{plan.schedule} does not know that slices go forward in order and backward in the opposite one",
            f"set it to {' or '.join(SLICED)}, or plan.slices to 1",
        )
    if plan.context > 1:
        yield Problem(
            "plan.slices",
            f"{plan.slices} slices in time of what context {plan.context} has divided over ranks already is not built",
            "set plan.slices or plan.context to 1",
        )
    length = job.setting("sequence")
    if length and plan.slices > length:
        yield Problem("plan.slices", f"{plan.slices} slices of {length} positions", f"set it to {length} or less")
    if job.model is None:
        return
    if not isinstance(job.model, BaseModel):
        from shardwise.tensor_parallel import context  # with torch, which most uses of a plan do without

        try:
            context.check(job.model, "slices")
        except ValueError as error:
            reason, _, mend = str(error).partition("; ")
            yield Problem("plan.slices", reason, mend)
        return
    if job.model.dropout:
        yield Problem(
            "plan.slices",
            f"attention over slices never holds its weights, of which model.dropout = {job.model.dropout} would drop "
            "some",
            "set model.dropout to 0, or plan.slices to 1",
        )
    if job.model.rope_scaling.kind == "dynamic":
        yield Problem(
            "plan.slices",
            "dynamic rotary scaling turns positions by the length of the whole sequence, which no slice shows",
            "set model.rope_scaling.kind to yarn or llama3, or plan.slices to 1",
        )


def _chunks(plan: Plan, job: _Job) -> Iterator[Problem]:
    family = FAMILIES.get(plan.schedule)
    if family is None or _holds(family, plan.chunks):
        return
    having = ", ".join(name for name, other in FAMILIES.items() if _holds(other, plan.chunks))
    yield Problem(
        "plan.chunks",
        f"{plan.schedule} has {'2 or more' if family.most_chunks is None else family.least_chunks} model chunks "
        f"per rank, not {plan.chunks}",
        f"set it to {family.least_chunks}, or plan.schedule to one with {plan.chunks}: {having}",
    )


def _holds(family: Family, chunks: int) -> bool:
    return family.least_chunks <= chunks <= (family.most_chunks or chunks)


def _two_versions(plan: Plan, job: _Job) -> Iterator[Problem]:
    if plan.schedule == "pipedream-2bw" and plan.microbatches < plan.pipeline:
        yield Problem(
            "plan.microbatches",
            f"two weight versions are enough for pipedream-2bw only with a microbatch for each of the "
            f"{plan.pipeline} stages, not {plan.microbatches}",
            f"set it to {plan.pipeline} or more, or plan.schedule to pipedream",
        )


def _tied(plan: Plan, job: _Job) -> Iterator[Problem]:
    if plan.schedule.startswith("pipedream") and plan.pipeline > 1 and job.setting("tied"):
        yield Problem(
            "plan.schedule",
            f"{plan.schedule} updates each stage at its own time, and the tied embedding is on the first and the last",
            "set model.tied to false, or choose a synchronous schedule such as 1f1b",
        )


def _schedule_file(plan: Plan, job: _Job) -> Iterator[Problem]:
    if plan.schedule in FAMILIES:
        return
    try:
        found = build(plan.schedule, plan.pipeline, plan.microbatches, plan.chunks, slices=plan.slices)
        if found.asynchronous and plan.slices > 1:
            raise ValueError("the file's schedule is asynchronous, which slices are not; set plan.slices to 1")
    except ValueError as error:
        reason, _, mend = str(error).partition("; ")
        yield Problem("plan.schedule", reason, mend or "mend the file or name another schedule")


def _vertical_sync(plan: Plan, job: _Job) -> Iterator[Problem]:
    if plan.vertical_sync and plan.schedule != "pipedream":
        yield Problem(
            "plan.vertical_sync",
            f"{plan.schedule} keeps no weight versions that differ between stages",
            "set plan.schedule to pipedream or plan.vertical_sync to false",
        )


def _in_flight(plan: Plan, job: _Job) -> Iterator[Problem]:
    if plan.in_flight and plan.schedule != "auto":
        yield Problem(
            "plan.in_flight",
            f"{plan.schedule} is not searched for: what it holds is fixed",
            "set plan.schedule to auto or plan.in_flight to 0",
        )


def _tied_asynchronous(plan: Plan, job: _Job) -> Iterator[Problem]:
    tied = isinstance(job.model, BaseModel) and getattr(job.model, "ties", getattr(job.model, "tied", False))
    if tied and plan.pipeline > 1 and plan.schedule in ASYNCHRONOUS:
        yield Problem(
            "plan.schedule",
            f"{plan.schedule} updates each stage at its own time, so the embedding that first and last stage share "
            "would differ between them",
            "set model.tied to false, or plan.schedule to a synchronous one such as 1f1b",
        )


def _stages(plan: Plan, job: _Job) -> Iterator[Problem]:
    num_stages = plan.pipeline * plan.chunks
    asked = f"pipeline {plan.pipeline} x chunks {plan.chunks}" if plan.chunks > 1 else f"pipeline {plan.pipeline}"
    listed = plan.cut if isinstance(plan.cut, tuple) else None
    if listed and len(listed) != num_stages:
        yield Problem(
            "plan.cut",
            f"lists {len(listed)} stages, but {asked} makes {num_stages}",
            f"list the layers of {num_stages} stages",
        )
    if listed and 0 in listed[1:-1]:
        yield Problem("plan.cut", "leaves a stage between others without layers", "give every stage at least one")
    parts = _num_parts(job.model) if num_stages > 1 else None
    if isinstance(parts, Problem):
        yield parts
        return
    if parts is None:
        return
    num_parts, num_blocks = parts
    if listed and sum(listed) not in parts:
        yield Problem(
            "plan.cut", f"lists {sum(listed)} layers, but the model has {num_blocks}", f"make the sum {num_blocks}"
        )
    if num_stages > num_parts:
        whole = f"{num_parts} parts" if num_parts == num_blocks else f"{num_parts} parts, {num_blocks} of them blocks"
        yield Problem(
            "plan.chunks" if plan.chunks > 1 and plan.pipeline <= num_parts else "plan.pipeline",
            f"{asked} makes {num_stages} stages of a model with {whole}",
            f"make no more than {num_parts} stages",
        )


def _num_parts(model: nn.Module | ModelConfig | None) -> tuple[int, int] | Problem | None:
    """How many parts a pipeline shares out and how many of them are blocks, or why the model cannot be cut."""
    if model is None:
        return None
    if isinstance(model, BaseModel):
        return model.layers + 2, model.layers  # the embedding and the head are parts too
    from shardwise.pipeline_parallel.stages import parts_of  # with torch, which most uses of a plan do without

    try:
        parts = parts_of(model)
    except ValueError as error:
        reason, _, mend = str(error).removeprefix("plan.pipeline: ").partition("; ")
        return Problem("plan.pipeline", reason, mend)
    return len(parts), sum(part.block for part in parts)


def _expert(plan: Plan, job: _Job) -> Iterator[Problem]:
    ranks = plan.replicate * plan.shard * plan.context
    if ranks % plan.expert:
        yield Problem(
            "plan.expert",
            f"{plan.expert} does not divide the {ranks} ranks of replicate x shard x context that share the experts",
            f"choose a divisor of {ranks}",
        )


def _averaging(plan: Plan, job: _Job) -> Iterator[Problem]:
    if plan.averaging != "every-step" and plan.replicate == 1:
        yield Problem(
            "plan.averaging",
            f"{plan.averaging} averages the copies of the replicate axis, and there is one",
            "set plan.replicate above 1 or plan.averaging to every-step",
        )


def _compression(plan: Plan, job: _Job) -> Iterator[Problem]:
    if plan.compress_gradients != "none" and plan.data_parallel * plan.context == 1:
        yield Problem(
            "plan.compress_gradients",
            f"{plan.compress_gradients} has nothing to compress: no gradient travels between data-parallel ranks",
            "set plan.replicate or plan.shard above 1, or plan.compress_gradients to none",
        )
    if plan.compress_activations == "fp16" and plan.precision in ("fp16", "bf16", "bf16-pure", "fp8"):
        yield Problem(
            "plan.compress_activations",
            f"fp16 saves nothing where precision is {plan.precision}: both have 16 bits",
            "choose fp8, int8, int4, gist or none",
        )


def _fp8(plan: Plan, job: _Job) -> Iterator[Problem]:
    if plan.precision == "fp8" and plan.tensor > 1:
        yield Problem(
            "plan.precision",
            "fp8 multiplies whole layers, and those that plan.tensor divides have products of their own",
            "set it to bf16, or plan.tensor to 1",
        )


def _loss_scaling(plan: Plan, job: _Job) -> Iterator[Problem]:
    if plan.loss_scaling == "dynamic":
        return
    if plan.precision != "fp16":
        yield Problem(
            "plan.loss_scaling",
            f"per-block is for fp16, and precision {plan.precision} needs no loss scale",
            "set it to dynamic, or plan.precision to fp16",
        )
    if plan.schedule in ASYNCHRONOUS:
        yield Problem(
            "plan.loss_scaling",
            f"per-block changes the blocks' scales between steps, and under {plan.schedule} gradients are under way at "
            "all times",
            "set it to dynamic, or plan.schedule to a synchronous one such as 1f1b",
        )
    if plan.tensor > 1:
        yield Problem(
            "plan.loss_scaling",
            "per-block makes the stream between blocks float32, which the regions that plan.tensor divides do not "
            "know of yet",
            "set it to dynamic, or plan.tensor to 1",
        )
    if job.model is not None and not isinstance(job.model, BaseModel):
        from shardwise.memory import block_scale  # with torch, which most uses of a plan do without

        try:
            block_scale.check(job.model)
        except ValueError as error:
            reason, _, mend = str(error).partition("; ")
            yield Problem("plan.loss_scaling", reason, mend)


def _reduce_dtype(plan: Plan, job: _Job) -> Iterator[Problem]:
    if plan.reduce_dtype == "master":
        return
    if plan.data_parallel * plan.context == 1:
        yield Problem(
            "plan.reduce_dtype",
            f"{plan.reduce_dtype} is for gradients between data-parallel ranks, and there is one",
            "set plan.replicate or plan.shard above 1, or plan.reduce_dtype to master",
        )
    if plan.reduce_dtype == "fp16" and plan.precision != "fp16":
        yield Problem(
            "plan.reduce_dtype",
            f"fp16 loses gradients below 6e-8, and plan.precision = {plan.precision!r} does not scale its loss up",
            "set it to bf16, or plan.precision to fp16",
        )


def _offload(plan: Plan, job: _Job) -> Iterator[Problem]:
    if plan.offload.master and plan.precision in ("fp64", "fp32", "bf16-pure"):
        yield Problem(
            "plan.offload.master",
            f"precision {plan.precision} has no master weights beside its parameters",
            "offload parameters instead, or set plan.precision to bf16 or fp16",
        )
    if plan.offload.parameters and plan.zero < 3:
        yield Problem(
            "plan.offload.parameters",
            f"with zero {plan.zero} the whole parameters are in use from step to step",
            "set plan.zero to 3, which brings them block by block, on one rank too",
        )
    if plan.offload.gradients and plan.zero < 2:
        yield Problem(
            "plan.offload.gradients",
            f"with zero {plan.zero} whole gradients are in memory while backward adds to them",
            "set plan.zero to 2 or 3, which keep sums of them, on one rank too",
        )
    if plan.offload.parameters and plan.schedule in ASYNCHRONOUS:
        yield Problem(
            "plan.offload.parameters",
            f"{plan.schedule} keeps several weight versions, which are in memory",
            "set plan.schedule to a synchronous one such as 1f1b, or leave it out",
        )


_RULES = (
    _not_built,
    _ranks,
    _batch,
    _zero,
    _sequence,
    _tensor,
    _context,
    _slices,
    _chunks,
    _two_versions,
    _tied,
    _schedule_file,
    _vertical_sync,
    _in_flight,
    _tied_asynchronous,
    _stages,
    _expert,
    _averaging,
    _compression,
    _fp8,
    _loss_scaling,
    _reduce_dtype,
    _offload,
)
