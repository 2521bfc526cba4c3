"""Every key of a configuration: what it takes, its default and its meaning, from the models that check them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwise.config import Config
from shardwise.plan_rules.built import BUILT

PAGE = """# Every key of a configuration

A configuration is one TOML file; each of its sections and keys may be left out. On the command line
`SECTION.KEY=VALUE` wins over the file. In Python the keys of `[plan]` are the arguments of `shardwise.Plan`. What goes
with what is checked before anything starts, and told with the mend ([combinations](combinations.md)).
`shardwise train --keys` prints this table.

"""
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true, false", "null": ""}


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: with its section, "plan.replicate".
        takes: the values that are possible, as a text; the rules between keys come on top.
        default: as TOML writes it; "" where a key that is left out means something of its own.
        meaning: a sentence or two.
    """

    name: str
    takes: str
    default: str
    meaning: str


def keys(prefix: str = "") -> list[Key]:
    """The keys whose names begin so, in the order of their sections."""
    schema = Config.model_json_schema()
    found = (key for name, section in schema["properties"].items() for key in _of(name, section, schema["$defs"]))
    return [key for key in found if key.name.startswith(prefix)]


def markdown(rows: list[Key]) -> str:
    """A table for each section."""
    lines: list[str] = []
    section = ""
    for row in rows:
        name = row.name.partition(".")[0]
        if name != section:
            section = name
            lines += ["", f"## [{section}]", "", "| key | takes | default | meaning |", "|---|---|---|---|"]
        cells = (f"`{row.name}`", row.takes, f"`{row.default}`" if row.default else "", row.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:]) + "\n"


def show(console: Console) -> None:
    """All keys as a table."""
    table = Table("key", "takes", "default", "meaning", box=None, pad_edge=False)
    for row in keys():
        table.add_row(*(escape(cell) for cell in (row.name, row.takes, row.default, row.meaning)))
    console.print(table, highlight=False)


def _of(name: str, schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[Key]:
    inner = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if "properties" in inner:
        for key, part in inner["properties"].items():
            yield from _of(f"{name}.{key}", part, definitions)
        return
    takes = " or ".join(dict.fromkeys(filter(None, _takes(inner, definitions))))
    meaning = " ".join(schema.get("description", "").split()).rstrip(".")
    if len(BUILT.get(name.removeprefix("plan."), ())) == 1:
        meaning += ". Not built yet"
    default = schema.get("default")
    yield Key(name, takes, "" if default is None else json.dumps(default, ensure_ascii=False), meaning)


def _takes(schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        for choice in schema["anyOf"]:
            yield from _takes(choice, definitions)
    elif "enum" in schema or "const" in schema:
        yield ", ".join(str(value) for value in schema.get("enum", [schema.get("const")]))
    elif schema.get("type") == "array":
        yield "list"
    elif schema.get("type") == "object":
        yield "table"
    else:
        bounds = [f"{sign} {schema[bound]:g}" for bound, sign in _BOUNDS.items() if bound in schema]
        yield " ".join([_TYPES.get(schema.get("type", ""), ""), *bounds]).strip()


if __name__ == "__main__":
    sys.stdout.write(PAGE + markdown(keys()))
