"""What is built of what a plan may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise import toml
from shardwise.plan_rules.job import Job
from shardwise.plan_values import Offload
from shardwise.problems import Problem

if TYPE_CHECKING:
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


RULES = (_not_built,)
