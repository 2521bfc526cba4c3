"""Checkpoints in a training loop of one's own."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from shardwise.parallel import Parallel
from shardwise.training import random_state, storage
from shardwise.training.checkpoints import LOSS_SCALE, Checkpoints, facts_of, without_other_scale
from shardwise.training.config import CheckpointConfig
from shardwise.training.ranks import DAY, Ranks
from shardwise.training.storage import CheckpointError


class CheckpointFolder:
    """The checkpoints of a parallel model, `step-N` in a folder: parameters, buffers, optimizer state and loss scale.

    A checkpoint is there whole or not at all, whatever moment the job dies at, and loads into any other plan for the
    same model and optimizer. Every method is collective: all ranks call it. As a context manager it closes itself.

    Args:
        parallel: whose state it is; its `step_count` numbers the checkpoints.
        folder: one that all ranks see; made if it is not there. That of a run is RUN/checkpoints.
        keep: how many of the newest stay.
        asynchronous: whether `save` returns once the state is copied, and the copy is written beside the next steps.

    Raises:
        CheckpointError: the folder cannot be written.
    """

    def __init__(
        self, parallel: Parallel, folder: str | os.PathLike[str], *, keep: int = 2, asynchronous: bool = True
    ) -> None:
        self.path = Path(folder)
        self._parallel = parallel
        self._ranks = Ranks.world()
        config = CheckpointConfig(keep=keep, asynchronous=asynchronous)
        self._loading = False
        self._checkpoints = Checkpoints(self.path, config, self._ranks, Ranks.world(DAY), self._warn)
        self._checkpoints.prepare()

    def save(self, **facts: Any) -> None:
        """Write a checkpoint of the state as it is now; the model may be trained on at once.

        Args:
            facts: JSON values that `load` gives back, such as where the data is.

        Raises:
            CheckpointError: this one, or an asynchronous one before it, could not be written; earlier ones are as they
                were.
        """
        self._settle()
        step = int(self._parallel.step_count)
        self._checkpoints.save(step, self._parallel.state_dict(), {"facts": facts})
        self._raise()

    def load(self) -> dict[str, Any] | None:
        """Take the state of the newest whole checkpoint. A damaged one is passed over with a warning.

        Returns:
            the facts it was saved with; None if the folder has no checkpoint, and nothing is changed.

        Raises:
            CheckpointError: none is whole, or it is that of another model or optimizer.
        """
        self._settle()
        self._loading = True
        path = self._checkpoints.latest()
        self._loading = False
        if path is None:
            return None
        state = without_other_scale(dict(self._parallel.state_dict()), path)
        storage.load(state, path, self._ranks, spare=(random_state.PREFIX, LOSS_SCALE))
        self._parallel.loaded()
        return cast(dict[str, Any], facts_of(path)["facts"])

    def close(self) -> None:
        """Wait until what is being written is there.

        Raises:
            CheckpointError: it could not be.
        """
        self._checkpoints.close()
        self._raise()

    def _warn(self, line: str) -> None:
        if self._loading:  # what fails while it is written is raised
            warnings.warn(line, stacklevel=4)

    def _settle(self) -> None:
        self._checkpoints.wait()
        self._raise()

    def _raise(self) -> None:
        failure, self._checkpoints.failure = self._checkpoints.failure, None
        if failure is not None:
            raise CheckpointError(f"a checkpoint was not written: {failure}")

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
