"""The checkpoints of a run: written whole or not at all, beside training, and found again.

A checkpoint is written to `step-N.part`, every file fsynced and its checksum noted, and then renamed to `step-N`; so
whatever moment a job dies at, the folders named `step-N` are whole. Old ones are renamed before they are deleted.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from shardwise.training import storage
from shardwise.training.config import CheckpointConfig
from shardwise.training.display import count
from shardwise.training.ranks import Ranks, RanksFailed
from shardwise.training.storage import CheckpointError, Staged, Stager, State, Writer

FACTS = "state.json"
FORMAT = 1
LOSS_SCALE = "loss_scale"  # its key in a state


def steps_in(folder: Path) -> list[int]:
    """The steps whose checkpoints are in a folder, in order."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself besides tensors: step, samples, tokens, the plan and versions that wrote it."""
    facts = json.loads((checkpoint / FACTS).read_text())
    if facts.get("format") != FORMAT:
        raise CheckpointError(f"{checkpoint} has format {facts.get('format')}, this version reads {FORMAT}")
    return cast(dict[str, Any], facts)


def without_other_scale(state: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """What of a state to load: its loss scale only where the checkpoint has one of its kind; else it starts anew."""
    found = storage.metadata_of(checkpoint).state_dict_metadata.get(LOSS_SCALE)
    if LOSS_SCALE not in state or tuple(getattr(found, "size", ())) == tuple(state[LOSS_SCALE].shape):
        return state
    return {key: value for key, value in state.items() if key != LOSS_SCALE}


def find(place: Path, warn: Callable[[str], None], ranks: Ranks | None = None, step: int | None = None) -> Path:
    """The newest whole checkpoint in a run folder or its `checkpoints` folder, or the checkpoint itself. Collective.

    Args:
        place: where to look.
        warn: is told of every damaged checkpoint that was passed over.
        ranks: those that look together.
        step: take this one and no other.

    Raises:
        CheckpointError: there is none.
    """
    ranks = ranks or Ranks()
    if (place / storage.MANIFEST).exists():
        candidates = [place]
    else:
        folder = place / "checkpoints" if (place / "checkpoints").is_dir() else place
        candidates = [path_of(folder, found) for found in steps_in(folder) if step is None or found == step]
    for candidate in reversed(candidates):
        problem = storage.damage(candidate, ranks)
        if problem is None:
            return candidate
        warn(problem)
    which = "checkpoint" if step is None else f"checkpoint of step {step}"
    raise CheckpointError(
        f"{place} holds no {'whole ' if candidates else ''}{which}; name a run folder of shardwise train"
    )


class Checkpoints:
    """Writes, retains and restores the checkpoints of one run. Every method is collective.

    Args:
        folder: where they are.
        config: when and how many; see CheckpointConfig.
        ranks: those of the job, for what happens between steps.
        writers: the same ranks on another group, for the thread that writes.
        warn: takes one line for the user; called on rank 0 only, from any thread.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, ranks: Ranks, writers: Ranks, warn: Callable[[str], None]
    ) -> None:
        self.folder = folder
        self.config = config
        self.failure: str | None = None
        self._ranks = ranks
        self._writers = writers
        self._warn = warn if ranks.rank == 0 else lambda line: None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._stager = Stager(ranks, copy=config.asynchronous)
        self._written: int | None = None

    def prepare(self) -> None:
        """Makes the folder, and clears what a job that died has left half done.

        Raises:
            CheckpointError: the folder cannot be written.
        """

        def clear() -> None:
            if self._ranks.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                for entry in self.folder.iterdir():
                    if re.fullmatch(r"step-\d+\.(part|old)", entry.name):
                        shutil.rmtree(entry)
            probe = self.folder / f".writable-{self._ranks.rank}"
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()

        try:
            self._ranks.together(clear)
        except RanksFailed as error:
            raise CheckpointError(f"{self.folder} cannot be written: {error}; choose another train.run") from None

    def latest(self) -> Path | None:
        """The newest whole checkpoint, None when there are none. Damaged ones are renamed, and a warning names them.

        Raises:
            CheckpointError: there are checkpoints, and none is whole.
        """
        steps = self._ranks.broadcast(steps_in(self.folder))
        for position, step in reversed(list(enumerate(steps))):
            path = path_of(self.folder, step)
            problem = storage.damage(path, self._ranks)
            if problem is None:
                self._written = step
                return path
            before = f"going back to step {steps[position - 1]}" if position else "there is none before it"
            self._warn(f"{problem}; {before}")
            if self._ranks.rank == 0:
                _move_aside(path, "damaged")
        if steps:
            raise CheckpointError(f"no checkpoint in {self.folder} is whole; start a new run with another train.run")
        return None

    def save(self, step: int, state: State, facts: dict[str, Any]) -> None:
        """Writes a checkpoint. An asynchronous one is only copied now, and the next step may change the state at once;
        of state on disk (`plan.offload`) it is written now.

        If it cannot be written, the user is told and `failure` says why; what is on disk is left as it is.

        Args:
            step: its number.
            state: see `storage`.
            facts: JSON values to keep beside the tensors.
        """
        self.wait()
        if self._written == step:
            return
        part = path_of(self.folder, step).with_suffix(".part")
        staged = self._stager.stage(state)
        # What is not in memory is not copied: it is written before the next step changes it.
        if self.config.asynchronous and not staged.away:
            self._writing = self._thread.submit(self._write, step, part, staged, facts)
        else:
            self._write(step, part, staged, facts)

    def wait(self) -> None:
        """Waits until nothing is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def save_last(self, step: int, state: State, facts: dict[str, Any]) -> None:
        """Writes the checkpoint a job ends with, trying for `config.patience` seconds while the state is in memory.

        Raises:
            CheckpointError: it could not be written.
        """
        deadline = time.monotonic() + self.config.patience
        pause = min(1.0, self.config.patience / 4)
        while True:
            self.save(step, state, facts)
            self.wait()
            if self.failure is None:
                return
            if self._ranks.broadcast(time.monotonic() + pause >= deadline):
                raise CheckpointError(f"the checkpoint of step {step} is lost: {self.failure}")
            self._warn(f"the state is kept in memory: mend {self.folder}; trying again in {pause:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, 60.0)

    def close(self) -> None:
        """Waits until nothing is being written, and ends the thread."""
        self.wait()
        self._thread.shutdown()

    def _write(self, step: int, part: Path, staged: Staged, facts: dict[str, Any]) -> None:
        """Runs in the thread when asynchronous."""
        try:
            self._write_together(step, part, staged, facts)
        except RanksFailed as error:
            if self._writers.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            self.failure = f"{self.folder}: {error}"
            kept = steps_in(self.folder)
            self._warn(
                f"the checkpoint of step {step} was not written: {self.failure}; "
                + (f"that of step {kept[-1]} is the last good one" if kept else "there is no earlier one")
            )
            return
        self.failure = None
        self._written = step

    def _write_together(self, step: int, part: Path, staged: Staged, facts: dict[str, Any]) -> None:
        needed = sum(self._writers.gather(staged.num_bytes))
        self._writers.together(lambda: _make_room(part, needed) if self._writers.rank == 0 else None)
        writer = Writer(part, self._writers.rank)
        outcomes = self._writers.together(lambda: (writer.write(staged), writer.written))

        def finish() -> None:
            if self._writers.rank != 0:
                return
            writer.finish(staged.metadata, [results for results, _ in outcomes])
            storage.write_json(part / FACTS, {"format": FORMAT, "step": step, **facts})
            files = {name: entry for _, written in outcomes for name, entry in written.items()}
            files |= writer.written | {FACTS: storage.checksum(part / FACTS)}
            storage.write_json(part / storage.MANIFEST, {"format": FORMAT, "files": files})
            storage.sync_folder(part)
            _commit(part, path_of(self.folder, step))
            self._retain()

        self._writers.together(finish)

    def _retain(self) -> None:
        steps = steps_in(self.folder)
        for step in steps[: -self.config.keep]:
            if self.config.keep_every and step % self.config.keep_every == 0:
                continue
            try:
                shutil.rmtree(_move_aside(path_of(self.folder, step), "old"))
            except OSError as error:
                self._warn(f"an old checkpoint could not be removed: {error}")


def _make_room(part: Path, needed: int) -> None:
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    free = shutil.disk_usage(part).free
    if free < needed:
        reason = f"{os.strerror(errno.ENOSPC)} ({count(needed)}B are needed, {count(free)}B are free)"
        raise OSError(errno.ENOSPC, reason)


def _commit(part: Path, final: Path) -> None:
    if final.exists():
        shutil.rmtree(_move_aside(final, "old"))
    os.rename(part, final)
    storage.sync_folder(final.parent)


def _move_aside(path: Path, suffix: str) -> Path:
    """Renames a checkpoint so that it no longer counts as one."""
    aside = path.with_suffix(f".{suffix}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    return aside
