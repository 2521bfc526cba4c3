"""Number formats: of the computation, of what travels, of what is kept for backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel

from shardwise.plan_rules.job import Job
from shardwise.plan_values import ASYNCHRONOUS
from shardwise.problems import Problem

if TYPE_CHECKING:
    from shardwise.plan import Plan


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
            yield Problem.of("plan.loss_scaling", error)


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


RULES = (
    _fp8,
    _loss_scaling,
    _reduce_dtype,
    _compression,
)
