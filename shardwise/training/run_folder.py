"""The folder of a run: what was asked for, what came of it, and all that is needed to do it again.

config.toml       the resolved configuration
starts.jsonl      one line for each start: time, command, versions, host, device, git commit
git-START.diff    what was not committed at that start
metrics.jsonl     rows of metrics
tokenizer/        the tokenizer
checkpoints/      step-N/ for each checkpoint
tensorboard/, timeline/, error-rank-N.txt where there is something to write
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch

from shardwise import toml
from shardwise.problems import Problem, ProblemError

Settings = Mapping[str, Mapping[str, Any]]


class RunError(ProblemError):
    """A run folder that cannot be used so."""


# What a run may not change while it continues: its parameters, or the order of its samples, would no longer be its own.
FIXED = ("model", "data")
FREE = ("model.dropout", "data.batch", "data.processes", "data.cache", "data.prefetch", "data.checksums")
SEED = "train.seed"
OPTIMIZER = "optimizer.name"  # another one's state does not fit


class RunFolder:
    """The paths of a run, and the lock that keeps two jobs out of one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.starts = path / "starts.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tokenizer = path / "tokenizer"
        self.tensorboard = path / "tensorboard"
        self.timeline = path / "timeline"
        self._lock: IO[str] | None = None

    @staticmethod
    def new_path(root: Path = Path("runs")) -> Path:
        """A path no run has yet, named after the time."""
        stem = datetime.now().strftime("%Y%m%d-%H%M%S")
        candidates = [root / stem, *(root / f"{stem}-{number}" for number in range(2, 1000))]
        return next(path for path in candidates if not path.exists())

    def error(self, rank: int) -> Path:
        """Where a rank leaves the traceback of what stopped it."""
        return self.path / f"error-rank-{rank}.txt"

    def create(self) -> None:
        """Makes the folder and locks it until this process ends.

        Raises:
            RunError: it cannot be written, or another job has it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "a+")  # noqa: SIM115 - held until the process ends
        except OSError as error:
            raise self._problem(f"cannot be written: {error.strerror}", "choose another folder") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another job"
            self.release()
            raise self._problem(f"is in use by {owner}", "stop that job or choose another folder") from None
        except OSError:
            return  # a file system without locks
        with contextlib.suppress(OSError):
            self._lock.truncate(0)
            self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._lock.flush()

    def release(self) -> None:
        """Lets another job have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def check(self, settings: Settings) -> None:
        """Refuses to continue the run under settings that it may not change.

        Raises:
            RunError: one line for each key of the model or the data, the seed or the optimizer's name that differs
                from what the run has.
        """
        problems = [
            Problem(
                key,
                f"{new!r} is not {old!r}, which the run in {self.path} has",
                "change it back, or start a new run with another train.run"
                + (f", from its parameters with checkpoint.initial={self.path}" if key == OPTIMIZER else ""),
            )
            for key, (old, new) in self.changes(settings).items()
            if key in (SEED, OPTIMIZER) or (key.split(".")[0] in FIXED and key not in FREE)
        ]
        if problems:
            raise RunError(problems)

    def record(self, settings: Settings, facts: Mapping[str, Any]) -> None:
        """Writes the configuration, one line about this start, and the difference to the last commit.

        Args:
            settings: the resolved configuration, by section.
            facts: what the caller knows of this start: seed, ranks, device, the step it starts from.

        Raises:
            RunError: the folder cannot be written.
        """
        changes = self.changes(settings)
        number = self.starts.read_text().count("\n") if self.starts.exists() else 0
        git, difference = git_state()
        try:
            self.config.write_text(toml.write(settings))
            if difference:
                (self.path / f"git-{number}.diff").write_text(difference)
            with open(self.starts, "a") as file:
                file.write(json.dumps({**facts, "changes": changes, "git": git, **environment()}) + "\n")
        except OSError as error:
            raise self._problem(f"cannot be written: {error.strerror}", "make room or choose another folder") from None

    def changes(self, settings: Settings) -> dict[str, tuple[Any, Any]]:
        """Key -> (value of the last start, value now), None where there is none; empty at the first start."""
        if not self.config.exists():
            return {}
        old, new = flattened(tomllib.loads(self.config.read_text())), flattened(settings)
        keys = sorted(key for key in old.keys() | new.keys() if _plain(old.get(key)) != _plain(new.get(key)))
        return {key: (old.get(key), new.get(key)) for key in keys}

    def _problem(self, reason: str, mend: str) -> RunError:
        return RunError([Problem("train.run", f"{self.path} {reason}", mend)])


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def flattened(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def environment() -> dict[str, Any]:
    """What this process runs on: versions of every installed package, host, command."""
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "packages": _packages(),
    }


@functools.cache
def _packages() -> dict[str, str]:
    """Name -> version. Read once: every look at a distribution's `metadata` parses its file anew."""
    found = (distribution.metadata for distribution in metadata.distributions())
    return dict(sorted((facts["Name"], facts["Version"]) for facts in found if facts["Name"]))


def git_state(folder: Path | None = None) -> tuple[dict[str, Any] | None, str]:
    """The commit a folder is at, and what differs from it; (None, "") outside of a repository.

    Args:
        folder: by default the current one, or, where that is in no repository, that of this package.
    """
    for place in [folder] if folder else [Path.cwd(), Path(__file__).parent]:
        commit = _git(place, "rev-parse", "HEAD")
        if commit is None:
            continue
        difference = _git(place, "diff", "HEAD") or ""
        untracked = (_git(place, "ls-files", "--others", "--exclude-standard") or "").splitlines()
        root = (_git(place, "rev-parse", "--show-toplevel") or "").strip()
        state = {
            "root": root,
            "commit": commit.strip(),
            "changed": bool(difference.strip()),
            "untracked": len(untracked),
        }
        return state, difference
    return None, ""


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
