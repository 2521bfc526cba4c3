"""Chrome traces of a few steps, one for each rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from shardwise.training.config import steps_of


class Profiler:
    """Traces the steps that `log.profile` names.

    Args:
        steps: "first:last", or empty to trace nothing.
        folder: where `rank-R.json` goes.
        rank: of this process.
        warn: takes one line for the user.
    """

    def __init__(self, steps: str, folder: Path, rank: int, warn: Callable[[str], None]) -> None:
        self._steps = steps_of(steps) if steps else range(0)
        self._path = folder / f"rank-{rank}.json"
        self._warn = warn
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """To be called before the step that is the `step`-th, counted from 0."""
        if self._profile is None and step in self._steps:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
        elif self._profile is not None and step not in self._steps:
            self.close()

    def close(self) -> None:
        """Writes the trace, if one was taken."""
        if self._profile is None:
            return
        taken, self._profile = self._profile, None
        taken.stop()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            taken.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            self._warn(f"the profile could not be written to {self._path}: {error}")
