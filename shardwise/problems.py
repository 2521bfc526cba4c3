"""What a user asked for that cannot be: one line each, with the key, the reason and the mend."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


class Problem(NamedTuple):
    """One thing that cannot be as asked: the full key (`plan.tensor`), the reason with the value, and what to do."""

    key: str
    reason: str
    mend: str

    @classmethod
    def of(cls, key: str, error: ValueError) -> Problem:
        """What an error says of a key: "reason; mend", the key in front or not."""
        return cls(key, *_parted(str(error).removeprefix(f"{key}: ")))

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}" + (f"; {self.mend}" if self.mend else "")


class ProblemError(ValueError):
    """Every problem found, one line each; `problems` holds them as data."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[ProblemError], tuple[tuple[Problem, ...]]]:
        # An error raised in one rank is pickled on its way to the process that reports it.
        return type(self), (self.problems,)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` most likely stands for, or None when none is close."""
    by_lower = {name.lower(): name for name in known}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def unknown_key(key: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> Problem:
    """The problem of a dotted key that does not exist.

    Args:
        key: as the user wrote it.
        known: the names that could stand as its last part.
        elsewhere: full keys of other sections; one with the same last part is the likeliest meaning.
    """
    section, _, name = key.rpartition(".")
    known = list(known)
    moved = [other for other in elsewhere if other.rpartition(".")[2] == name]
    near = nearest(name, known)
    if near and not moved:
        moved = [f"{section}.{near}" if section else near]
    return Problem(key, "no such key", f"did you mean {' or '.join(moved)}?" if moved else f"known: {', '.join(known)}")


def from_validation(error: ValidationError, model: type[BaseModel], section: str) -> list[Problem]:
    """Translates pydantic's errors to problems: one per key, however many members of a union complained.

    Args:
        error: raised while `model` was validated.
        model: the model of the section; its fields are the known keys.
        section: name of the section, put in front of every key.
    """
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ProblemError):  # a section that explains itself
            found.update((problem.key, problem) for problem in cause.problems)
            continue
        names, owner = _locate(detail, model)
        key = ".".join([section, *names])
        if detail["type"] == "extra_forbidden":
            problem = unknown_key(key, owner.model_fields)
        elif detail["type"].startswith("model"):
            inner = ", ".join(f"{key}.{name}" for name in owner.model_fields)
            problem = Problem(key, f"{_shown(detail['input'])} is not possible", f"set what is in it: {inner}")
        else:
            problem = _explain(key, detail)
        if key in found and problem.mend and problem.mend not in found[key].mend:
            problem = found[key]._replace(mend=f"{found[key].mend}, or {problem.mend}")
        found[key] = problem
    return list(found.values())


def _locate(detail: ErrorDetails, model: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    """The names of an error's place without the tags of unions and indices of lists, and the model owning the last."""
    names: list[str] = []
    owner = model
    for part in map(str, detail["loc"]):
        if part in owner.model_fields:
            names.append(part)
            owner = _nested(owner.model_fields[part].annotation) or owner
        elif detail["type"] == "extra_forbidden" and part == str(detail["loc"][-1]):
            names.append(part)
    return names, owner


def _nested(annotation: Any) -> type[BaseModel] | None:
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return next(filter(None, map(_nested, get_args(annotation))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _explain(key: str, detail: ErrorDetails) -> Problem:
    context, value = detail.get("ctx", {}), detail["input"]
    if detail["type"] == "value_error":
        # The field's owner wrote the line: "reason; mend", with the key in front where it speaks of a whole section.
        line = str(context["error"])
        named = re.match(rf"({key}\.[\w.]*\w)(?: =)? ", line)
        if named:
            return Problem(named[1], *_parted(line[named.end() :]))
        reason, mend = _parted(line)
        shown = not isinstance(value, str | int | float) or str(value) in reason
        return Problem(key, reason if shown else f"{_shown(value)}: {reason}", mend)
    if detail["type"] == "missing":
        if isinstance(detail["loc"][-1], int):
            return Problem(key, "has too few values", "give them all")
        return Problem(key, "has no value", "give it")
    if detail["type"] == "literal_error":
        expected = context["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        near = nearest(str(value), expected)
        mend = f"did you mean {near}? " if near else ""
        return Problem(key, f"{_shown(value)} is not known", f"{mend}choose one of {', '.join(expected)}")
    mend = next((text for start, text in _MENDS.items() if detail["type"].startswith(start)), detail["msg"])
    return Problem(key, f"{_shown(value)} is not possible", mend.format(**context))


def _parted(line: str) -> tuple[str, str]:
    reason, _, mend = line.partition("; ")
    return reason, mend


_MENDS = {
    "int": "give a whole number",
    "float": "give a number",
    "finite_number": "give a finite number",
    "bool": "give true or false",
    "string": "give a text",
    "tuple": "give a list",
    "list": "give a list",
    "path": "give a path",
    "dict": "give a table",
    "greater_than_equal": "give at least {ge}",
    "greater_than": "give more than {gt}",
    "less_than_equal": "give at most {le}",
    "less_than": "give less than {lt}",
    "none_required": "leave it out",
}


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
