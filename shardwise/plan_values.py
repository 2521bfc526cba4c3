"""The values a plan's keys may take, where a type alone does not say it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from shardwise.pipeline_parallel.schedule import FAMILIES
from shardwise.problems import nearest

# These update weights while microbatches are in flight.
ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
SCHEDULE_FILES = (".csv", ".json")
CUTS = ("parameters", "flops", "time", "memory")


def _schedule(name: str) -> str:
    if name in FAMILIES or Path(name).suffix in SCHEDULE_FILES:
        return name
    near = nearest(name, FAMILIES)
    raise ValueError(
        f"{name!r} is not a schedule; {f'did you mean {near}? ' if near else ''}"
        f"choose one of {', '.join(FAMILIES)}, or a path ending in {' or '.join(SCHEDULE_FILES)}"
    )


def _cut(value: object) -> object:
    if value in CUTS:
        return value
    if isinstance(value, list | tuple) and value and all(type(count) is int and count >= 0 for count in value):
        return tuple(value)
    raise ValueError(
        f"{value!r} is not a way to cut; choose {', '.join(CUTS)}, or list the number of layers of each stage"
    )


def _averaging(value: str) -> str:
    if value in ("every-step", "delayed") or re.fullmatch(r"local:[1-9]\d*", value):
        return value
    raise ValueError(f"{value!r} is not a way to average; choose every-step, delayed, or local:STEPS such as local:16")


def bytes_of(text: str) -> int | None:
    """A number of bytes such as "2GiB" or "500MB"; None if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B", text)
    if found is None:
        return None
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))


def limit_of(num_bytes: int) -> str:
    """The number of bytes as a plan spells it, rounded up."""
    unit, name = (1 << 20, "MiB") if num_bytes >= 100 << 20 else (1 << 10, "KiB")
    return f"{-(-num_bytes // unit)}{name}"


def _recompute(value: object) -> object:
    if isinstance(value, str) and (re.fullmatch(r"none|full|selective|sqrt|every:[1-9]\d*", value) or bytes_of(value)):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise ValueError(
        f"{value!r} is not a way to recompute; choose none, full, selective, sqrt, every:K such as every:2, "
        "the fraction of activation memory to keep, 0.0 to 1.0, or a rank's limit of it such as 2GiB"
    )


def _compress_gradients(value: str) -> str:
    if re.fullmatch(r"none|int8|powersgd:[1-9]\d*", value):
        return value
    kind, _, fraction = value.partition(":")
    if kind == "topk" and re.fullmatch(r"\d*\.?\d+", fraction) and 0 < float(fraction) <= 1:
        return value
    raise ValueError(
        f"{value!r} is not a gradient compression; "
        "choose none, int8, powersgd:RANK such as powersgd:4, or topk:FRACTION such as topk:0.01"
    )


def _place(value: str) -> str:
    if value == "cpu" or re.fullmatch(r"disk:.+", value):
        return value
    raise ValueError(f"{value!r} is not a place; choose cpu, or disk:FOLDER such as disk:/scratch/state")


Size = Annotated[int, Field(ge=1)]
ScheduleName = Annotated[str, AfterValidator(_schedule)]
Cut = Annotated[Literal["parameters", "flops", "time", "memory"] | tuple[int, ...], BeforeValidator(_cut)]
Averaging = Annotated[str, AfterValidator(_averaging)]
Recompute = Annotated[str | float, BeforeValidator(_recompute)]
GradientCompression = Annotated[str, AfterValidator(_compress_gradients)]
Place = Annotated[str, AfterValidator(_place)]


class Offload(BaseModel):
    """Where each kind of state lives when it is not on the device: `cpu` or `disk:FOLDER`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    optimizer: Place | None = None
    """Where the optimizer's moments live: cpu or disk:FOLDER; left out, on the device."""
    master: Place | None = None
    """The float32 masters of bf16 and fp16."""
    parameters: Place | None = None
    """A rank's part of the parameters between their uses; needs zero 3."""
    gradients: Place | None = None
    """A rank's part of the summed gradients; needs zero 2 or 3."""
    activations: Place | None = None
    """What forward saves for backward."""
