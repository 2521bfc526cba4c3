"""Rotary position embedding and its extensions to longer sequences."""

from __future__ import annotations

import math
import weakref
from typing import Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from torch import Tensor

# Which values each kind of scaling reads, with the default of each; None: the user has to give it.
_READS: dict[str, dict[str, float | None]] = {
    "none": {},
    "linear": {"factor": None},
    "dynamic": {"factor": None, "original_sequence": None},
    "yarn": {"factor": None, "original_sequence": None, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 0.0},
    "llama3": {"factor": 8.0, "original_sequence": 8192, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0},
}


class RopeScaling(BaseModel):
    """How rotary frequencies change so that a model reads longer sequences than it was first trained on.

    - "linear": every frequency divided by `factor`. Position Interpolation (arXiv 2306.15595, section 2.3).
    - "dynamic": a larger base once the sequence exceeds `original_sequence`, growing with it. Dynamic NTK (bloc97 and
      emozilla, 2023; described in YaRN, arXiv 2309.00071).
    - "yarn": low frequencies divided by `factor`, high ones kept, a ramp between, and a temperature on the scores
      (arXiv 2309.00071).
    - "llama3": the same idea with bounds on the wavelength and no temperature (Llama 3.1; `apply_scaling` in Meta's
      llama-models).

    A value of 0 stands for the default of the kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    kind: Literal["none", "linear", "dynamic", "yarn", "llama3"] = "none"
    """Which rule."""
    factor: float = Field(0.0, ge=0, allow_inf_nan=False, validate_default=True)
    """How many times longer sequences become."""
    original_sequence: int = Field(0, ge=0, validate_default=True)
    """Tokens of the sequences before the extension."""
    low_frequency_factor: float = Field(0.0, ge=0, allow_inf_nan=False, validate_default=True)
    """llama3: wavelengths over original_sequence / this are divided by `factor`."""
    high_frequency_factor: float = Field(0.0, ge=0, allow_inf_nan=False, validate_default=True)
    """llama3: wavelengths under original_sequence / this are kept."""
    beta_fast: float = Field(0.0, ge=0, allow_inf_nan=False, validate_default=True)
    """yarn: dimensions that turn more often than this within original_sequence are kept."""
    beta_slow: float = Field(0.0, ge=0, allow_inf_nan=False, validate_default=True)
    """yarn: dimensions that turn less often than this within original_sequence are divided by `factor`."""
    attention_factor: float = Field(0.0, ge=0, allow_inf_nan=False, validate_default=True)
    """yarn: queries and keys are multiplied by this; by default 0.1 ln(factor) + 1."""

    @field_validator(
        "factor",
        "original_sequence",
        "low_frequency_factor",
        "high_frequency_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
    )
    @classmethod
    def _read_by_kind(cls, value: float, info: ValidationInfo) -> float:
        kind, name = info.data.get("kind"), info.field_name
        if kind is None or name is None:  # the kind itself was refused
            return value
        if name not in _READS[kind]:
            if value:
                raise ValueError(f"{value} is not read by kind = {kind!r}; leave it out")
            return value
        if name == "factor" and 0 < value < 1:
            raise ValueError(f"{value} would shorten sequences; give at least 1")
        default = _READS[kind][name]
        if not value and default is None:
            raise ValueError(f"{value} stands for a default, and kind = {kind!r} has none; give a value")
        if name == "attention_factor" and not value:
            return 0.1 * math.log(info.data["factor"]) + 1 if info.data.get("factor") else 0.0
        return value or default or 0.0

    @field_validator("high_frequency_factor", "beta_slow")
    @classmethod
    def _ordered(cls, value: float, info: ValidationInfo) -> float:
        low, fast = info.data.get("low_frequency_factor"), info.data.get("beta_fast")
        if info.field_name == "high_frequency_factor" and low and value <= low:
            raise ValueError(f"{value} is not above low_frequency_factor = {low}; give more")
        if info.field_name == "beta_slow" and fast and value >= fast:
            raise ValueError(f"{value} is not below beta_fast = {fast}; give less")
        return value


class Rope(NamedTuple):
    """Everything that rotary angles depend on."""

    size: int  # of a head, even
    theta: float
    scaling: RopeScaling


def rescales(rope: Rope, length: int) -> bool:
    """Whether a sequence of `length` tokens turns all positions by other angles than a shorter one."""
    return rope.scaling.kind == "dynamic" and length > rope.scaling.original_sequence


def frequencies(rope: Rope, length: int) -> Tensor:
    """Angle per position of each pair of dimensions, (D/2,) float64 on the CPU.

    RoFormer (arXiv 2104.09864, section 3.2.2): theta^(-2i/D), then the rule of `rope.scaling`.

    Args:
        rope: what the angles depend on.
        length: tokens in the sequence; only dynamic scaling reads it.
    """
    size, theta, scaling = rope
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device="cpu") / size
    if rescales(rope, length):
        stretch = scaling.factor * length / scaling.original_sequence - (scaling.factor - 1)
        theta = theta * stretch ** (size / (size - 2))
    plain = theta**-exponents
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "yarn":
        kept = _yarn_kept(rope)
    elif scaling.kind == "llama3":
        turns = scaling.original_sequence * plain / (2 * math.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        return plain
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn_kept(rope: Rope) -> Tensor:
    """How much of each frequency YaRN keeps, 0 to 1, (D/2,); the ramp starts and ends at whole dimensions."""
    size, theta, scaling = rope

    def dimension(turns: float) -> float:
        return size * math.log(scaling.original_sequence / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(dimension(scaling.beta_fast)), 0)
    last = min(math.ceil(dimension(scaling.beta_slow)), size - 1)
    index = torch.arange(size // 2, dtype=torch.float64, device="cpu")
    return 1 - ((index - first) / (last - first if last != first else 1e-3)).clamp(0, 1)


# The longest table made so far of each (rope, device, dtype). Not buffers: a model that was built on the meta device
# has none to fill, none enters a state dict, and all blocks share one.
_tables: dict[tuple[Rope, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}


def tables(rope: Rope, positions: Tensor | None, start: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Factors (cos, sin) for `rotate`, each (S, 1, D) or, with positions, (B, S, 1, D).

    Args:
        rope: what the angles depend on.
        positions: (B, S) int positions, or None for start, start + 1, ... start + length - 1.
        start: first position without `positions`.
        length: S.
        like: the tensor to rotate; gives device and dtype. Half precision gets float32 factors.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    if positions is not None:
        if rope.scaling.kind != "dynamic":
            return _shared_factors(rope, positions, dtype)
        # Each row by its own length, so that a row reads the same whatever else is in the batch.
        rows = [_factors(rope, row, int(row.max()) + 1, dtype) for row in positions]
        return torch.stack([cos for cos, _ in rows]), torch.stack([sin for _, sin in rows])
    stop = start + length
    # A subclass (a fake tensor that only traces shapes) must neither see nor fill a table of real numbers.
    if rescales(rope, stop) or torch.compiler.is_compiling() or type(like) is not Tensor:
        return _factors(rope, torch.arange(start, stop, device=like.device), stop, dtype)
    key = (rope, like.device, dtype)
    found = _tables.get(key)
    if found is None or len(found[0]) < stop:
        # Not in inference mode: a table made there could not be saved for a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            count = 1 << (stop - 1).bit_length()
            found = _tables[key] = _factors(rope, torch.arange(count, device=like.device), 0, dtype)
    return found[0][start:stop], found[1][start:stop]


# The last factors made of given positions: all blocks of a pass ask for the same, and angles in float64 take as long as
# the rotation itself.
_last: tuple[tuple[object, ...], weakref.ref[Tensor], tuple[Tensor, Tensor]] | None = None


def _shared_factors(rope: Rope, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    global _last
    unfit = torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or type(positions) is not Tensor
    # Tensors of inference mode count no versions, so a change of them in place would go unseen.
    if unfit or positions.is_inference():
        return _factors(rope, positions, 0, dtype)
    key = (rope, dtype, positions._version)
    if _last is not None and _last[0] == key and _last[1]() is positions:
        return _last[2]
    found = _factors(rope, positions, 0, dtype)
    _last = (key, weakref.ref(positions), found)
    return found


def _factors(rope: Rope, positions: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # Angles in float64: position 100 000 in float32 is off by up to 0.004 rad. Apple's GPUs have no float64.
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    angles = positions[..., None, None] * frequencies(rope, length).to(positions.device, wide)  # (..., S, 1, D/2)
    scale = rope.scaling.attention_factor or 1.0
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + D/2]) by its angle.

    Args:
        x: (B, S, N, D) queries or keys.
        cos, sin: from `tables`; `sin` is negative in its first half.

    Returns:
        (B, S, N, D) of x's dtype.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
