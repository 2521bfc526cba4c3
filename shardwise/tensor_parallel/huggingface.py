"""Hugging Face models: where their sequence may be split, and their attention as modules of its own, which context
parallelism can replace.

In transformers a layer looks up the function that computes attention by a name in the model's config. Here that name
leads to a module `core` of the layer.
"""

import sys
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.tensor_parallel.region import SEQUENCE_DIM, Region
from shardwise.tensor_parallel.rules import Assigned, Style
from shardwise.tensor_parallel.sequence import on_stream, own_share

# The name of our function, and the only input whose meaning does not depend on the model's own masks.
NAME = "shardwise_core"
INPUTS = frozenset({"input_ids"})


class AttentionCore(nn.Module):
    """Causal attention as a Hugging Face layer asks for it.

    Args:
        scale: of the scores.
        window: positions that a query sees, its own included; 0: all before it.
        dropout: of the attention weights.
    """

    def __init__(self, scale: float, window: int, dropout: float) -> None:
        super().__init__()
        self.scale = scale
        self.window = window
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, N, S, D), (B, K, S, D), (B, K, S, E) -> (B, N, S, E)."""
        hidden = None
        if 0 < self.window < q.shape[2]:
            distance = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
            hidden = (distance < 0) | (distance >= self.window)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if hidden is None else ~hidden,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=hidden is None,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )


def is_hugging_face(model: nn.Module) -> bool:
    """Whether a model is one of transformers', which is then imported already."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D: a linear layer whose weight is (in, out)."""
    known = sys.modules.get("transformers.pytorch_utils")
    return known is not None and type(module) is known.Conv1D


def divide_between_layers(model: nn.Module, assigned: dict[str, Assigned], region: Region) -> None:
    """Split the stream over the sequence from the first layer on (`plan.sequence`).

    A model computes positions and masks from the length of its embedding's output, which stays whole; the first layer
    divides it, and attention, whose code reads the length of its input, gathers it.

    Args:
        assigned: the styles of the model's modules; those of its attention become entrances.

    Raises:
        ValueError: what the model does between its layers is not known.
    """
    modules = dict(model.named_modules())
    inside = [path for path, found in assigned.items() if found.style.kind == "column" and ".layers." in path]
    stacks = {path.split(".layers.")[0] + ".layers" for path in inside}
    if len(stacks) != 1 or not isinstance(modules.get(min(stacks)), nn.ModuleList):
        raise ValueError(
            f"plan.sequence: {type(model).__name__} is not one stack of decoder layers of which a tensor-parallel plan "
            "of its own tells, so it is not known where its sequence may be split; set plan.sequence to false"
        )
    for path in inside:
        parent = path.rpartition(".")[0]
        if parent in assigned and assigned[parent].style.kind == "head":
            assigned[parent] = replace(assigned[parent], style=Style("entrance"))
    first = modules[min(stacks) + ".0"]
    on_stream(first, lambda x: own_share(x, region, SEQUENCE_DIM))


def cores(model: nn.Module) -> dict[str, nn.Module]:
    """By path, an attention module for every layer, not yet in the model.

    Raises:
        ValueError: attention of the model is not causal self-attention that is looked up by name.
    """
    found: dict[str, nn.Module] = {}
    name = type(model).__name__
    for path, module in model.named_modules():
        causal, scale = getattr(module, "is_causal", None), getattr(module, "scaling", None)
        if causal is False:
            raise ValueError(f"module {path!r} of {name} attends to later positions too; set plan.context = 1")
        if not causal or not isinstance(scale, float):
            continue
        window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
        dropout = getattr(module, "attention_dropout", 0.0)
        found[f"{path}.core"] = AttentionCore(scale, window or 0, getattr(dropout, "p", dropout))
    if not found:
        raise ValueError(
            f"no module of {name} looks its attention up as transformers' decoder models do; set plan.context = 1"
        )
    for path, module in model.named_modules():
        if getattr(module, "rope_type", None) in ("dynamic", "longrope"):
            raise ValueError(
                f"module {path!r} of {name} scales positions by the length of the whole sequence, which no rank's part "
                "shows; choose rope_type yarn or llama3, or set plan.context = 1"
            )
    return found


def route(model: nn.Module) -> None:
    """Make every layer of the model use its `core`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    model.config._attn_implementation = NAME  # type: ignore[union-attr]


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **settings: Any) -> Any:
    core: Any = module.core
    inside: Any = getattr(core, "core", core)  # of Ulysses, the module it runs on whole sequences
    asked = {
        "a mask": mask is not None,
        "softcap": settings.get("softcap") is not None,
        "s_aux": settings.get("s_aux") is not None,
        "another sliding_window": (settings.get("sliding_window") or 0) != inside.window,
        "another scaling": settings.get("scaling", inside.scale) != inside.scale,
    }
    if any(asked.values()):
        what = next(name for name, found in asked.items() if found)
        raise ValueError(f"plan.context: {type(module).__name__} asks for {what} in attention; set plan.context = 1")
    return core(q, k, v).transpose(1, 2).contiguous(), None
