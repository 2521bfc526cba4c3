"""The section [model]: which transformer, and its sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from shardwise.models.rotary import Rope, RopeScaling
from shardwise.problems import ProblemError, from_validation

# Beyond any model, and small enough that bytes can be counted.
LARGEST = 1 << 24
# Where the families differ beside their code; a value the user gives comes first.
_FAMILIES: dict[str, dict[str, object]] = {
    "gpt2": {"tied": True, "bias": True, "norm_eps": 1e-5},
    "llama": {"norm_eps": 1e-5, "rope_theta": 1e4},
    "qwen": {"qkv_bias": True, "norm_eps": 1e-6, "rope_theta": 1e6},
    "mistral": {"norm_eps": 1e-5, "rope_theta": 1e4, "window": 4096},
}


class ModelConfig(BaseModel):
    """Which decoder transformer, and its sizes. Values left out follow the family; a size of 0 means its default.

    Families: "gpt2" has learned positions, LayerNorm, GELU, biases and tied embeddings (Radford et al. 2019). "llama"
    has rotary positions, RMSNorm, SwiGLU and no biases (arXiv 2302.13971, 2307.09288). "qwen" is llama with biases on
    queries, keys and values (Qwen2, arXiv 2407.10671), or with query_key_norm = true instead of them (Qwen3, arXiv
    2505.09388). "mistral" is llama with attention to a sliding window (arXiv 2310.06825).

    Raises:
        ProblemError: a key does not exist or a size is not possible; one line each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    family: Literal["gpt2", "llama", "qwen", "mistral"] = "gpt2"
    """Which kind of transformer."""
    layers: int = Field(4, ge=1, le=LARGEST)
    """Blocks."""
    hidden: int = Field(256, ge=1, le=LARGEST)
    """Width of the residual stream."""
    heads: int = Field(4, ge=1)
    """Query heads."""
    head_size: int = Field(0, ge=0, validate_default=True)
    """Width of a head; 0: hidden / heads."""
    kv_heads: int = Field(0, ge=0, validate_default=True)
    """Key and value heads, each shared by heads / kv_heads query heads (arXiv 2305.13245); 0: as many as heads."""
    intermediate: int = Field(0, ge=0, le=LARGEST, validate_default=True)
    """Width inside the feed-forward part; 0: 4 hidden for gpt2, else 8/3 hidden rounded up to a multiple of 256 (32
    if hidden is under 1024)."""
    sequence: int = Field(1024, ge=1)
    """The longest sequence, in tokens: the table of learned positions, and the context that generation keeps."""
    vocabulary: int = Field(0, ge=0)
    """Rows of the embedding; 0: what the tokenizer has."""
    tied: bool = False
    """The output matrix is the embedding; by default for gpt2 only."""
    bias: bool = False
    """Every linear layer of a block has a bias, and every LayerNorm; by default for gpt2 only."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias; by default for qwen without query_key_norm, and wherever `bias` is set."""
    query_key_norm: bool = False
    """Queries and keys are normalised in each head, before rotation."""
    window: int = Field(0, ge=0)
    """Tokens that a token attends to, itself included; 0: all before it. By default 4096 for mistral."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Of embeddings, attention weights and the output of each half block."""
    norm_eps: float = Field(1e-5, gt=0, allow_inf_nan=False)
    """Added to the variance; by default 1e-5, qwen 1e-6."""
    rope_theta: float = Field(1e4, gt=1, allow_inf_nan=False)
    """Base of the rotary frequencies; by default 10 000, qwen 1 000 000."""
    rope_scaling: RopeScaling = RopeScaling()
    """How rotary frequencies stretch to longer sequences."""

    if not TYPE_CHECKING:  # the type checker keeps the signature that pydantic derives from the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ProblemError(from_validation(error, type(self), "model")) from None

    @property
    def rotary(self) -> bool:
        """Positions turn queries and keys, in place of a learned table."""
        return self.family != "gpt2"

    @property
    def rope(self) -> Rope | None:
        """What rotary angles depend on; None with learned positions."""
        return Rope(self.head_size, self.rope_theta, self.rope_scaling) if self.rotary else None

    @model_validator(mode="before")
    @classmethod
    def _family_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        family = values.get("family", "gpt2")
        defaults = dict(_FAMILIES.get(family, {})) if isinstance(family, str) else {}
        if values.get("query_key_norm") is True or values.get("bias", defaults.get("bias")) is True:
            defaults["qkv_bias"] = values.get("bias", defaults.get("bias", False))
        return {**defaults, **values}

    @field_validator("head_size", "kv_heads", "intermediate")
    @classmethod
    def _derived(cls, value: int, info: ValidationInfo) -> int:
        family: str | None = info.data.get("family")
        hidden: int | None = info.data.get("hidden")
        heads: int | None = info.data.get("heads")
        if value or family is None or hidden is None or heads is None:
            return value
        if info.field_name == "head_size":
            return max(1, hidden // heads)
        if info.field_name == "kv_heads":
            return heads
        return default_intermediate(family, hidden)

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        errors = [
            InitErrorDetails(
                type=PydanticCustomError("value_error", "{error}", {"error": line}),
                loc=(key,),
                input=getattr(self, key),
            )
            for key, line in _disagreements(self)
        ]
        if errors:
            raise ValidationError.from_exception_data("ModelConfig", errors)
        return self


def default_intermediate(family: str, hidden: int) -> int:
    """Width inside the feed-forward part when none is given: 4 hidden for gpt2, else LLaMA's rule.

    LLaMA (arXiv 2302.13971, section 2.2): 2/3 of 4 hidden, so that three matrices hold what two held, rounded up to a
    multiple.
    """
    if family == "gpt2":
        return 4 * hidden
    multiple = 256 if hidden >= 1024 else 32
    return -(-8 * hidden // (3 * multiple)) * multiple


def _disagreements(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """(key, "reason; mend") for each pair of values that cannot stand together."""
    heads, hidden, scaling = config.heads, config.hidden, config.rope_scaling
    if hidden % heads and config.head_size == max(1, hidden // heads):
        mend = f"choose a divisor of {hidden}, or give model.head_size"
        yield "heads", f"{heads} does not divide hidden = {hidden}; {mend}"
    if heads % config.kv_heads:
        yield "kv_heads", f"{config.kv_heads} does not divide heads = {heads}; choose a divisor of {heads}"
    if config.bias and not config.qkv_bias:
        yield "qkv_bias", "contradicts bias = true; leave it out"
    if not config.rotary:
        if scaling.kind != "none":
            yield "rope_scaling", f"family {config.family!r} has learned positions; leave it out or choose family llama"
        if config.rope_theta != 1e4:
            yield "rope_theta", f"family {config.family!r} has learned positions; leave it out or choose family llama"
        return
    if config.head_size % 2:
        yield "head_size", f"{config.head_size} is odd and rotation needs pairs; choose an even one"
    if scaling.kind == "dynamic" and config.head_size < 4:
        yield "head_size", f"{config.head_size} is too small for dynamic scaling; choose at least 4"
    if scaling.original_sequence > config.sequence:
        reason = f"is shorter than rope_scaling.original_sequence = {scaling.original_sequence}"
        yield "sequence", f"{config.sequence} {reason}; give the length after the extension"
