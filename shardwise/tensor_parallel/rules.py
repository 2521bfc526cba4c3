"""Which layers the tensor axis divides, and how: patterns of module names -> styles.

Styles:
    column: a linear layer divided by its outputs; what follows works on this rank's part of them.
    row: a linear layer divided by its inputs; its sum over the ranks is whole again.
    vocabulary: an embedding or the output matrix, divided over the tokens.
    head: a module that works on this rank's part of a column layer's output (its heads): the same parameters on every
        rank, with summed gradients, and random numbers of the rank's own.
    sequence: a module that treats every position alike, such as a norm: the same on every rank; with plan.sequence it
        works on the rank's positions, and gradients are summed. An embedding of positions is one too.
    replicated: the same on every rank, on whole sequences.
    entrance: a module around column layers that reads the sequence's length from its first argument: with plan.sequence
        the stream is gathered before it, in place of before each of them.

In a pattern `*` stands for one part of the path; alternatives in its last part ("query|key|value") are layers with one
input, which are computed together. The first rule that names a module, or the nearest module it is in, counts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import nn

Kind = Literal["column", "row", "vocabulary", "head", "sequence", "replicated", "entrance"]


@dataclass(frozen=True)
class Style:
    """How one module is divided.

    Args:
        kind: see this module.
        unit: outputs of a column layer that stay together, such as the size of a head: a number, or the attribute of
            the parent module that has it. A layer that has fewer units than there are ranks, and than others computed
            with it, is held by several ranks (shared key and value heads).
        sections: of a layer that several matrices were fused into, how many of equal size, or their lengths; each is
            divided by itself.
    """

    kind: Kind
    unit: int | str = 1
    sections: int | tuple[int, ...] = 1


Rules = Mapping[str, "Style | Kind"]

# The reference families of shardwise.models.
FAMILIES: Rules = {
    "embedding.tokens": "vocabulary",
    "embedding.positions": "sequence",
    "blocks.*.attention.query|key|value": Style("column", unit="head_size"),
    "blocks.*.attention.query_norm": "head",
    "blocks.*.attention.key_norm": "head",
    "blocks.*.attention.core": "head",
    "blocks.*.attention.output": "row",
    "blocks.*.feed_forward.gate|up": "column",
    "blocks.*.feed_forward.down": "row",
    "head.output": "vocabulary",
}

# What Hugging Face's plans call these styles.
_HUGGING_FACE: dict[str, Kind] = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "head",
}
# Hugging Face models that have no plan of their own, by type.
_WITHOUT_PLAN: dict[str, dict[str, "Style | Kind"]] = {
    "gpt2": {
        "transformer.wte": "vocabulary",
        "transformer.wpe": "sequence",
        "transformer.h.*.attn.c_attn": Style("column", unit="head_dim", sections=3),
        "transformer.h.*.attn.c_proj": "row",
        "transformer.h.*.mlp.c_fc": "column",
        "transformer.h.*.mlp.c_proj": "row",
        "lm_head": "vocabulary",
    },
}
# Siblings that Hugging Face's models give one input.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Assigned:
    """The style of one module, by which rule, and with which siblings it is computed."""

    style: Style
    pattern: str
    together: str = ""


def hugging_face_rules(model: nn.Module) -> dict[str, Style | Kind]:
    """The rules of a Hugging Face model's own tensor-parallel plan; empty if it has none.

    Raises:
        ValueError: the plan has a style that is not known here.
    """
    plan = getattr(model, "_tp_plan", None)
    config = getattr(model, "config", None)
    if not plan and config is not None:
        plan = getattr(config, "base_model_tp_plan", None)
    if not isinstance(plan, dict) or not plan:
        kind_of_model = getattr(config, "model_type", "")
        attention = getattr(config, "attn_pdrop", 0.0)
        if kind_of_model in _WITHOUT_PLAN and attention:
            raise ValueError(
                f"the model's attn_pdrop = {attention} drops attention weights inside a module that also drops of the "
                "whole stream, which tensor ranks must do alike; set attn_pdrop to 0"
            )
        return dict(_WITHOUT_PLAN.get(kind_of_model, {}))
    output_of = getattr(model, "get_output_embeddings", None)
    output = output_of() if callable(output_of) else None
    found: dict[str, Style | Kind] = {}
    for path, name in plan.items():
        parent, _, last = path.rpartition(".")
        if output is not None and "*" not in path and _submodule(model, path) is output:
            found[path] = "vocabulary"
            continue
        if name not in _HUGGING_FACE:
            raise ValueError(
                f"the model's own plan divides {path!r} as {name!r}, which has no counterpart here; "
                f"pass parallelize(..., rules={{{path!r}: ...}}) with one of {', '.join(get_args(Kind))}"
            )
        kind = _HUGGING_FACE[name]
        siblings = next((group for group in _TOGETHER if last in group), (last,))
        together = "|".join(other for other in siblings if f"{parent}.{other}".lstrip(".") in plan)
        style = Style(kind, unit="head_dim") if last in _TOGETHER[0] and kind == "column" else kind
        found[f"{parent}.{together or last}".lstrip(".")] = style
        if last in _TOGETHER[0]:
            found.setdefault(parent, "head")  # its attention weights' dropout
    return dict(sorted(found.items(), key=lambda item: -item[0].count(".")))


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def assign(model: nn.Module, rules: Rules | None) -> dict[str, Assigned]:
    """The style of every module that a rule names, by path.

    Args:
        model: whose modules.
        rules: the user's, which come first; then those of the model's own plan, then those of our families.

    Raises:
        ValueError: a rule of the user names no module, or no style.
    """
    own = dict(rules or {})
    table = {**own, **{p: s for p, s in [*hugging_face_rules(model).items(), *FAMILIES.items()] if p not in own}}
    found: dict[str, Assigned] = {}
    used: set[str] = set()
    compiled = [(pattern, _compile(pattern), _style(pattern, style)) for pattern, style in table.items()]
    for path, _ in model.named_modules():
        for pattern, expression, style in compiled:
            if not expression.fullmatch(path):
                continue
            used.add(pattern)
            if path not in found:
                parent = path.rpartition(".")[0]
                found[path] = Assigned(style, pattern, f"{parent}:{pattern}" if "|" in pattern else "")
    for pattern in own:
        if pattern not in used:
            near = next((path for path, _ in model.named_modules() if path.endswith(pattern.rpartition(".")[2])), "")
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(
                f"rules: {pattern!r} names no module of {type(model).__name__}{hint or '; correct the pattern'}"
            )
    return found


def output_matrix(model: nn.Module, rules: Rules | None) -> nn.Linear | None:
    """The linear layer that makes the logits: what the user's rules call "vocabulary", what a Hugging Face model says
    of itself, or that of our families; None if that does not tell."""
    own = [(_compile(pattern), _style(pattern, style).kind) for pattern, style in (rules or {}).items()]
    own.append((_compile("head.output"), "vocabulary"))
    output_of = getattr(model, "get_output_embeddings", None)
    found = {id(output): output for output in [output_of() if callable(output_of) else None] if output is not None}
    for path, module in model.named_modules():
        kind = next((kind for expression, kind in own if expression.fullmatch(path)), "")
        if kind == "vocabulary" and isinstance(module, nn.Linear):
            found[id(module)] = module
    modules = list(found.values())
    return modules[0] if len(modules) == 1 and type(modules[0]) is nn.Linear else None


def nearest(assigned: Mapping[str, Assigned], path: str) -> Assigned | None:
    """The style of a module: its own, or that of the nearest module it is in whose style holds for what is inside."""
    if path in assigned:
        return assigned[path]
    while path:
        path = path.rpartition(".")[0]
        if path in assigned and assigned[path].style.kind in ("sequence", "replicated"):
            return assigned[path]
    return None


def entered(assigned: Mapping[str, Assigned], path: str) -> bool:
    """Whether a module is in one that is an entrance."""
    while path:
        path = path.rpartition(".")[0]
        if path in assigned and assigned[path].style.kind == "entrance":
            return True
    return False


def _compile(pattern: str) -> re.Pattern[str]:
    *parents, last = pattern.split(".")
    parts = [*(("[^.]+" if part == "*" else re.escape(part)) for part in parents)]
    parts.append("[^.]+" if last == "*" else "(?:" + "|".join(map(re.escape, last.split("|"))) + ")")
    return re.compile(r"\.".join(parts))


def _style(pattern: str, style: Any) -> Style:
    if isinstance(style, str) and style in get_args(Kind):
        return Style(style)  # type: ignore[arg-type]
    if isinstance(style, Style) and style.kind in get_args(Kind):
        return style
    kinds = ", ".join(get_args(Kind))
    raise ValueError(f"rules[{pattern!r}] = {style!r} is not a style; choose one of {kinds}, or Style(...) of one")


def resolve(style: Style, path: str, parent: nn.Module, length: int) -> Style:
    """A column style whose unit and sections are numbers.

    Raises:
        ValueError: the parent has no such attribute, or the sections do not make up the layer's `length` outputs.
    """
    unit = style.unit
    if isinstance(unit, str):
        found = getattr(parent, unit, None)
        if not isinstance(found, int):
            raise ValueError(
                f"rules: {path!r} is divided in units of {unit!r}, which {type(parent).__name__} does not have; "
                "give a number"
            )
        unit = found
    sections = style.sections
    if isinstance(sections, int):
        if length % sections:
            raise ValueError(
                f"rules: the {length} outputs of {path!r} are not {sections} equal sections; give their lengths"
            )
        sections = (length // sections,) * sections
    if sum(sections) != length:
        raise ValueError(f"rules: sections {sections} do not make up the {length} outputs of {path!r}; correct them")
    return replace(style, unit=unit, sections=sections)


def groups(assigned: Mapping[str, Assigned], paths: Iterable[str]) -> Iterator[list[str]]:
    """The column layers among `paths`, those that are computed together as one list."""
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(assigned[path].together or path, []).append(path)
    yield from found.values()
