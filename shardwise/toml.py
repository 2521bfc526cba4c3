"""Plain data to TOML text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomlkit


def write(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML text of one table for each section; tables inside a section are written inline."""
    document = tomlkit.document()
    for section, values in tables.items():
        table = tomlkit.table()
        for name, item in values.items():
            table.add(name, _inline(item))
        document.add(section, table)
    return tomlkit.dumps(document)


def value(item: object) -> str:
    """One value as TOML writes it, for messages."""
    return str(tomlkit.item(_inline(item)).as_string())


def _inline(item: Any) -> Any:
    if not isinstance(item, Mapping):
        return item
    table = tomlkit.inline_table()
    table.update({name: _inline(inner) for name, inner in item.items()})
    return table
