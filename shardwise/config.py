"""A job's configuration: one TOML file, overridable by dotted `key=value`."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from shardwise import toml
from shardwise.corpus.config import DataConfig
from shardwise.models.config import ModelConfig
from shardwise.optimizers import OptimizerConfig
from shardwise.plan import Plan
from shardwise.problems import Problem, ProblemError, from_validation, nearest, unknown_key
from shardwise.training.config import CheckpointConfig, LogConfig, TrainConfig


class ConfigError(ProblemError):
    """A configuration that cannot be used: one line for each problem, with its key, reason and mend."""


class Config(BaseModel):
    """Everything that determines a job, by section; every section and key has a default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    plan: Plan = Plan()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    def to_toml(self) -> str:
        """The resolved configuration, every key written out; `load` reads it back to an equal one."""
        return toml.write(self.model_dump(mode="json", exclude_none=True))

    def check(self, num_ranks: int | None = None) -> list[Problem]:
        """All problems between sections at once; an empty list when the job can run.

        Args:
            num_ranks: ranks that are there; None leaves the rule out.
        """
        problems = self.plan.check(model=self.model, num_ranks=num_ranks, batch=self.data.batch)
        if self.data.sequence > self.model.sequence:
            reason = f"{self.data.sequence} is longer than the model's {self.model.sequence} tokens"
            problems.append(Problem("data.sequence", reason, f"lower it or set model.sequence to {self.data.sequence}"))
        return problems

    def require(self, num_ranks: int | None = None) -> None:
        """Raises ConfigError with every problem `check` finds, if it finds any."""
        problems = self.check(num_ranks)
        if problems:
            raise ConfigError(problems)


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration and checks it as a whole.

    Args:
        path: a TOML file with the sections of `Config`; None takes the defaults.
        overrides: `section.key=value` texts that win over the file, the last of several; the value is TOML, and a bare
            word is a text.

    Raises:
        ConfigError: with every problem of the keys and values, or, if there are none, of how they go together.
    """
    tables = _read(Path(path)) if path is not None else {}
    for override in overrides:
        names, value = _override(override)
        node = tables
        for name in names[:-1]:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        node[names[-1]] = value
    config = _validate(tables)
    config.require()
    return config


def _validate(tables: dict[str, Any]) -> Config:
    sections: dict[str, type[BaseModel]] = {
        name: field.annotation for name, field in Config.model_fields.items() if isinstance(field.annotation, type)
    }
    keys = [f"{name}.{key}" for name, section in sections.items() for key in section.model_fields]
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for name, table in tables.items():
        section = sections.get(name)
        if section is None:
            problems.append(_unknown_section(name, table, list(sections), keys))
        elif not isinstance(table, dict):
            problems.append(Problem(name, f"{toml.value(table)} is not a section", f"give keys, as {name}.KEY=VALUE"))
        else:
            unknown = [key for key in table if key not in section.model_fields]
            problems.extend(unknown_key(f"{name}.{key}", section.model_fields, keys) for key in unknown)
            try:
                # As JSON, strict validation takes a list for a tuple and a text for a path, but no text for a number.
                known = json.dumps({key: table[key] for key in table if key not in unknown}, default=str)
                values[name] = section.model_validate_json(known, strict=True)
            except ValidationError as error:
                problems.extend(from_validation(error, section, name))
    if problems:
        raise ConfigError(problems)
    return Config(**values)


def _unknown_section(name: str, table: object, sections: list[str], keys: list[str]) -> Problem:
    if not isinstance(table, dict):
        return unknown_key(name, sections, keys)
    near = nearest(name, sections)
    inner = next(iter(table), None)
    if near is None or f"{near}.{inner}" not in keys:
        return unknown_key(name, sections)
    return Problem(f"{name}.{inner}", "no such section", f"did you mean {near}.{inner}?")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = nearest(path.name, [file.name for file in path.parent.glob("*.toml")])
        hint = f"did you mean {path.with_name(near)}?" if near else "give the path of a TOML file"
        raise ConfigError([Problem(str(path), "no such file", hint)]) from None
    except IsADirectoryError:
        raise ConfigError([Problem(str(path), "is a folder", "give the path of a TOML file")]) from None
    except OSError as error:
        raise ConfigError([Problem(str(path), "cannot be read", str(error.strerror))]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), f"is not TOML: {error}", "mend the syntax there")]) from None


def _override(text: str) -> tuple[list[str], object]:
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise ConfigError([Problem(text, "is not key=value", "write it as plan.replicate=2")])
    names = key.split(".")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError as error:
        if value[:1] in ("[", "{", '"', "'"):
            raise ConfigError([Problem(key, f"{value} is not a TOML value: {error}", "mend or quote it")]) from None
        return names, value
    # What TOML takes for a date is a text here: no key is a date.
    plain = len(parsed) == 1 and isinstance(parsed["value"], (str, int, float, list, dict))
    return names, parsed["value"] if plain else value
