"""What rules see besides the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel

if TYPE_CHECKING:
    from torch import nn

    from shardwise.models.config import ModelConfig


class Job(NamedTuple):
    """What is known besides the plan."""

    model: nn.Module | ModelConfig | None
    num_ranks: int | None
    batch: int | None

    def setting(self, name: str) -> int:
        """A number or switch of the model's config; 0 where a user's module has none."""
        return int(getattr(self.model, name, 0)) if isinstance(self.model, BaseModel) else 0
