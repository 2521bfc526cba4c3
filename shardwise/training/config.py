"""The sections [train], [checkpoint] and [log] of a configuration."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TrainConfig(BaseModel):
    """How long a job trains, at which rate, and what it does when something goes wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    run: str = ""
    """The run folder; a folder that holds a checkpoint is continued. Empty makes a new one, runs/DATE-TIME."""
    steps: Positive = 300
    """Batches to take in all."""
    seed: Count = 0
    """Seed of the initial parameters and of everything random in training."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up; wsd is flat and decays at the end."""
    warmup: Count = 20
    """Updates over which the learning rate rises linearly from zero."""
    min_lr: Fraction = 0.1
    """Where the schedule ends, as a fraction of optimizer.lr."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The share of the steps that the decay of wsd takes."""
    clip: Amount = 1.0
    """The largest global gradient norm; 0 does not clip."""
    eval_every: Count = 100
    """Steps between evaluations on the held-out text; 0 evaluates at the end only."""
    eval_batches: Count = 0
    """Batches in an evaluation; 0 takes the whole held-out text."""
    device: str = "auto"
    """auto takes the accelerator that torch finds; or a device type, cpu or cuda."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or a gradient norm that is not finite does: stop the job, or skip that step."""
    max_skips: Positive = 20
    """Steps skipped in a row after which skip stops too."""
    restarts: Count = 0
    """Times the workers are started again, from the last checkpoint, after one of them has died."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1800.0
    """Seconds a rank waits for the others before it gives up."""


class CheckpointConfig(BaseModel):
    """When checkpoints are written, which are kept, and what happens when one cannot be written."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    every: Count = 100
    """Steps between checkpoints; 0 writes the last one only. A stop by a signal always writes one."""
    keep: Positive = 2
    """How many of the newest stay."""
    keep_every: Count = 0
    """A checkpoint whose step is a multiple of this stays for good; 0 keeps none so."""
    asynchronous: bool = True
    """Whether training goes on while a copy of the state is written."""
    on_failure: Literal["continue", "stop"] = "continue"
    """When a checkpoint cannot be written, training goes on and the next is tried when it is due, or training stops."""
    patience: Amount = 300.0
    """Seconds in which the last checkpoint of a job is tried again before it is given up."""
    initial: str = ""
    """A run folder or a checkpoint whose model parameters a new run starts from."""


class LogConfig(BaseModel):
    """What is shown and recorded."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    every: Positive = 10
    """Steps between rows of metrics."""
    tensorboard: bool | None = None
    """Whether TensorBoard events are written; left out, they are where tensorboard is installed."""
    wandb: str = ""
    """The Weights & Biases project to report to; empty reports nowhere."""
    timeline: bool = False
    """Whether to record when pipeline actions run, in timeline/pipeline.json, for shardwise schedule --measured."""
    profile: str = ""
    """Steps to trace with torch.profiler, FIRST:LAST (last excluded); a Chrome trace for each rank in timeline/."""
    peak_tflops: Amount = 0.0
    """What a rank's device can do at most, in TFLOP/s, for model-FLOP utilisation; 0 measures it."""
    sample: Count = 0
    """Tokens to generate once training has finished; 0 generates none."""
    prompt: str = ""
    """What the sample starts from."""

    @field_validator("profile")
    @classmethod
    def _is_range(cls, value: str) -> str:
        if value and not (re.fullmatch(r"\d+:\d+", value) and steps_of(value)):
            raise ValueError('is not a range of steps; give FIRST:LAST, as "10:12"')
        return value


def steps_of(profile: str) -> range:
    """The steps that `log.profile` names."""
    first, last = profile.split(":")
    return range(int(first), int(last))
