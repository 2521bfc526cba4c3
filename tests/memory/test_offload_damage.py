"""What happens to the disk under a job whose state is there: one line, and the job goes on from its checkpoint."""

import gc
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise.config import Config
from shardwise.memory.offload_files import PREFIX
from shardwise.parallel import Parallel
from shardwise.training import job
from shardwise.training.faults import fault_of
from shardwise.training.placement import Placement
from tests.training.crash import offloaded, small_job, tensors

SAVED, STEPS = 3, 6


def trained(config: Config, run: Path, before_step: Callable[[int], None] = lambda step: None) -> str:
    """Train on this process as rank 0; the line that a launcher would show, "" if all went well.

    Args:
        before_step: called with the number of each step that is about to begin.
    """
    step = Parallel.step

    def watched(parallel: Parallel, *args: Any, **named: Any) -> Any:
        before_step(int(parallel.step_count))
        return step(parallel, *args, **named)

    with patch.object(Parallel, "step", watched):
        try:
            trainer = job.build(config, run, Placement())
            assert trainer.fit().finished
            trainer.parallel.close()
        except OSError as error:
            return fault_of(error, 0).text
        finally:
            trainer = None
            gc.collect()  # the process of a job ends with it, and so do its files
    return ""


def configured(folder: Path, state: Path, steps: int) -> Config:
    config = small_job(folder, steps, 0, schedule="constant", **(offloaded(state) | {"shard": 1}))
    return config.model_copy(update={"train": config.train.model_copy(update={"warmup": 1})})


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB, where this machine lets a test have one; else a folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    yield folder
    if mounted:
        # Lazily: a file without a name is there for as long as the traceback of what failed refers to it.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_whatever_happens_to_the_disk_is_one_line_and_the_job_goes_on(disk: Path, tmp_path: Path) -> None:
    assert trained(configured(tmp_path, tmp_path / "undisturbed", STEPS), tmp_path / "whole") == ""
    (disk / "scratch").mkdir()
    state, run = disk / "scratch" / "state", tmp_path / "run"
    assert trained(configured(tmp_path, state, SAVED), run) == ""
    config = configured(tmp_path, state, STEPS)

    def damaged(before_step: Callable[[int], None] = lambda step: None) -> str:
        line = trained(config, run, before_step)
        assert line.startswith("rank 0: plan.offload.")
        assert "\n" not in line
        return line

    if disk.is_mount():  # it has become full
        with (disk / "another's").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free)
        line = damaged()
        assert f": {state}: No space left on device (" in line
        assert line.endswith("GB are free); make room, name a folder on another disk, or leave the key out")
        (disk / "another's").unlink()

    (disk / "scratch").rename(disk / "away")
    assert f": {state}: there is no folder {disk / 'scratch'}; make it, name a folder on a disk" in damaged()
    (disk / "away").rename(disk / "scratch")
    # What a job left that died between a file's making and its unlinking.
    (state / f"{PREFIX}left").touch()

    def cut(step: int) -> None:
        for number in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{number}"
            if os.path.exists(path) and os.readlink(path).startswith(f"{state}/"):
                os.truncate(path, 100)

    line = damaged(cut)
    assert f": {state}: the file was cut to 100 bytes of " in line
    assert "continue from the last checkpoint" in line

    assert trained(config, run) == ""
    whole, found = tensors(tmp_path / "whole"), tensors(run)
    assert whole.keys() == found.keys()
    assert [name for name, value in whole.items() if not torch.equal(value, found[name])] == []
    assert os.listdir(state) == []
