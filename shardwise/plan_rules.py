"""Every rule on what goes with what in a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel

from shardwise import toml
from shardwise.pipeline_parallel.schedule import FAMILIES, SLICED, Family, build
from shardwise.plan_values import (
    ASYNCHRONOUS,
    Offload,
)
from shardwise.problems import Problem

if TYPE_CHECKING:
    from torch import nn

    from shardwise.models.config import ModelConfig
    from shardwise.plan import Plan

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


class Job(NamedTuple):
    """What is known besides the plan."""

    model: nn.Module | ModelConfig | None
    num_ranks: int | None
    batch: int | None

    def setting(self, name: str) -> int:
        """A number or switch of the model's config; 0 where a user's module has none."""
        return int(getattr(self.model, name, 0)) if isinstance(self.model, BaseModel) else 0


# Each rule is a pure function of a plan and the job; it yields a problem for each thing that cannot be.


def _not_built(plan: Plan, job: Job) -> Iterator[Problem]:
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


def _ranks(plan: Plan, job: Job) -> Iterator[Problem]:
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


def _batch(plan: Plan, job: Job) -> Iterator[Problem]:
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


def _zero(plan: Plan, job: Job) -> Iterator[Problem]:
    # Stages 2 and 3 are also what keeps gradients and parameters elsewhere, on one rank too.
    elsewhere = (plan.zero == 3 and plan.offload.parameters) or (plan.zero >= 2 and plan.offload.gradients)
    if plan.zero and plan.shard * plan.context == 1 and not elsewhere:
        yield Problem(
            "plan.zero", f"{plan.zero} divides state over one rank", "set plan.shard above 1 or plan.zero to 0"
        )


def _sequence(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.sequence and plan.tensor == 1:
        yield Problem(
            "plan.sequence",
            "splits the sequence over the tensor axis, which has one rank",
            "set plan.tensor above 1 or plan.sequence to false",
        )


def _tensor(plan: Plan, job: Job) -> Iterator[Problem]:
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


def _context(plan: Plan, job: Job) -> Iterator[Problem]:
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


def _slices(plan: Plan, job: Job) -> Iterator[Problem]:
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


def _chunks(plan: Plan, job: Job) -> Iterator[Problem]:
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


def _two_versions(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.schedule == "pipedream-2bw" and plan.microbatches < plan.pipeline:
        yield Problem(
            "plan.microbatches",
            f"two weight versions are enough for pipedream-2bw only with a microbatch for each of the "
            f"{plan.pipeline} stages, not {plan.microbatches}",
            f"set it to {plan.pipeline} or more, or plan.schedule to pipedream",
        )


def _tied(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.schedule.startswith("pipedream") and plan.pipeline > 1 and job.setting("tied"):
        yield Problem(
            "plan.schedule",
            f"{plan.schedule} updates each stage at its own time, and the tied embedding is on the first and the last",
            "set model.tied to false, or choose a synchronous schedule such as 1f1b",
        )


def _schedule_file(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.schedule in FAMILIES:
        return
    try:
        found = build(plan.schedule, plan.pipeline, plan.microbatches, plan.chunks, slices=plan.slices)
        if found.asynchronous and plan.slices > 1:
            raise ValueError("the file's schedule is asynchronous, which slices are not; set plan.slices to 1")
    except ValueError as error:
        reason, _, mend = str(error).partition("; ")
        yield Problem("plan.schedule", reason, mend or "mend the file or name another schedule")


def _vertical_sync(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.vertical_sync and plan.schedule != "pipedream":
        yield Problem(
            "plan.vertical_sync",
            f"{plan.schedule} keeps no weight versions that differ between stages",
            "set plan.schedule to pipedream or plan.vertical_sync to false",
        )


def _in_flight(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.in_flight and plan.schedule != "auto":
        yield Problem(
            "plan.in_flight",
            f"{plan.schedule} is not searched for: what it holds is fixed",
            "set plan.schedule to auto or plan.in_flight to 0",
        )


def _tied_asynchronous(plan: Plan, job: Job) -> Iterator[Problem]:
    tied = isinstance(job.model, BaseModel) and getattr(job.model, "ties", getattr(job.model, "tied", False))
    if tied and plan.pipeline > 1 and plan.schedule in ASYNCHRONOUS:
        yield Problem(
            "plan.schedule",
            f"{plan.schedule} updates each stage at its own time, so the embedding that first and last stage share "
            "would differ between them",
            "set model.tied to false, or plan.schedule to a synchronous one such as 1f1b",
        )


def _stages(plan: Plan, job: Job) -> Iterator[Problem]:
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


def _expert(plan: Plan, job: Job) -> Iterator[Problem]:
    ranks = plan.replicate * plan.shard * plan.context
    if ranks % plan.expert:
        yield Problem(
            "plan.expert",
            f"{plan.expert} does not divide the {ranks} ranks of replicate x shard x context that share the experts",
            f"choose a divisor of {ranks}",
        )


def _averaging(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.averaging != "every-step" and plan.replicate == 1:
        yield Problem(
            "plan.averaging",
            f"{plan.averaging} averages the copies of the replicate axis, and there is one",
            "set plan.replicate above 1 or plan.averaging to every-step",
        )


def _compression(plan: Plan, job: Job) -> Iterator[Problem]:
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


def _fp8(plan: Plan, job: Job) -> Iterator[Problem]:
    if plan.precision == "fp8" and plan.tensor > 1:
        yield Problem(
            "plan.precision",
            "fp8 multiplies whole layers, and those that plan.tensor divides have products of their own",
            "set it to bf16, or plan.tensor to 1",
        )


def _loss_scaling(plan: Plan, job: Job) -> Iterator[Problem]:
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


def _reduce_dtype(plan: Plan, job: Job) -> Iterator[Problem]:
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


def _offload(plan: Plan, job: Job) -> Iterator[Problem]:
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


RULES = (
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
